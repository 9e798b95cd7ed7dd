"""One worker process: starts it, signals it with all its children, and reports how it exited."""

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

from replicast.config import CHANGES_FD
from replicast.launcher.output import Output
from replicast.launcher.plan import WorkerPlan
from replicast.launcher.standby import StandbySet
from replicast.paths import RunPath
from replicast.processes import is_frozen

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_END_SECS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How one worker exited."""

    rank: int
    code: int
    ran_secs: float
    log: RunPath
    tail: tuple[str, ...] = ()
    stopped: bool = False
    frozen: bool = False
    host: str = ""
    reason: str = ""
    lost: str = ""
    said_by: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code as in a shell: 128 plus the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """How it exited, in words."""
        if self.lost:
            return self.lost
        if self.frozen:
            return "stopped by SIGSTOP"
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


class Worker:
    """A running worker. It leads its own session, so that its whole process tree can be signalled.

    Only `close` reaps the process, at the end of the group: until then its pid is not reused, and a signal to
    its tree cannot reach an unrelated process.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        output: Output,
        environ: Mapping[str, str],
        standbys: StandbySet | None = None,
    ) -> None:
        self.plan = plan
        self.output = output
        self.stopped = False
        self.blamed_as_frozen = False
        """Whether the group ends because this worker was stopped by a signal."""
        self._started = time.monotonic()
        env, called = {**environ, **plan.env}, None
        inherited = [] if standbys is None else [standbys.memory_of(plan.rank)]
        if standbys is not None:
            env[CHANGES_FD] = str(inherited[0])
            called = standbys.call(plan, env, output.writing_end)
        self.was_standby = called is not None
        """Whether the process had waited for its place."""
        self._process = called or subprocess.Popen(
            [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid()), *plan.argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output.writing_end,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            start_new_session=True,
        )
        try:
            output.hand_over()
            self.end_notice = os.pidfd_open(self._process.pid)
            """A descriptor that becomes readable when the process has exited."""
        except BaseException:  # For example too many open files. Nobody else knows the process yet.
            self._end(time.monotonic() + _END_SECS)
            raise

    def signal_tree(self, signum: signal.Signals) -> None:
        """Sends a signal to the worker and its children."""
        self.stopped = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def poll(self) -> WorkerExit | None:
        """Returns how the worker exited, or None while it runs."""
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
            frozen=self.blamed_as_frozen,
        )

    def is_frozen(self) -> bool:
        """Whether the worker is stopped by a signal."""
        return is_frozen(self._process.pid)

    def kill(self) -> None:
        """Kills what is left of the process tree."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, *, until: float) -> None:
        """Kills what is left of the process tree, reaps the worker and reads the rest of its output."""
        self._end(until)
        os.close(self.end_notice)
        self.output.close()

    def _end(self, until: float) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, until - time.monotonic()))
