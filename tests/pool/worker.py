"""One worker of a pool: `python -m tests.pool.worker`, started and fed by `tests.pool.process`."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.pool.messages import PARENT, SOCKET, STACKS, WITH_STRATEGY, Outcome, Raised, Returned

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when pytest goes, however it goes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        sys.exit("the process that started this worker has already gone")


def show_stacks_on_signal() -> None:
    """SIGUSR1 writes where every thread stands; a fatal signal writes it into the log."""
    faulthandler.enable()
    stacks = Path(os.environ[STACKS]).open("w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def connect() -> Connection:
    """Takes over the inherited end of the socket; processes started by a test must not hold it open."""
    descriptor = int(os.environ[SOCKET])
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def build_strategy() -> Any:
    """The strategy that every function on this worker gets, or None for a pool without TensorFlow."""
    wanted = os.environ[WITH_STRATEGY]
    if wanted == "False":
        return None
    if wanted != "True":
        return stock_strategy(int(wanted))
    import replicast
    from tests.pool.start import observed

    with observed():
        return replicast.Strategy()


def stock_strategy(devices: int) -> Any:
    """A strategy of TensorFlow with this many devices."""
    import tensorflow as tf

    from tests.devices import play_devices

    play_devices(devices)
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy([f"CPU:{place}" for place in range(devices)])


def serve(connection: Connection, strategy: Any) -> None:
    """Runs one call after the other until the pool closes its end."""
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        outcome = run(message, strategy)
        try:
            reply = pickle.dumps(outcome)
        except Exception:
            reply = pickle.dumps(Raised(f"The result cannot be sent.\n{traceback.format_exc()}"))
        connection.send_bytes(reply)
        del outcome, reply, message


def run(message: bytes, strategy: Any) -> Outcome:
    """Runs one call as if nothing had run here before."""
    try:
        if strategy is not None:
            start_afresh()
        call = pickle.loads(message)  # imports the test module, the first time
        print(f"=== {call.function.__module__}.{call.function.__qualname__}", flush=True)
        return Returned(call.function(strategy, *call.args, **call.kwargs))
    except BaseException as error:  # pytest.fail() is no Exception, and nothing may end the loop
        return Raised("".join(traceback.format_exception(error)))
    finally:
        sys.stdout.flush()


def start_afresh() -> None:
    """Puts back what tests change for a whole process: names, dtypes, seeds, switches."""
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.config import disable_op_determinism  # no public way back

    keras.utils.clear_session()  # collects what the last test left
    gc.freeze()  # what is imported stays: otherwise each collection would look through all of it again
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(1234)
    tf.config.run_functions_eagerly(False)
    disable_op_determinism()


if __name__ == "__main__":
    die_with_parent()
    show_stacks_on_signal()
    channel = connect()
    try:
        kept_until_exit = build_strategy()
    except Exception:
        channel.send_bytes(pickle.dumps(Raised(traceback.format_exc())))
        raise
    channel.send_bytes(pickle.dumps(Returned(None)))
    gc.freeze()  # collecting before each call need not look through TensorFlow's own objects again
    serve(channel, kept_until_exit)
