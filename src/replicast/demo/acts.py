"""What an act of the demo is, and the programme: the acts in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from replicast.demo.notes import Moment

if TYPE_CHECKING:
    from rich.console import Console

WORKERS = 2

Replicas = Mapping[str, Sequence[Moment]]
"""The replicas of all workers, in the order of the workers, at each moment."""


class Player(Protocol):
    """What an act can do on a worker."""

    rank: int
    model: Any

    def train(self, doing: str, steps: int) -> None:
        """Trains for so many steps, together with the other workers."""

    def note_moment(self, name: str) -> None:
        """Notes down what this worker's replica is now."""


class Act(Protocol):
    """One act.

    Attributes:
        title: Its heading on the screen.
        moments: What it notes on every worker, in order.
        steps: How many training steps it takes, for the progress bar.
    """

    title: str
    moments: Sequence[str]
    steps: int

    def play(self, player: Player) -> None:
        """The half that runs on every worker."""

    def tell(self, moment: str) -> str:
        """What was done to come to a moment, and why: one or two lines for the screen."""

    def show(self, replicas: Replicas, console: Console) -> list[str]:
        """Shows the outcome when all moments are in.

        Returns:
            What did not happen as the act claims; empty when all did.
        """


def programme() -> tuple[Act, ...]:
    """The acts that the demo plays."""
    from replicast.demo.act_one import OneWorkerAssigns

    return (OneWorkerAssigns(),)


def total_steps(acts: Sequence[Act]) -> int:
    """The length of the progress bar."""
    return sum(act.steps for act in acts)


def all_equal(replicas: Sequence[Moment]) -> bool:
    """Whether all workers have the same weights, bit for bit."""
    return len({replica.digest for replica in replicas}) == 1
