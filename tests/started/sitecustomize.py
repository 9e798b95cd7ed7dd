"""Python reads this at the start of every process that a test starts: half of a start's CPU time is saved.

- Collecting garbage while TensorFlow is imported, and once more all of it at the exit, finds nothing.
- Keras imports scikit-learn (and so SciPy), IPython and matplotlib only because the demo, a notebook or the
  bench has them installed.

`PYTHONPATH` leads here: `tests/conftest.py` sets it. With REPLICAST_TEST_AS_USERS=1 a process starts and
exits as those of users do: the jobs of `tests/long`, and one of `tests/faults/test_endings.py`.
"""

import atexit
import gc
import os
import sys

if os.environ.get("REPLICAST_TEST_AS_USERS") != "1":
    gc.set_threshold(100_000, 20, 20)
    atexit.register(gc.freeze)  # the first one registered is the last one called
    for name in ("sklearn", "IPython", "matplotlib"):
        sys.modules[name] = None  # type: ignore[assignment]
