"""Python reads this at the start of every process that a test starts: half of a start's CPU time is saved.

- Collecting garbage while TensorFlow is imported, and once more all of it at the exit, finds nothing.
- Keras imports scikit-learn, and with it SciPy, only because the demo has it installed.

`PYTHONPATH` leads here: `tests/conftest.py` sets it. `tests/long` has jobs that need scikit-learn.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(100_000, 20, 20)
atexit.register(gc.freeze)  # the first one registered is the last one called
if "REPLICAST_TEST_SKLEARN" not in os.environ:
    sys.modules["sklearn"] = None  # type: ignore[assignment]
