"""An order: a worker's part of an operation, as data that crosses processes and a method that runs there."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from replicast.core.proposal import Content
from replicast.trial import Trial


class Replica(Protocol):
    """One worker's copy of the state, as the operations see it. The runtime has one, the simulation another.

    Methods marked "background" run beside the training; all others run in the training thread, at a boundary.
    """

    rank: int

    @property
    def on_trial(self) -> bool:
        """Whether there is a copy to go back to."""

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        """Background. Fetches and checks the bytes; raises `Refuse` when they could not be applied.

        An earlier proposal with this id and other content may have been refused while this worker was slow:
        what is prepared is kept by id and digest.
        """

    def apply(self, id_: str, digest: str, sequence: int) -> str:
        """Applies what was prepared; gives the digest of what it touched. Must not fail."""

    def discard(self, id_: str) -> None:
        """Background. Forgets what was prepared under an id, or still is being. No-op if nothing was."""

    def compute(self, id_: str) -> tuple[str, Content]:
        """Runs a function that this worker has proposed; gives digest and content of what it returned.

        Raises:
            Refuse: It raised, or what it returned is not acceptable.
        """

    def digest(self) -> str:
        """The digest of the whole state."""

    def digests(self) -> dict[str, str]:
        """The digest of each variable."""

    def expected(self) -> dict[str, str]:
        """The digests that checkpoint and journal give, of the variables that training does not change."""

    def publish(self, names: tuple[str, ...]) -> tuple[str, Content]:
        """An update that assigns this replica's values of these variables: its digest and content."""

    def snapshot(self) -> tuple[str, Content, frozenset[int]]:
        """Copies the state; gives its digest, where the copy is, and the updates that it holds."""

    def keep_copy(self) -> None:
        """Copies the state, to go back to it."""

    def go_back(self) -> None:
        """Makes the state that of `keep_copy` again."""

    def report(self, report: Any, *, raises: bool) -> None:
        """Hands an audit's report to the training thread, which raises it if it has to."""

    def leave(self) -> None:
        """The process ends, together with all others."""

    def drop_copy(self) -> None:
        """Forgets the copy."""

    def measure(self, trial: Trial) -> float | None:
        """The mean of the trial's metric: since `keep_copy`, or before now when there is no copy."""


class Order(Protocol):
    """What a worker is told to do. A frozen dataclass."""

    in_background: ClassVar[bool]
    """Whether it runs beside the training; otherwise in the training thread, while that stands."""

    def perform(self, replica: Replica) -> Any:
        """Does it; the result is sent to the coordinator. `Refuse` becomes a `Refusal`."""
