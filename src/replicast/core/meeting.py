"""A meeting: how the coordinator stops all training threads at one boundary.

    Stop ──► every worker answers immediately with the first boundary that it has not passed, and stops there
    Meet ──► the latest answer is the step: workers before it continue to it
    At   ◄── every worker is stopped there

No worker can be past that step, because none passes the boundary it answered with; so this needs no
assumption about the training. A worker that rests before the step (its script waits for the others) will
never reach it: then the coordinator asks again.
"""

from __future__ import annotations


class Meeting:
    """Where the workers are, according to the messages that the coordinator has received.

    Args:
        number: Identifies the meeting.
        size: The number of workers.
        at_step: The first boundary at or after this step; None for the next possible one.

    Attributes:
        target: The step to which the workers were told to continue.
        round: How often a target was set.
        timed_round: The last round for which the wait for missing workers has a timeout.
    """

    __slots__ = ("at_step", "number", "round", "size", "standing", "steps", "target", "timed_round")

    def __init__(self, number: int, size: int, at_step: int | None) -> None:
        self.number = number
        self.size = size
        self.at_step = at_step
        self.steps: dict[int, int] = {}
        self.standing: set[int] = set()
        self.target = 0 if at_step is None else at_step
        self.round = 0
        self.timed_round = -1

    def note(self, rank: int, step: int, standing: bool) -> None:
        """Records the position of a worker."""
        self.steps[rank] = step
        if standing:
            self.standing.add(rank)

    @property
    def answered(self) -> bool:
        """Whether every worker has answered."""
        return len(self.steps) == self.size

    @property
    def latest(self) -> int:
        """The latest boundary that a worker has not passed."""
        return max(self.steps.values())

    def aim(self, step: int) -> None:
        """Sets the target: workers that are stopped before it continue."""
        self.target = step
        self.round += 1
        self.standing = {rank for rank in self.standing if self.steps[rank] >= step}

    def missing(self) -> tuple[int, ...]:
        """The workers that have not arrived."""
        return tuple(rank for rank in range(self.size) if rank not in self.standing)

    def step(self) -> int | None:
        """The boundary at which all workers are stopped; None while they are not."""
        if len(self.standing) < self.size:
            return None
        step = min(self.steps.values())
        return step if step == self.latest and step >= (self.at_step or 0) else None
