"""The moment in which TensorFlow connects the workers, which have met before.

It is one call that holds Python's lock until all workers are connected: no thread and no signal handler of
Python runs meanwhile. It takes less than a second, unless a worker or its host is lost just then.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

import tensorflow as tf

from replicast.config import Cluster
from replicast.coordination import unregistered_workers
from replicast.errors import ClusterError

REGISTER_SECS = 60.0
"""How long TensorFlow may take to connect the workers, all of which have met. Its own limit is an hour.

Before it connects, each worker initializes its devices, for which a GPU's driver may need many seconds.
"""
_SIGACTION_BYTES = 512
"""More than a `struct sigaction` has anywhere."""


@contextlib.contextmanager
def connecting(cluster: Cluster | None) -> Iterator[None]:
    """Ctrl-C ends the process at once in this context, and an error of TensorFlow says who is missing.

    SIGTERM does not: before it connects, TensorFlow installs a handler of its own, which ends nothing.
    Afterwards SIGTERM does again what it did before.
    """
    try:
        with _kept(signal.SIGTERM), _ended_by_ctrl_c():
            yield
    except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError) as error:
        if cluster is None:
            raise
        missing = [
            worker for worker in unregistered_workers(str(error), cluster.chiefs) if worker < cluster.size
        ]
        names = ", ".join(f"worker {worker} ({cluster.addresses[worker]})" for worker in missing)
        raise ClusterError(
            f"All workers had met, but TensorFlow could not connect worker {cluster.rank} with {names} "
            f"within {REGISTER_SECS:.0f} s",
            remedy="A process or a host was lost, or stopped, in this moment: start all workers again",
        ) from error


@contextlib.contextmanager
def _kept(signum: int) -> Iterator[None]:
    """Afterwards the process does on a signal what it did before.

    Not with the module `signal`, which can do this in the main thread only, and only for its own handlers.
    """
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signum, None, before)
    try:
        yield
    finally:
        libc.sigaction(signum, before, None)


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # ignored, or the script's own
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
