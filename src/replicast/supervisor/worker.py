"""One worker process: how it starts, how it is told to stop with all its children, how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replicast.processes import is_frozen
from replicast.supervisor.output import Output
from replicast.supervisor.plan import WorkerPlan

_BIRTH = Path(__file__).with_name("birth.py")
_END_SECS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        rank: The worker.
        code: Its exit code, or minus the number of the signal that ended it.
        ran_secs: How long it ran.
        log: The file with all of its output.
        tail: Its last lines.
        stopped: Whether the launcher had told it to stop before.
        frozen: Whether it was stopped by a signal such as SIGSTOP when another worker failed.
    """

    rank: int
    code: int
    ran_secs: float
    log: Path
    tail: tuple[str, ...] = ()
    stopped: bool = False
    frozen: bool = False

    @property
    def shell_code(self) -> int:
        """The exit code as shells count: 128 and the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.frozen:
            return "frozen by a signal such as SIGSTOP"
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


class Worker:
    """A started worker. It leads a session of its own, so that its whole tree can be signalled.

    The process is reaped only by `close`, at the end of the group: until then its number stays taken, and a
    signal to its tree cannot reach a stranger.

    Args:
        plan: What to start.
        output: Where its output goes.
        environ: The environment that the plan adds to.
    """

    def __init__(self, plan: WorkerPlan, output: Output, environ: Mapping[str, str]) -> None:
        self.plan = plan
        self.output = output
        self.stopped = False
        self.was_frozen = False
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_BIRTH), str(os.getpid()), *plan.argv],
            env={**environ, **plan.env},
            stdin=subprocess.DEVNULL,
            stdout=output.writing_end,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output.hand_over()
            self.end_notice = os.pidfd_open(self._process.pid)
            """Becomes readable when the process has ended."""
        except BaseException:  # Too many open files, say. Nobody else knows of the process yet.
            self._end(time.monotonic() + _END_SECS)
            raise

    def signal_tree(self, signum: signal.Signals) -> None:
        """Sends a signal to the worker and all its children."""
        self.stopped = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def look(self) -> WorkerExit | None:
        """How the worker ended, or None while it runs."""
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return WorkerExit(
            rank=self.plan.rank,
            code=code,
            ran_secs=time.monotonic() - self._started,
            log=self.plan.log,
            stopped=self.stopped,
            frozen=self.was_frozen,
        )

    def look_whether_frozen(self) -> bool:
        """Whether the worker is stopped by a signal; remembered for its end."""
        self.was_frozen = self.was_frozen or is_frozen(self._process.pid)
        return self.was_frozen

    def kill(self) -> None:
        """Kills whatever is left of the tree."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, *, until: float) -> None:
        """Kills whatever is left of the tree, reaps the worker and takes in the rest of its output.

        Args:
            until: How long to wait for the kernel to end it, on the clock of `time.monotonic`.
        """
        self._end(until)
        os.close(self.end_notice)
        self.output.close()

    def _end(self, until: float) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, until - time.monotonic()))
