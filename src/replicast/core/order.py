"""An order: a worker's part of an operation, as data that crosses processes and a method that runs there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from replicast.core.proposal import Content, Published
from replicast.core.reports import Applied, Seen, Snapshot
from replicast.update.trial import Trial


class Replica(Protocol):
    """One worker's copy of the state, as the operations see it. The runtime has one, the simulation another.

    Methods marked "background" run beside the training; all others run in the training thread, at a boundary.
    """

    rank: int

    @property
    def on_trial(self) -> bool:
        """Whether there is a copy to go back to."""

    def load(self, id_: str, digest: str) -> Content:
        """Background, on worker 0. Makes the bytes of a payload in the journal available to all workers.

        Raises:
            Refuse: It is not there any more, or damaged.
        """

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        """Background. Fetches and checks the bytes; raises `Refuse` when they could not be applied.

        An earlier proposal with this id and other content may have been refused while this worker was slow:
        what is prepared is kept by id and digest.
        """

    def apply(self, id_: str, digest: str, sequence: int, *, keep: bool) -> Applied:
        """Applies what was prepared. Must not fail.

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

    def invert(self, id_: str, sequence: int) -> Published:
        """Background, on worker 0. An update that undoes an update of the journal.

        Raises:
            Refuse: What it needs is not kept any more.
        """

    def pull(self, id_: str, name: str, rows: tuple[tuple[int, int], ...]) -> str:
        """The digest of a variable, or of these ranges of its rows; worker 0 also keeps a copy of them.

        Args:
            id_: The operation, whose end says what to do with the copy.
            name: The variable's full name.
            rows: Each range from its first row to the one behind its last; empty for the whole variable.
        """

    def discard(self, id_: str) -> None:
        """Background. Forgets what was prepared under an id, or still is being. No-op if nothing was."""

    def compute(self, id_: str) -> Published:
        """Runs a function that this worker has proposed.

        Raises:
            Refuse: It raised, or what it returned is not acceptable.
        """

    def digest(self) -> str:
        """The digest of all that must be equal on all workers."""

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        """The digest of each of these variables; of all without names."""

    def examine(self) -> Seen:
        """What an audit has to know."""

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        """The digests that checkpoint and journal give, of those variables that training does not change."""

    def publish(self, id_: str, names: tuple[str, ...]) -> Published:
        """An update that assigns this replica's values of these variables."""

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        """How far this replica's values of these variables are from those of a prepared update."""

    def snapshot(self, *, due: bool, again: bool) -> Snapshot:
        """Copies the state on worker 0, and digests it on all.

        Args:
            due: Nobody waits for it. All replicas may report it later, as one that they have planned, and
                give an empty one here.
            again: What was reported for this checkpoint is not used: an update was applied between the
                snapshots of two workers.
        """

    def keep_copy(self) -> None:
        """Copies the state, to go back to it."""

    def go_back(self) -> None:
        """Makes the state that of `keep_copy` again."""

    def drop_copy(self) -> None:
        """Forgets the copy."""

    def report(self, report: Any, *, raises: bool) -> None:
        """Hands an audit's report to the training thread, which raises it if it has to."""

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """The process ends, together with all others.

        Args:
            problem: Why the state is not saved; empty when it is.
            asked_by: The ids of the requests from outside that worker 0 answers before.
        """

    def measure(self, trial: Trial) -> tuple[float | None, int]:
        """The mean of the trial's metric since `keep_copy`, or before now when there is no copy.

        Returns:
            The mean, None when nothing was measured; and of how many steps it is.

        Raises:
            Refuse: Before the trial: there is no such metric, or it is not finite.
        """


class Order(Protocol):
    """What a worker is told to do. A frozen dataclass."""

    in_background: ClassVar[bool]
    """Whether it runs beside the training; otherwise in the training thread, while that stands."""

    def perform(self, replica: Replica) -> Any:
        """Does it; the result is sent to the coordinator. `Refuse` becomes a `Refusal`."""
