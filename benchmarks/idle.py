"""The question about idle boundaries: what one costs that has nothing to do."""

from __future__ import annotations

from benchmarks.question import Contestant, Question, Ratio
from benchmarks.runner import BaseTask

STEP_MS = 20.0
MODULE = "benchmarks.idle_replicast"
BOUNDARY = Contestant("boundary() alone, 20,000 calls", "replicast", f"{MODULE}:Boundaries", role="part")
WITH = Contestant("step of the loop, with Replicas", "replicast", f"{MODULE}:With")
WITHOUT = Contestant("floor: step of the loop, without", "replicast", f"{MODULE}:Without", role="floor")
STOCK = Contestant(
    "boundary() alone, on TensorFlow's own strategy", "stock", f"{MODULE}:Boundaries", role="part"
)
IDLE = Question(
    name="idle",
    title="What a boundary costs that has nothing to do, on 2 workers",
    unit="ms for one on the slower worker",
    contestants=(WITH, WITHOUT, BOUNDARY, STOCK),
    task=BaseTask(),
    ratios=(
        Ratio(f"boundary() / a step of {STEP_MS:g} ms", BOUNDARY, STEP_MS, "at most", 0.01),
        Ratio("step with Replicas / without", WITH, WITHOUT, "at most", 1.01),
        Ratio("boundary() on TensorFlow's own strategy / on ours", STOCK, BOUNDARY, "at most", 1.1),
    ),
    notes=(
        "Turns alternate in the same processes, with the same model; a turn is 50 steps.",
        "Replicas, with their threads and a run directory, exist only in turns with boundaries.",
    ),
    turns=3,
    budget_secs=60.0,
)
