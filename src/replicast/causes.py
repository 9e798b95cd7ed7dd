"""Why a job failed, as one worker sees it: its own error, a worker that it has lost, or its own pause."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from replicast.coordination import lost_text, lost_worker
from replicast.errors import JobFailed
from replicast.silence import ClockJumps, Pauses

_HERE = str(Path(__file__).parent)


class Causes:
    """Finds the cause of what this worker sees. Any thread may call any method.

    Args:
        rank: This worker.
        chiefs: The number of tasks of type "chief" in the cluster.
        pauses: Whether this process itself stood still.
        jumps: Whether the wall clock of this host was set.
        recent_secs: For how long a pause or a jump explains what this worker sees.
    """

    def __init__(self, rank: int, chiefs: int, pauses: Pauses, jumps: ClockJumps, recent_secs: float) -> None:
        self._rank = rank
        self._chiefs = chiefs
        self._pauses = pauses
        self._jumps = jumps
        self._recent_secs = recent_secs
        self._own_error: str | None = None

    def look(self) -> None:
        """Looks whether this process stood still, or its clock was set; call it several times a second."""
        self._pauses.look()
        self._jumps.look()

    def of(self, error: BaseException) -> JobFailed:
        """Why this worker's script raised, and because of which worker."""
        pause = self.pause() if follows(error) else None
        if pause is not None:
            return pause
        if isinstance(error, JobFailed) and error.worker is not None:  # it waited for that one in vain
            return first(error.worker, str(error))
        lost = lost_worker(str(error), self._chiefs)
        jump = None if lost is None else self.jump(lost.how, lost.worker)
        if jump is not None:
            return jump
        if lost is not None and lost.worker != self._rank:
            return first(lost.worker, self.witnessed(lost_text(lost)))
        lines = traceback.format_exception_only(error)
        own = first(self._rank, lines[-1].strip() if lines else type(error).__name__)
        self._own_error = str(own)
        return own

    def is_own_error(self, failure: JobFailed) -> bool:
        """Whether the job failed because of the error that this worker's script raised."""
        return str(failure) == self._own_error

    def noticed(self, message: str, worker: int | None) -> JobFailed:
        """A loss that this worker has noticed: of another one, unless it stood still itself."""
        found = self.pause() or self.jump(message, worker)
        return found or JobFailed(self.witnessed(message), worker=worker)

    def witnessed(self, message: str) -> str:
        """What this worker has seen itself, for the others, with who says so."""
        return f"{message} (says worker {self._rank})"

    def pause(self) -> JobFailed | None:
        """An error if this process itself stood still a short time ago: that explains what it sees since."""
        secs = self._pauses.last_secs(within_secs=self._recent_secs)
        if secs is None:
            return None
        message = (
            f"worker {self._rank} did not run for {secs:.0f} s: it was stopped (SIGSTOP), its machine was "
            "suspended, or it got no CPU time. The other workers took it for lost"
        )
        return JobFailed(message, worker=self._rank)

    def jump(self, message: str, worker: int | None) -> JobFailed | None:
        """An error if heartbeats are missed since the wall clock was set: nobody need have been lost."""
        secs = self._jumps.last_secs(within_secs=self._recent_secs) if "heartbeats" in message else None
        if secs is None or worker is None:
            return None
        way = "forward" if secs > 0 else "back"
        cause = (
            f"worker {worker} was taken for lost because the clock of worker {self._rank}'s host was set "
            f"{way} by {abs(secs):.0f} s: TensorFlow measures by it how old a heartbeat is. Restart the job, "
            "and set clocks only while none runs"
        )
        return JobFailed(self.witnessed(cause), worker=worker)


def follows(error: BaseException) -> bool:
    """Whether an error may follow from what happened to another worker, or to the connection."""
    return isinstance(error, JobFailed) or type(error).__module__.startswith("tensorflow.")


def first(worker: int, message: str) -> JobFailed:
    """The first failure of the job: whose it is, and the message that says so."""
    named = message if message.startswith(f"worker {worker} ") else f"worker {worker} failed first: {message}"
    return JobFailed(named, worker=worker)


def place_in(trace: TracebackType | None) -> str:
    """Where the user's script was: the innermost line that is not in an installed package."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if "site-packages" not in frame.filename and _HERE not in frame.filename]
    frame = next(iter(reversed(own or frames)), None)
    return "" if frame is None else f"at {frame.filename}:{frame.lineno}, in {frame.name}"
