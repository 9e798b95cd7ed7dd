"""An order: a worker's part of an operation, as data that is sent to it and a method that runs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from replicast.core.proposal import Content, Published
from replicast.core.reports import Applied, Seen, Snapshot
from replicast.update.trial import Trial


class Replica(Protocol):
    """One worker's copy of the state, as operations use it. Implemented by the runtime and the simulation.

    Methods marked "background" run while training continues; all others run in the training thread, at a
    boundary.
    """

    rank: int

    @property
    def on_trial(self) -> bool:
        """Whether there is a copy to revert to."""

    def load(self, id_: str, digest: str) -> Content:
        """Background, on worker 0. Makes the bytes of a payload in the journal available to all workers.

        Raises:
            Refuse: It does not exist any more, or is damaged.
        """

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        """Background. Fetches and checks the bytes; raises `Refuse` if they cannot be applied.

        Prepared updates are kept by id and digest, because a slow worker may still hold one with the same id
        and other content that was refused.
        """

    def apply(self, id_: str, digest: str, sequence: int, *, keep: bool) -> Applied | Callable[[], Applied]:
        """Applies a prepared update. Must not fail.

        Returns:
            The report, or a function that finishes it while training goes on. Whatever this worker proposes
            or reports later is sent after it: a checkpoint that holds the update comes after its report.

        Args:
            id_: The update's id.
            digest: That of its content.
            sequence: Its number.
            keep: On worker 0: hold the values that it overwrites and that a revert needs, until
                `write_before` or `drop_before`.
        """

    def write_before(self, sequence: int) -> tuple[Content, str]:
        """Background, on worker 0. Makes the values that `apply` has kept durable, beside the journal.

        Returns:
            Where they are, or None and why they are not kept.

        Raises:
            Refuse: They cannot be written.
        """

    def drop_before(self, sequence: int) -> None:
        """Forgets what `apply` has kept. No-op if it has kept nothing."""

    def invert(self, id_: str, sequence: int, *, forced: bool) -> Published:
        """Background, on worker 0. An update that undoes an update of the journal.

        Raises:
            Refuse: What it needs is not kept any more; or later updates have changed the same variables, and
                it is not forced.
        """

    def pull(self, id_: str, name: str, rows: tuple[tuple[int, int], ...]) -> str:
        """The digest of a variable, or of these ranges of its rows; worker 0 also keeps a copy of them.

        Args:
            id_: The operation, whose end says what to do with the copy.
            name: The variable's full name.
            rows: Each range from its first row to the one behind its last; empty for the whole variable.
        """

    def discard(self, id_: str) -> None:
        """Background. Discards all that is prepared, or being prepared, under an id; no-op if nothing is."""

    def compute(self, id_: str) -> Published:
        """Runs a function that this worker has proposed.

        Raises:
            Refuse: It raised an exception, or its result is not acceptable.
        """

    def digest(self) -> str:
        """The digest of all variables that must be equal on all workers."""

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        """The digest of each of these variables; without names, of all variables."""

    def examine(self) -> Seen:
        """The digests that an audit compares."""

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        """The digests according to checkpoint and journal, of the variables that training does not change."""

    def publish(self, id_: str, names: tuple[str, ...]) -> Published:
        """An update that assigns this replica's values of these variables."""

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        """How far this replica's values of these variables are from those of a prepared update."""

    def snapshot(self, id_: str, *, due: bool, again: bool) -> Snapshot | Callable[[], Snapshot]:
        """Copies the state on worker 0, and digests it on all.

        Args:
            id_: The id of the operation.
            due: Whether no thread waits for it. All replicas may then return an empty snapshot here and
                report a planned one later.
            again: Whether the reported snapshots of this checkpoint are discarded, because an update was
                applied between the snapshots of two workers.

        Returns:
            The snapshot, or a function that finishes it while the training thread goes on.
        """

    def keep_copy(self) -> None:
        """Copies the state, so that it can be reverted."""

    def go_back(self) -> None:
        """Reverts the state to that of `keep_copy`."""

    def drop_copy(self) -> None:
        """Deletes the copy."""

    def report(self, report: Any, *, raises: bool) -> None:
        """Passes an audit's report to the training thread, which raises it if `raises` is true."""

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """Ends the process, together with all others.

        Args:
            problem: Why the state is not saved; empty if it is.
            asked_by: The ids of the requests from outside that worker 0 answers before.
        """

    def measure(self, trial: Trial) -> tuple[float | None, int]:
        """The mean of the trial's metric since `keep_copy`; without a copy, over the steps before now.

        Returns:
            The mean, or None if nothing was measured; and the number of steps.

        Raises:
            Refuse: Before the trial: there is no such metric, or it is not finite.
        """


class Order(Protocol):
    """An order to a worker. A frozen dataclass."""

    in_background: ClassVar[bool]
    """Whether it runs while training continues; otherwise it runs in the stopped training thread."""

    def perform(self, replica: Replica) -> Any:
        """Carries it out; the result is sent to the coordinator. `Refuse` becomes a `Refusal`."""
