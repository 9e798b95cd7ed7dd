"""The `fit` table: what a step of a small model costs on two workers, whoever drives it."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.contestants import Task
from benchmarks.report import Ratio, Result, Row
from benchmarks.workers import Crew, Failed, Ready

WORKERS = 2
STEPS = 300
EPOCHS = 3
PATIENCE_SECS = 60.0
BUDGET_SECS = 120.0
"""No round begins after this: a busy machine gives fewer rounds, not a longer wait."""
MODULE = "benchmarks.contestants"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table.

    Attributes:
        name: What it is called.
        crew: On whose processes it runs.
        factory: The function of `benchmarks.contestants` that makes it.
        needs: A package that may be missing, or None.
    """

    name: str
    crew: str
    factory: str
    needs: str | None = None

    def missing(self) -> str | None:
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"


CONSTANT = Contestant("constant batch, own loop, stock MWMS", "stock", "loop_on_a_constant_batch")
ARRAYS = Contestant("replicast fit, numpy arrays", "replicast", "keras_fit_arrays")
DATASET = Contestant("replicast fit, tf.data", "replicast", "keras_fit_dataset")
TF_KERAS = Contestant("tf_keras fit, numpy arrays, stock MWMS", "stock", "tf_keras_fit_arrays", "tf_keras")
ITERATOR = Contestant(
    "distributed iterator, own loop, stock MWMS", "stock", "loop_on_the_distributed_iterator"
)
SINGLE = Contestant("Keras fit, one process, the whole batch", "single", "keras_fit_arrays")
TORCH = Contestant("constant batch, torch DDP (gloo)", "torch", "torch_ddp_on_a_constant_batch", "torch")
CONTESTANTS = (CONSTANT, ARRAYS, DATASET, TF_KERAS, ITERATOR, SINGLE, TORCH)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        rounds: How many turns each gets, if time allows.
        say: Told what is being done now.
    """
    begun = time.monotonic()
    crews = {
        "stock": Crew(f"{MODULE}:stock_strategy", WORKERS),
        "replicast": Crew(f"{MODULE}:replicast_strategy", WORKERS),
        "single": Crew(None, 1),
        "torch": Crew(f"{MODULE}:torch_group", WORKERS),
    }
    task = Task(steps=STEPS, epochs=EPOCHS)
    problems = {c: problem for c in CONTESTANTS if (problem := c.missing()) is not None}
    times: dict[Contestant, list[float | None]] = {c: [] for c in CONTESTANTS}
    done = 0
    try:
        for contestant in CONTESTANTS:
            if contestant not in problems:
                say(f"fit: warming up {contestant.name}")
                _prepare(contestant, crews, task, problems)
        while done < rounds and time.monotonic() - begun < BUDGET_SECS:
            for contestant in order_of_round(CONTESTANTS, done):
                if contestant not in problems:
                    say(f"fit: round {done + 1} of {rounds}, {contestant.name}")
                times[contestant].append(_turn(contestant, crews, task, problems))
            done += 1
    finally:
        for crew in crews.values():
            crew.end()
    rows = {c: Row(c.name, tuple(times[c]), problems.get(c)) for c in CONTESTANTS}
    return Result(
        title=f"fit on {WORKERS} workers, {task}",
        unit=f"ms per step, {done} rounds of {EPOCHS} epochs, {STEPS} steps",
        rows=tuple(rows.values()),
        ratios=(
            Ratio.of("replicast fit / constant batch", rows[ARRAYS], rows[CONSTANT], "at most", 1.3),
            Ratio.of(
                "replicast fit on tf.data / constant batch", rows[DATASET], rows[CONSTANT], "at most", 1.3
            ),
            Ratio.of("stock tf_keras fit / replicast fit", rows[TF_KERAS], rows[ARRAYS], "at least", 2.0),
        ),
        notes=(
            "Contestants take turns in every round. A ratio: median of the rounds' ratios, and range.",
            f"A turn of fit is one call of {EPOCHS} epochs, with all it costs; own loops keep no metrics.",
        ),
    )


def _prepare(
    contestant: Contestant, crews: dict[str, Crew], task: Task, problems: dict[Contestant, str]
) -> None:
    try:
        crews[contestant.crew].prepare(Ready(f"{MODULE}:{contestant.factory}", (task,)), PATIENCE_SECS)
    except Failed as failure:
        problems[contestant] = str(failure)


def _turn(
    contestant: Contestant, crews: dict[str, Crew], task: Task, problems: dict[Contestant, str]
) -> float | None:
    if contestant in problems:
        return None
    _prepare(contestant, crews, task, problems)  # nothing to do, unless another one has cost us the crew
    if contestant in problems:
        return None
    ready = Ready(f"{MODULE}:{contestant.factory}", (task,))
    try:
        return crews[contestant.crew].seconds(ready, PATIENCE_SECS) / task.steps * 1000
    except Failed as failure:
        problems[contestant] = str(failure)
        return None


def order_of_round(contestants: tuple[Contestant, ...], number: int) -> tuple[Contestant, ...]:
    """Begins with another one each time and goes back and forth, so that none always follows the same one."""
    first = number % len(contestants)
    rotated = contestants[first:] + contestants[:first]
    return rotated if number % 2 == 0 else rotated[::-1]
