"""SIGTERM as a request to leave, including repeated signals, also for training outside the main thread.

Outside of `replicas/`, so that it can be loaded, and tested, without TensorFlow.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from replicast.config import read_launch

REPEAT_SECS = 5.0
# How long to wait until the main thread runs Python code. That of a Ray worker does so every few seconds.
MAIN_THREAD_SECS = 2.5
# Modules whose handlers do no more than the default one: they end the process.
_ONLY_EXITS = ("ray._private.worker",)
_AS_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
# What the main thread will be asked to run: the interpreter holds no reference, and may run it late.
_PENDING: list[object] = []


class Handler:
    """Calls `act` on the first SIGTERM.

    A signal to a whole process group or cgroup reaches a worker twice: directly, and through its launcher,
    which passes it on. A repeated signal must not end a process that is writing its last checkpoint. With a
    launcher, repeated signals are ignored: the launcher kills the process after its timeout. Without one,
    they are ignored for `REPEAT_SECS`; after that a signal ends the process at once.
    """

    def __init__(self, act: Callable[[], object], now: Callable[[], float]) -> None:
        self.act = act
        self._now = now
        self._launched = read_launch(os.environ).launched
        self._process = os.getpid()
        self._told_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by the interpreter."""
        if os.getpid() != self._process:  # A forked child inherits our handler, but does not train.
            _end()
        elif self._told_at is None:
            self._told_at = self._now()
            self.act()
        elif not self._launched and self._now() - self._told_at >= REPEAT_SECS:
            _end()


def on_sigterm(act: Callable[[], object], *, now: Callable[[], float] = time.monotonic) -> bool:
    """Sets a handler that calls `act` on SIGTERM, unless the script has its own handler."""

    def set_handler() -> None:
        there = signal.getsignal(signal.SIGTERM)  # Again: it may be some time since it was looked at.
        if isinstance(there, Handler):
            there.act = act
        elif _may_replace(there):
            signal.signal(signal.SIGTERM, Handler(act, now))

    there = signal.getsignal(signal.SIGTERM)
    if isinstance(there, Handler):
        there.act = act
    return not _may_replace(there) or _in_main_thread(set_handler)


def _may_replace(handler: object) -> bool:
    return handler is signal.SIG_DFL or getattr(handler, "__module__", None) in _ONLY_EXITS


def _in_main_thread(act: Callable[[], object]) -> bool:
    """Runs a function in the main thread; returns False if that does not run Python code for some time."""
    if threading.current_thread() is threading.main_thread():
        act()
        return True
    done = threading.Event()

    def run(_: int | None) -> int:
        act()
        done.set()
        return 0

    call = _AS_PENDING_CALL(run)
    _PENDING.append(call)
    ctypes.pythonapi.Py_AddPendingCall(call, None)
    return done.wait(MAIN_THREAD_SECS)


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
