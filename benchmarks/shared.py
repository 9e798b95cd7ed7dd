"""What the workers of a group share: one function for each kind of processes, called once in each of them."""

from __future__ import annotations

from typing import Any


def stock() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def replicast() -> Any:
    import replicast

    return replicast.Strategy()


def torch() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    return torch.distributed


def mpi() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD
