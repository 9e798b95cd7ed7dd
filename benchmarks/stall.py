"""The `stall` table: how long an update of 100 MB stops the training thread."""

from __future__ import annotations

from benchmarks.fit import Contestant, Say
from benchmarks.race import TURNS, WORKERS, race_of_two
from benchmarks.report import Ratio, Result
from benchmarks.update_task import Task

BUDGET_SECS = 90.0
TURNS_PER_ROUND = 2
"""Many turns per round, because a turn is short and the measured time even shorter."""
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
        say: Called with a progress message.
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
            "All during training on a constant batch, in the same processes, on all workers together.",
            "Updates are proposed by another thread of worker 0, one at a time.",
        ),
    )
