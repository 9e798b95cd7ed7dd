"""Random fault plans, the same for the same seed. Pure functions."""

from __future__ import annotations

from random import Random

from replicast.faults import Action, Fault, Point

ONLY_WORKER_0 = {Point.JOURNAL, Point.COMMIT, Point.VERIFY, Point.WRITE, Point.RENAME}
MOST_OCCURRENCES = {Point.WRITE: 40, Point.RENAME: 30, Point.PROPOSE: 8, Point.SNAPSHOT: 5}
"""About how often an attempt reaches a point; the default for other points."""
USUALLY = 12
POINTS = [point for point in Point if point not in (Point.DECIDE, Point.SETTLE)]
"""The points that the job reaches: it has no trial."""
ACTIONS = {Action.KILL: 6, Action.RAISE: 3, Action.STOP: 2}
REFUSING = (Point.STAGE, Point.READY)
"""An error there refuses the update, and its author is told: the job ends with other weights."""
STOPPED_SECS = (1.0, 5.0, 45.0)
"""Short enough to go unnoticed, and longer than every timeout for a silent worker."""


def random_plan(random: Random, workers: int, attempts: int) -> list[Fault]:
    """One fault in each of the first attempts of a job; some may never be reached."""
    return [_random_fault(random, workers, attempt) for attempt in range(attempts)]


def stopped_secs(seed: str, attempt: int) -> float:
    """How long a worker stays stopped."""
    return Random(f"{seed} stopped in {attempt}").choice(STOPPED_SECS)


def _random_fault(random: Random, workers: int, attempt: int) -> Fault:
    point = random.choice(POINTS)
    if point in ONLY_WORKER_0:
        worker = 0
    elif point is Point.PROPOSE:
        worker = workers - 1  # the one that proposes
    else:
        worker = random.randrange(workers)
    occurrence = random.randint(1, MOST_OCCURRENCES.get(point, USUALLY))
    action = random.choices(list(ACTIONS), weights=list(ACTIONS.values()))[0]
    if action is Action.RAISE and point in REFUSING:
        action = Action.KILL
    return Fault(worker, point, occurrence, action, attempt=attempt)


def plan_text(plan: list[Fault]) -> str:
    """A plan as text."""
    return ", ".join(
        f"{fault.action} worker {fault.worker} at {fault.point} {fault.occurrence}" for fault in plan
    )
