"""The `stall` table: how long an update of 100 MB keeps the training thread from its next step."""

from __future__ import annotations

from benchmarks.fit import Contestant, Say
from benchmarks.race import TURNS, WORKERS, race_of_two
from benchmarks.report import Ratio, Result
from benchmarks.update_task import Task

BUDGET_SECS = 90.0
TURNS_PER_ROUND = 2
"""A turn is short, and what it measures shorter."""
MODULE = "benchmarks.stall_replicast"
MEMORY = Contestant('replicast, durability="memory"', "replicast", f"{MODULE}:InMemory")
DISK = Contestant('replicast, durability="disk"', "replicast", f"{MODULE}:OnDisk")
FUNCTION = Contestant("bare assign_add, tf.function", "replicast", f"{MODULE}:BareFunction")
EAGER = Contestant("bare assign_add, eager", "replicast", f"{MODULE}:BareEager")
CONTESTANTS = (MEMORY, FUNCTION, DISK, EAGER)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns, all on the same workers.

    Args:
        rounds: How many rounds, of several turns each, if time allows.
        say: Told what is being done now.
    """
    rows, done, task = race_of_two("stall", CONTESTANTS, Task, rounds * TURNS_PER_ROUND, BUDGET_SECS, say)
    return Result(
        title=f"stall of training on {WORKERS} workers by an update of {task}",
        unit=f"ms on the slowest worker, {done} turns",
        rows=tuple(rows.values()),
        ratios=(
            Ratio.of("stall / tf.function assign_add", rows[MEMORY], rows[FUNCTION], "at most", 3.0),
            Ratio.of("stall / eager assign_add", rows[MEMORY], rows[EAGER], "at most", 3.0),
            Ratio.of("stall with fsync / tf.function assign_add", rows[DISK], rows[FUNCTION]),
        ),
        notes=(
            TURNS,
            "All in the midst of training on a constant batch, in the same processes, on all at once.",
            "Updates are proposed by another thread of worker 0, one at a time.",
        ),
    )
