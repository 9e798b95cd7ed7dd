"""What the author of a proposal holds: where it stands, and in the end its receipt or the reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from replicast.errors import ReplicastError, UpdatePending
from replicast.journal import Receipt
from replicast.trial import Trial
from replicast.update import Stage


class Ticket:
    """One proposal of this worker. Any thread may ask it.

    Attributes:
        id: The update's id.
        number: Tells this proposal from all others of the job, also of the same update.
        content_digest: What was proposed under that id; empty while a function has not computed it.
        stage: Where it stands.
        step: The step it is committed for, once it is.
        proposed_at: When it was proposed, in seconds since the epoch.
        waits_for: What it waits for before it can be decided, in words, when that is known.
        trial: What it has to prove, if it is on trial; then it is settled when that is decided.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - the update's own word
        number: str,
        content_digest: str,
        wait_for: Callable[[Ticket, float | None], bool],
        trial: Trial | None = None,
    ) -> None:
        self.id = id
        self.number = number
        self.content_digest = content_digest
        self.trial = trial
        self.stage = Stage.PROPOSED
        self.step: int | None = None
        self.waits_for = ""
        self.proposed_at = time.time()
        self._wait_for = wait_for
        self._settled = threading.Event()
        self._receipt: Receipt | None = None
        self._error: ReplicastError | None = None

    @property
    def is_function(self) -> bool:
        """Whether a function was proposed, and not an update."""
        return self.content_digest.startswith("function-")

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._settled.is_set()

    def wait(self, timeout_secs: float) -> bool:
        """Blocks until it is settled, at most `timeout_secs`; says whether it is."""
        return self._settled.wait(timeout_secs)

    def result(self, timeout: float | None = None) -> Receipt:
        """Blocks until every worker has applied the update and the digests agree, at most `timeout` seconds.

        In the training thread, between steps, that can only come to pass if all other workers wait as well
        (in `sync`, at the end of the script). If they do not within some seconds, it is due at a step that
        this very thread has to run first, and `UpdatePending` is raised: ask again later, or in another
        thread.

        Raises:
            UpdateRefused: It was refused: no replica has changed.
            ReplicasDiverged: It was applied, and the replicas are not equal.
            UpdatePending: The time is up, or this thread waits for itself.
        """
        if not self._wait_for(self, timeout) and not self._settled.is_set():
            raise UpdatePending(self._where(timeout), stage=self.stage, update_id=self.id)
        if self._error is not None:
            raise self._error
        if self._receipt is None:
            raise UpdatePending(f"Update {self.id} has no outcome", stage=self.stage, update_id=self.id)
        return self._receipt

    def _where(self, timeout: float | None) -> str:
        if self.stage is Stage.COMMITTED and self.step is not None:
            ends = f"it is committed for step {self.step}, to which not all workers have come yet"
        elif self.stage is Stage.APPLIED and self.trial is not None:
            ends = f"its trial of {self.trial.steps} steps is not over"
        else:
            ends = f"it is {self.stage}" + (f" and waits for {self.waits_for}" if self.waits_for else "")
        waited = "this thread cannot wait for it here" if timeout is None else f"{timeout:g} s have passed"
        return f"Update {self.id}: {waited}, and {ends}. Go on training and ask again"

    def committed(self, step: int) -> None:
        """Notes the step it is committed for."""
        self.step = step
        self.waits_for = ""
        self.stage = Stage.COMMITTED

    def succeed(self, receipt: Receipt) -> None:
        """Gives the receipt; the first outcome stays."""
        if not self._settled.is_set():
            self._receipt, self.stage, self.step = receipt, Stage.VERIFIED, receipt.step
            self._settled.set()

    def fail(self, stage: Stage, error: ReplicastError) -> None:
        """Gives the reason; the first outcome stays."""
        if not self._settled.is_set():
            self._error, self.stage = error, stage
            self._settled.set()


class Since:
    """How long a condition has held, each time it is asked."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds
        self._since: float | None = None

    def secs(self) -> float:
        """Seconds since it began to hold, as far as was asked; 0 when it does not."""
        if not self._holds():
            self._since = None
            return 0.0
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since
