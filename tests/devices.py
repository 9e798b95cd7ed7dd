"""Several devices in one worker without GPUs: `python -m tests.devices 2 script.py arguments`.

What else happens to the script is in the environment variable `HAPPENS`: see `make_happen`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

HAPPENS = "REPLICAST_TEST_HAPPENS"
HOLD_SECS = 120.0


def play_devices(count: int) -> None:
    """Makes stock strategies of this process find this many devices. Before TensorFlow is used."""
    import tensorflow as tf

    # No public way: a stock MultiWorkerMirroredStrategy takes all GPUs, or one CPU.
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)

    def devices(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{place}" for place in range(count)), "CPU"

    CollectiveAllReduceExtended._initialize_local_devices = devices


def make_happen(plan: dict[str, Any]) -> None:
    """Before a boundary: `hold` waits at a step for a file, `flip` changes one bit of a variable on the last
    device of worker 1 at a step, `kill` ends worker 1 at a step of the first attempt."""
    from replicast.replicas.joined_worker import JoinedWorker

    stock = JoinedWorker.boundary

    def boundary(self: JoinedWorker, **given: Any) -> None:
        step, rank = self.session.step + 1, self.session.rank
        deadline = time.monotonic() + HOLD_SECS
        while step == plan.get("hold") and not Path(plan["file"]).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if step == plan.get("flip") and rank == 1:
            one = self.state._components[plan["variable"]][-1]
            value = one.numpy()
            value.reshape(-1).view("u4")[0] ^= 1
            one.assign(value)
        if step == plan.get("kill") and rank == 1 and self.session.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        stock(self, **given)

    JoinedWorker.boundary = boundary  # type: ignore[method-assign]


if __name__ == "__main__":
    play_devices(int(sys.argv[1]))
    if HAPPENS in os.environ:
        make_happen(json.loads(os.environ[HAPPENS]))
    sys.modules.pop(
        "sklearn", None
    )  # which `tests/started` hides from Keras: the examples have their data there
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
