"""The `idle` table: the cost of boundaries without operations."""

from __future__ import annotations

from benchmarks.fit import Contestant, Say
from benchmarks.race import WORKERS, race_of_two
from benchmarks.report import Ratio, Result
from benchmarks.runner import BaseTask

BUDGET_SECS = 70.0
TURNS_PER_ROUND = 3
"""Many short turns, close to each other, because differences of one per cent matter."""
STEP_MS = 20.0
MODULE = "benchmarks.idle_replicast"
BOUNDARY = Contestant("boundary() alone, 20,000 calls", "replicast", f"{MODULE}:Boundaries")
WITH = Contestant("step of the loop, with Replicas", "replicast", f"{MODULE}:With")
WITHOUT = Contestant("step of the loop, without", "replicast", f"{MODULE}:Without")
CONTESTANTS = (WITH, WITHOUT, BOUNDARY)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns, all on the same workers.

    Args:
        rounds: How many rounds, of several turns each, if time allows.
        say: Called with a progress message.
    """
    rows, done, _ = race_of_two("idle", CONTESTANTS, BaseTask, rounds * TURNS_PER_ROUND, BUDGET_SECS, say)
    return Result(
        title=f"idle boundaries on {WORKERS} workers",
        unit=f"ms for one on the slower worker, {done} turns",
        rows=tuple(rows.values()),
        ratios=(
            Ratio.to(f"boundary() / a step of {STEP_MS:g} ms", rows[BOUNDARY], STEP_MS, "at most", 0.01),
            Ratio.of("step with Replicas / without", rows[WITH], rows[WITHOUT], "at most", 1.01),
        ),
        notes=(
            "Turns alternate in the same processes, with the same model; a turn is 50 steps.",
            "Replicas, with their threads and a run directory, exist only in turns with boundaries.",
        ),
    )
