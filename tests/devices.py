"""Several devices in one worker without GPUs: `python -m tests.devices 2 script.py arguments`."""

from __future__ import annotations

import runpy
import sys
from typing import Any


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


if __name__ == "__main__":
    play_devices(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
