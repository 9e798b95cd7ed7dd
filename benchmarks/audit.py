"""The `audit` table: how fast a state of 100 MB is digested, and what audits cost a training."""

from __future__ import annotations

from benchmarks.fit import Contestant, Say
from benchmarks.race import WORKERS, race_of_two
from benchmarks.report import Ratio, Result
from benchmarks.update_task import Task

BUDGET_SECS = 120.0
TURNS_PER_ROUND = 2
"""Many turns, close to each other, because differences of one per cent matter."""
STEP_MS = 20.0
EVERY = 100
MODULE = "benchmarks.audit_replicast"
DIGESTS = Contestant("digests of the state, all workers at once", "replicast", f"{MODULE}:Digests")
AUDIT = Contestant("boundary with an audit, during training", "replicast", f"{MODULE}:Audit")
WITH = Contestant(f"step of the loop, audit_every={EVERY}", "replicast", f"{MODULE}:With")
WITHOUT = Contestant("step of the loop, no audits", "replicast", f"{MODULE}:Without")
CONTESTANTS = (WITH, WITHOUT, AUDIT, DIGESTS)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns, all on the same workers.

    Args:
        rounds: How many rounds, of several turns each, if time allows.
        say: Called with a progress message.
    """
    rows, done, task = race_of_two("audit", CONTESTANTS, Task, rounds * TURNS_PER_ROUND, BUDGET_SECS, say)
    megabytes = task.variables * task.shape[0] * task.shape[1] * 4 / 1e6
    speeds = tuple(megabytes / figure for figure in rows[DIGESTS].measured())  # MB in a ms: GB in a second
    share = f"an audit every {EVERY} steps / {EVERY} steps of {STEP_MS:g} ms"
    return Result(
        title=f"audits on {WORKERS} workers, {task}",
        unit=f"ms for one on the slower worker, {done} turns",
        rows=tuple(rows.values()),
        ratios=(
            Ratio("digests, GB/s on the slower worker", speeds, "at least", 5.0),
            Ratio.to(share, rows[AUDIT], EVERY * STEP_MS, "at most", 0.01),
            Ratio.of("step with audits / without", rows[WITH], rows[WITHOUT], "at most", 1.01),
        ),
        notes=(
            f"Turns alternate in the same processes, each with a state of its own; one is {EVERY} steps.",
            "Workers digest at the same boundary and continue; worker 0 compares in the background.",
        ),
    )
