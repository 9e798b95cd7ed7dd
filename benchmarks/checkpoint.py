"""The question about checkpoints: the cost of saving and restoring a state of 100 MB."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.question import QUICK_SECS, TURNS, Contestant, Question, Ratio
from benchmarks.update_task import Task

OURS, THEIRS = "benchmarks.checkpoint_replicast", "benchmarks.checkpoint_tensorflow"
PLANNED = Contestant("save_every: stall of training", "replicast", f"{OURS}:Planned", topic="stall")
STALL = Contestant("save(): stall of training", "replicast", f"{OURS}:Stall", topic="stall")
COPY = Contestant(
    "floor: a copy of the state in memory", "replicast", f"{OURS}:Copy", role="floor", topic="stall"
)
STOP = Contestant(
    "save() of one number, and that copy",
    "replicast",
    f"{OURS}:StopAndCopy",
    role="part",
    topic="stall",
)
DURABLE = Contestant("save: until durable, replicast", "replicast", f"{OURS}:Durable", topic="save")
WRITE = Contestant("save: tf.train.Checkpoint.write, fsync", "stock", f"{THEIRS}:Write", topic="save")
RESTORE = Contestant("restore: replicast", "replicast", f"{OURS}:Restore", topic="restore")
FRESH = Contestant(
    "floor: a copy of the state into fresh memory",
    "replicast",
    f"{OURS}:Fresh",
    role="floor",
    topic="restore",
)
VERIFIED = Contestant(
    "restore of one number, that copy, its digest",
    "replicast",
    f"{OURS}:FreshAndVerified",
    role="part",
    topic="restore",
)
READ = Contestant("restore: tf.train.Checkpoint.read", "stock", f"{THEIRS}:Read", topic="restore")
CHECKPOINT = Question(
    name="checkpoint",
    title=f"Saving and restoring {Task()} on 2 workers",
    unit="ms on the slowest worker",
    contestants=(PLANNED, STALL, COPY, STOP, DURABLE, WRITE, RESTORE, FRESH, VERIFIED, READ),
    task=Task(),
    ratios=(
        Ratio("stall by save_every / copy in memory", PLANNED, COPY, "at most", 3.0),
        Ratio("stall by save() / copy in memory", STALL, COPY, "at most", 3.0),
        Ratio("stall by save() / save() of one number and copy", STALL, STOP, "at most", 1.15),
        Ratio("save until durable / TF write with fsync", DURABLE, WRITE, "at most", 1.0),
        Ratio("restore / copy into fresh memory", RESTORE, FRESH, "at most", 1.5),
        Ratio("restore / restore of one number, copy into fresh memory, digest", RESTORE, VERIFIED),
        Ratio("restore / TF read, unverified", RESTORE, READ, "at most", 1.0),
    ),
    notes=(
        TURNS,
        "replicast compares the workers as it saves and verifies as it restores. No worker trains.",
        "Every worker reads, from the page cache, in both. The copy into fresh memory touches each page",
        "for the first time, in huge pages where the system has them: a restore can do no less.",
    ),
    budget_secs=80.0,
)
QUICK = (replace(CHECKPOINT, budget_secs=QUICK_SECS),)
