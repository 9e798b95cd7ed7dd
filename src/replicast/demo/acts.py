"""What an act of the demo is, and the programme: the acts in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from replicast.audit import AuditReport
from replicast.demo.errands import Errand
from replicast.demo.notes import Moment

if TYPE_CHECKING:
    from rich.console import Console

    import replicast

WORKERS = 2
CHANGED, CHANGED_SHAPE, DELTA = "hidden/kernel", (64, 32), 0.05
"""The correction of all acts: what is added, to each element of which variable of the workers' model."""
RUN = "run"
"""The directory, beside the notes, through which a process outside reaches the workers."""

Replicas = Mapping[str, Sequence[Moment]]
"""The replicas of all workers, in the order of the workers, at each moment."""


class Player(Protocol):
    """What an act can do on a worker."""

    rank: int
    model: Any

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        """Trains for so many steps, or for what a restored state has left of them, with the other workers.

        Args:
            doing: What the progress bar says.
            steps: How many.
            after_step: Called after each step with its number, in the training thread.
        """

    def open_replicas(self) -> replicast.Replicas:
        """This worker's `Replicas`, made when they are not there yet; training has their callback then.

        All workers. Their steps go on from those that the model has been trained already.
        """

    def begin_again(self, run: str, *, save_every: int) -> replicast.Replicas:
        """Makes the model anew, with the same first weights and the same data to come, and its `Replicas`.

        All workers. Those from before are closed.

        Args:
            run: The name of its run directory, beside the notes.
            save_every: A checkpoint is made every so many steps.
        """

    def note_moment(self, name: str, audit: AuditReport | None = None) -> None:
        """Notes down what this worker's replica is now, and what an audit has found."""

    def has_noted(self, name: str) -> bool:
        """Whether this worker has noted a moment, in this life or in the one before."""

    def wait_for_the_end(self, sender: str) -> None:
        """Waits for a signal that ends this process; raises when it does not come, and names the sender."""


class Act(Protocol):
    """One act.

    Attributes:
        title: Its heading on the screen.
        moments: What it notes on every worker, in order.
        steps: About how many training steps it takes, for the progress bar.
    """

    title: str
    moments: Sequence[str]
    steps: int

    def play(self, player: Player) -> None:
        """The half that runs on every worker."""

    def tell(self, moment: str) -> str:
        """What was done to come to a moment, and why: one or two lines for the screen."""

    def errand(self, moment: str, replicas: Replicas, directory: Path) -> Errand | None:
        """What a process outside of the job is to do once all workers have come to a moment.

        The next moment is told when it has ended.

        Args:
            moment: Where all workers are.
            replicas: All moments so far.
            directory: Holds the notes, and `RUN`; files of the errand go here too.
        """

    def show(self, replicas: Replicas, console: Console) -> list[str]:
        """Shows the outcome when all moments are in.

        Args:
            replicas: All moments so far, those of earlier acts too.
            console: The screen.

        Returns:
            What did not happen as the act claims; empty when all did.
        """


def programme() -> tuple[Act, ...]:
    """The acts that the demo plays."""
    from replicast.demo.act_one import OneWorkerAssigns
    from replicast.demo.act_three import NothingIsLost
    from replicast.demo.act_two import EveryReplicaFollows

    return (OneWorkerAssigns(), EveryReplicaFollows(), NothingIsLost())


def total_steps(acts: Sequence[Act]) -> int:
    """The length of the progress bar."""
    return sum(act.steps for act in acts)


def all_equal(replicas: Sequence[Moment]) -> bool:
    """Whether all workers have the same weights, bit for bit."""
    return len({replica.digest for replica in replicas}) == 1
