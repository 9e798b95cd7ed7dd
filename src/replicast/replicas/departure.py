"""A worker's part in leaving: on SIGTERM, all workers save at one boundary and exit.

SIGTERM arrives at one worker or at all, or a script calls `replicas.leave()`. Each such worker requests the
operation "leave" (`core/operations/attempt.py`): all save at one boundary, and the processes exit with 143.

A script may have several models. The one that reaches a boundary first leaves, and saves the other models
too: all workers are at the same line of the script then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from replicast.config import TOLD_TO_END, read_launch
from replicast.errors import ClusterError, ReplicastError
from replicast.replicas.job_checkpoints import Checkpoints
from replicast.replicas.position import Training
from replicast.replicas.session import Session

logger = logging.getLogger("replicast")

WRONG_CALLS = 100  # how often the end of a script retries while another worker is still at another call
REPEAT_SECS = 5.0
# How long to wait until the main thread runs Python code. That of a Ray worker does so every few seconds.
MAIN_THREAD_SECS = 2.5
# Modules whose handlers do no more than the default one: they end the process.
_ONLY_EXITS = ("ray._private.worker",)
_AS_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
# What the main thread will be asked to run: the interpreter holds no reference, and may run it late.
_PENDING: list[object] = []


@dataclass(eq=False, repr=False)
class Departure:
    """One model's part in leaving. For the training thread; `ask` for any thread and signal handler.

    `companions` are those of all models of the script. `answer` tells those outside the job who have asked
    the workers to exit why the state was not saved, or nothing.
    """

    session: Session
    checkpoints: Checkpoints
    training: Training
    companions: list[Departure]
    answer: Callable[[str], None]
    left: bool = False

    @property
    def ends(self) -> bool:
        """Whether the script has reached its end and need not be told to exit."""
        return self.session.script_ended

    def ask(self) -> None:
        if not self.left and not self.ends:
            self.session.request("leave")

    def settle(self) -> None:
        """Settles open proposals together with all workers, unless all have left already."""
        for _ in range(WRONG_CALLS):
            if self.left:
                return
            try:
                self.session.begin()
                if not self.left:
                    self.session.rest("close")
            except ClusterError as error:
                # Another worker is at another call: both get this error, and it reaches its end later.
                logger.warning("worker %d is at the end of its script. %s", self.session.rank, error)
            else:
                return

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """Called at a boundary of all workers, after the save; then the process exits."""
        if self.checkpoints.store is None:
            problem = "There is no run directory"
        elif problem:
            problem = self.checkpoints.why_not_written() or problem
        self._say(problem)
        if asked_by:
            self.answer(problem)
        for other in self.companions:
            if not other.left and other.training.has_begun:
                other._save_too()
        # Worker 0 hosts the coordination service: the others may still read from it.
        with contextlib.suppress(ReplicastError):
            self.session.exchange.agree("leave", "", self.session.timeouts.answer_secs)

    def _save_too(self) -> None:
        """Saves this model while another one leaves. All workers do so, and worker 0 reports the result."""
        try:
            problem = self.checkpoints.save_before_leaving()
        except (ReplicastError, OSError) as error:
            problem = str(error)
        with contextlib.suppress(ReplicastError):
            secs = self.session.timeouts.join_secs
            problem = self.session.exchange.agree("saved", problem, secs)[0] or problem
        self._say(problem)

    def _say(self, problem: str) -> None:
        self.left = True
        which = f" ({self.session.exchange.name})" if len(self.companions) > 1 else ""
        said = f"the state is not saved. {problem}" if problem else "the state is saved"
        logger.warning("worker %d was told to exit: %s%s", self.session.rank, said, which)


def leave_on_sigterm(departures: Sequence[Departure]) -> None:
    """Makes all models of the script leave on SIGTERM; those of later calls too."""

    def told() -> None:
        training = [one for one in departures if one.training.active]
        for one in training:
            one.ask()
        if not training and not any(one.left or one.ends for one in departures):
            logger.warning("this worker was told to exit outside of a training: nothing is saved")
            sys.exit(TOLD_TO_END)

    if not on_sigterm(told):
        logger.warning(
            "On SIGTERM this worker saves nothing: only the main thread can set a signal handler, and this "
            "Replicas was created in another thread. Call replicas.leave() when the machine is to be taken "
            "away"
        )


class SigtermHandler:
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
        if isinstance(there, SigtermHandler):
            there.act = act
        elif _may_replace(there):
            signal.signal(signal.SIGTERM, SigtermHandler(act, now))

    there = signal.getsignal(signal.SIGTERM)
    if isinstance(there, SigtermHandler):
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
