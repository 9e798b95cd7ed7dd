"""The question about stalls: how long an update of 100 MB stops the training thread."""

from __future__ import annotations

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.update_task import Task

MODULE = "benchmarks.stall_replicast"
MEMORY = Contestant('replicast, durability="memory"', "replicast", f"{MODULE}:InMemory")
DISK = Contestant('replicast, durability="disk"', "replicast", f"{MODULE}:OnDisk")
FUNCTION = Contestant(
    "floor: bare assign_add, tf.function", "replicast", f"{MODULE}:BareFunction", role="floor"
)
EAGER = Contestant("bare assign_add, eager", "replicast", f"{MODULE}:BareEager", role="part")
STALL = Question(
    name="stall",
    title=f"How long an update of {Task()} stops training on 2 workers",
    unit="ms on the slowest worker",
    contestants=(MEMORY, FUNCTION, DISK, EAGER),
    task=Task(),
    ratios=(
        Ratio("stall / tf.function assign_add", MEMORY, FUNCTION, "at most", 1.5),
        Ratio("stall / eager assign_add", MEMORY, EAGER, "at most", 1.5),
        Ratio("stall with fsync / tf.function assign_add", DISK, FUNCTION, "at most", 1.5),
    ),
    notes=(
        TURNS,
        "All during training on a constant batch, in the same processes, on all workers together.",
        "Updates are proposed by another thread of worker 0, one at a time.",
    ),
    turns=2,
    budget_secs=75.0,
)
