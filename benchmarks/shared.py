"""What the workers of a group share: one function for each kind of processes, called once in each of them."""

from __future__ import annotations

import os
from typing import Any


def stock() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def replicast() -> Any:
    import replicast

    return replicast.Strategy()


def hosts_broadcast() -> Any:
    """As if the hosts could not connect to each other: updates go by TensorFlow's broadcast."""
    strategy = replicast()
    del os.environ["TF_CONFIG"]
    return strategy


def torch() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    return torch.distributed


def mpi() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD
