"""The standby processes of a job, as the launcher sees them: started, called, replaced, ended.

    absent ── the job trains ──→ importing ── ready ──→ waiting ── a restart calls it ──→ a worker
                                     └────────── it dies, or is not fit ──→ absent: that worker starts cold

`prepared.py` is what they run. One is started at a time, so that they take one core at most, and
only once the job trains, so that they do not slow down its start. They end with the launcher in any case:
`bootstrap.py` sees to it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicast.config import FAULTS, without
from replicast.import_environment import as_told, make_memory, relevant
from replicast.launcher.plan import WorkerPlan, bootstrapped
from replicast.launcher.screen import Screen
from replicast.processes import is_frozen

_PREPARED = Path(__file__).with_name("prepared.py")
_END_SECS = 10.0
_LOOK_SECS = 0.2
IMPORTS = ("numpy", "tensorflow", "keras", "replicast.training", "replicast.replicas.replicas")
# After this time they are started even if no worker says that it trains: a job without `Replicas`.
WITHOUT_NOTES_SECS = 60.0


class Standby:
    def __init__(
        self, program: Sequence[str], environ: Mapping[str, str], imports: Sequence[str], memory: int
    ) -> None:
        self.is_ready = False
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs, tempfile.TemporaryFile() as captured:
            command = [sys.executable, str(_PREPARED), str(theirs.fileno()), ",".join(imports), *program]
            try:
                self.process = subprocess.Popen(
                    bootstrapped(command),
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=captured,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), memory),
                    start_new_session=True,
                )
            except BaseException:
                self._control.close()
                raise

    def look(self) -> bool:
        """Whether the process still exists and can be called; learns whether it is ready."""
        with contextlib.suppress(BlockingIOError):
            self.is_ready = self._control.recv(16) != b"" or self.is_ready
        return self.process.poll() is None

    def call(self, environ: Mapping[str, str], output: int) -> bool:
        """Makes it a worker; returns False if it is not fit for that, and then ends it."""
        try:
            with tempfile.TemporaryFile() as file:
                file.writelines(os.fsencode(f"{name}={value}\0") for name, value in environ.items())
                file.flush()
                if is_frozen(self.process.pid) or self.process.poll() is not None:
                    raise ProcessLookupError
                socket.send_fds(self._control, [b"c"], [output, file.fileno()])
        except OSError:  # It is stopped, has died, or dies just now.
            self.end()
            return False
        self._control.close()
        return True

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_END_SECS)
        self._control.close()


class StandbySet:
    """One standby process for each worker of this machine. Used by the launcher's main thread only."""

    def __init__(
        self,
        program: Sequence[str],
        screen: Screen,
        trains: Callable[[int], bool],
        imports: Sequence[str] = IMPORTS,
    ) -> None:
        self._program = tuple(program)
        self._screen = screen
        self._trains = trains
        self._imports = imports
        self._waiting: dict[int, Standby] = {}
        self._environs: dict[int, dict[str, str]] = {}
        # The descriptors that workers inherit, to tell what their scripts have set in the environment.
        self.memories = collections.defaultdict[int, int](make_memory)
        self._wanted: list[int] = []
        self._imported_with: dict[int, dict[str, str]] = {}
        self._attempt, self._since, self._looked, self._told = 0, 0.0, 0.0, False

    def begin(self, attempt: int, *, is_last: bool = False) -> None:
        """The workers of an attempt were started: makes the next set, unless it is the last attempt."""
        self._wanted = [] if is_last else [rank for rank in self._environs if rank not in self._waiting]
        self._attempt, self._since, self._looked = attempt, time.monotonic(), 0.0

    def poll(self) -> None:
        """Starts the next one that is missing. Call it at least once a second while the group runs."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECS:
            return
        self._looked = now
        for rank, standby in list(self._waiting.items()):
            if not standby.look():
                del self._waiting[rank]
                standby.end()
                self._screen.tell(f"replicast: standby: the process for worker {rank} has died")
        if not all(standby.is_ready for standby in self._waiting.values()):
            return
        if self._wanted:
            waited_long = now - self._since >= WITHOUT_NOTES_SECS
            if self._waiting or waited_long or self._trains(self._attempt):
                self._start(self._wanted.pop(0))
        elif self._waiting and not self._told:
            self._told = True
            waits = "1 process waits" if len(self._waiting) == 1 else f"{len(self._waiting)} processes wait"
            self._screen.tell(f"replicast: standby: {waits} for a restart")

    def call(
        self, plan: WorkerPlan, environ: Mapping[str, str], output: int
    ) -> subprocess.Popen[bytes] | None:
        """Makes the standby process of a worker that worker; None if there is none that is fit for it."""
        self._environs[plan.rank] = dict(environ)
        standby = self._waiting.pop(plan.rank, None)
        if standby is None:
            return None
        self._told = False
        standby.look()
        if relevant(environ) != self._imported_with[plan.rank]:  # For example other GPUs than before.
            standby.end()
            return None
        return standby.process if standby.call(environ, output) else None

    def close(self) -> None:
        for standby in self._waiting.values():
            standby.kill()
        for standby in self._waiting.values():
            standby.end()
        for memory in self.memories.values():
            os.close(memory)
        self._waiting, self._wanted = {}, []
        self.memories.clear()

    def _start(self, rank: int) -> None:
        self._imported_with[rank] = relevant(self._environs[rank])
        memory = self.memories[rank]
        of_now = without(self._environs[rank], "TF_CONFIG", FAULTS)  # of the attempt that runs now
        environ = as_told(of_now, memory)
        try:
            self._waiting[rank] = Standby(self._program, environ, self._imports, memory)
        except OSError as error:
            self._screen.tell(f"replicast: standby: no process for worker {rank} ({error.strerror})")
