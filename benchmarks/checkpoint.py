"""The `checkpoint` table: the cost of saving and restoring a state of 100 MB."""

from __future__ import annotations

from benchmarks.fit import Contestant, Say
from benchmarks.race import TURNS, WORKERS, race_of_two
from benchmarks.report import Ratio, Result
from benchmarks.update_task import Task

BUDGET_SECS = 90.0
OURS, THEIRS = "benchmarks.checkpoint_replicast", "benchmarks.checkpoint_tensorflow"
PLANNED = Contestant("save_every: stall of training", "replicast", f"{OURS}:Planned")
STALL = Contestant("save(): stall of training", "replicast", f"{OURS}:Stall")
COPY = Contestant("save: a copy of the state in memory", "replicast", f"{OURS}:Copy")
DURABLE = Contestant("save: until durable, replicast", "replicast", f"{OURS}:Durable")
WRITE = Contestant("save: tf.train.Checkpoint.write, fsync", "stock", f"{THEIRS}:Write")
RESTORE = Contestant("restore: replicast", "replicast", f"{OURS}:Restore")
FRESH = Contestant("restore: a copy of the state into fresh memory", "replicast", f"{OURS}:Fresh")
READ = Contestant("restore: tf.train.Checkpoint.read", "stock", f"{THEIRS}:Read")
CONTESTANTS = (PLANNED, STALL, COPY, DURABLE, WRITE, RESTORE, FRESH, READ)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        rounds: How many turns each gets, if time allows.
        say: Called with a progress message.
    """
    rows, done, task = race_of_two("checkpoint", CONTESTANTS, Task, rounds, BUDGET_SECS, say)
    return Result(
        title=f"checkpoint on {WORKERS} workers, {task}",
        unit=f"ms, on the slowest worker, {done} rounds",
        rows=tuple(rows.values()),
        ratios=(
            Ratio.of("stall by save_every / copy in memory", rows[PLANNED], rows[COPY], "at most", 3.0),
            Ratio.of("stall by save() / copy in memory", rows[STALL], rows[COPY], "at most", 3.0),
            Ratio.of("save until durable / TF write with fsync", rows[DURABLE], rows[WRITE], "at most", 1.0),
            Ratio.of("restore / copy into fresh memory", rows[RESTORE], rows[FRESH], "at most", 1.5),
            Ratio.of("restore / TF read, unverified", rows[RESTORE], rows[READ], "at most", 1.0),
        ),
        notes=(
            TURNS,
            "replicast compares the workers as it saves and verifies as it restores. No worker trains.",
            "Every worker reads, from the page cache, in both. The copy into fresh memory touches each page",
            "for the first time, in huge pages where the system has them: a restore can do no less.",
        ),
    )
