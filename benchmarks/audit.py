"""The question about audits: how fast a state of 100 MB is digested, and what audits cost a training."""

from __future__ import annotations

from benchmarks.question import Contestant, Question, Ratio
from benchmarks.update_task import Task

STEP_MS = 20.0
EVERY = 100
GIGABYTES_PER_SEC = 5.0
MODULE = "benchmarks.audit_replicast"
DIGESTS = Contestant(
    "digests of the state, all workers at once", "replicast", f"{MODULE}:Digests", role="part"
)
ONE_AUDIT = Contestant("boundary with an audit, during training", "replicast", f"{MODULE}:Audit", role="part")
WITH = Contestant(f"step of the loop, audit_every={EVERY}", "replicast", f"{MODULE}:With")
WITHOUT = Contestant("floor: step of the loop, no audits", "replicast", f"{MODULE}:Without", role="floor")
TABLE_ROWS = 1_000_000
TABLE_AUDIT = Contestant(
    "boundary with an audit, table of 1,000,000 × 64", "replicast", f"{MODULE}:TableAudit", role="part"
)
TABLE_STEP = Contestant(
    "step of the loop with that table, SGD", "replicast", f"{MODULE}:TableStep", role="part"
)
TOUCHED = Contestant(
    f"floor of digests that follow: the rows of {EVERY} steps, read and hashed",
    "replicast",
    f"{MODULE}:TouchedRows",
    role="part",
)
TOUCHED_EACH = Contestant(
    "floor of digests that follow: the rows of a step, read and hashed",
    "replicast",
    f"{MODULE}:TouchedEachStep",
    role="part",
)
TABLE_AUDITS = Question(
    name="audit-table",
    title="Audits of a table of 1,000,000 × 64 that is trained by rows, 2 workers",
    unit="ms for one on the slower worker",
    contestants=(TABLE_AUDIT, TABLE_STEP, TOUCHED, TOUCHED_EACH),
    task=Task(),
    ratios=(
        Ratio(
            f"an audit every {EVERY} steps / {EVERY} steps",
            TABLE_AUDIT,
            TABLE_STEP,
            "at most",
            0.01,
            factor=1 / EVERY,
        ),
        Ratio(
            f"digests of the touched rows, every {EVERY} steps / {EVERY} steps",
            TOUCHED,
            TABLE_STEP,
            factor=1 / EVERY,
        ),
        Ratio("digests of the touched rows, in every step / a step", TOUCHED_EACH, TABLE_STEP),
    ),
    notes=("A step has 128 × 20 ids. Each audit compares the next 2 MiB of the table, and all else whole.",),
    turns=2,
    budget_secs=40.0,
)
AUDIT = Question(
    name="audit",
    title=f"Audits of {Task()} on 2 workers",
    unit="ms for one on the slower worker",
    contestants=(WITH, WITHOUT, ONE_AUDIT, DIGESTS),
    task=Task(),
    ratios=(
        Ratio(
            f"digests / those of {GIGABYTES_PER_SEC:g} GB/s per worker",
            DIGESTS,
            Task().megabytes / GIGABYTES_PER_SEC,
            "at most",
            1.0,
        ),
        Ratio(
            f"an audit every {EVERY} steps / {EVERY} steps of {STEP_MS:g} ms",
            ONE_AUDIT,
            EVERY * STEP_MS,
            "at most",
            0.01,
        ),
        Ratio("step with audits / without", WITH, WITHOUT, "at most", 1.01),
    ),
    notes=(
        f"Turns alternate in the same processes, each with a state of its own; one is {EVERY} steps.",
        "Workers digest at the same boundary and continue; worker 0 compares in the background.",
    ),
    turns=2,
    budget_secs=80.0,
)
