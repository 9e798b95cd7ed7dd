"""The `fit` table: the time of a step of a small model on two workers, with different ways to train."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.contestants import Task
from benchmarks.report import Ratio, Result, Row
from benchmarks.workers import Failed, Ready, WorkerPool

WORKERS = 2
STEPS = 300
EPOCHS = 3
TIMEOUT_SECS = 60.0
BUDGET_SECS = 120.0
"""After this time no further round starts: a busy machine runs fewer rounds, not longer."""
MODULE = "benchmarks.contestants"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table.

    Attributes:
        name: Its name in the table.
        pool: The name of the worker pool on which it runs.
        factory: The function of `benchmarks.contestants` that creates it.
        needs: A package that may be missing, or None.
    """

    name: str
    pool: str
    factory: str
    needs: str | None = None

    def missing(self) -> str | None:
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"


CONSTANT = Contestant("constant batch, custom loop, stock MWMS", "stock", "loop_on_a_constant_batch")
ARRAYS = Contestant("replicast fit, numpy arrays", "replicast", "keras_fit_arrays")
DATASET = Contestant("replicast fit, tf.data", "replicast", "keras_fit_dataset")
TF_KERAS = Contestant("tf_keras fit, numpy arrays, stock MWMS", "stock", "tf_keras_fit_arrays", "tf_keras")
ITERATOR = Contestant(
    "distributed iterator, custom loop, stock MWMS", "stock", "loop_on_the_distributed_iterator"
)
SINGLE = Contestant("Keras fit, one process, the whole batch", "single", "keras_fit_arrays")
TORCH = Contestant("constant batch, torch DDP (gloo)", "torch", "torch_ddp_on_a_constant_batch", "torch")
CONTESTANTS = (CONSTANT, ARRAYS, DATASET, TF_KERAS, ITERATOR, SINGLE, TORCH)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        rounds: How many turns each gets, if time allows.
        say: Called with a progress message.
    """
    begun = time.monotonic()
    pools = {
        "stock": WorkerPool(f"{MODULE}:stock_strategy", WORKERS),
        "replicast": WorkerPool(f"{MODULE}:replicast_strategy", WORKERS),
        "single": WorkerPool(None, 1),
        "torch": WorkerPool(f"{MODULE}:torch_group", WORKERS),
    }
    task = Task(steps=STEPS, epochs=EPOCHS)
    problems = {c: problem for c in CONTESTANTS if (problem := c.missing()) is not None}
    times: dict[Contestant, list[float | None]] = {c: [] for c in CONTESTANTS}
    done = 0
    try:
        for contestant in CONTESTANTS:
            if contestant not in problems:
                say(f"fit: warming up {contestant.name}")
                _prepare(contestant, pools, task, problems)
        while done < rounds and time.monotonic() - begun < BUDGET_SECS:
            for contestant in order_of_round(CONTESTANTS, done):
                if contestant not in problems:
                    say(f"fit: round {done + 1} of {rounds}, {contestant.name}")
                times[contestant].append(_turn(contestant, pools, task, problems))
            done += 1
    finally:
        for pool in pools.values():
            pool.end()
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
            f"A turn of fit is one complete call of {EPOCHS} epochs; custom loops keep no metrics.",
        ),
    )


def _prepare(
    contestant: Contestant, pools: dict[str, WorkerPool], task: Task, problems: dict[Contestant, str]
) -> None:
    try:
        pools[contestant.pool].prepare(Ready(f"{MODULE}:{contestant.factory}", (task,)), TIMEOUT_SECS)
    except Failed as failure:
        problems[contestant] = str(failure)


def _turn(
    contestant: Contestant, pools: dict[str, WorkerPool], task: Task, problems: dict[Contestant, str]
) -> float | None:
    if contestant in problems:
        return None
    _prepare(
        contestant, pools, task, problems
    )  # no-op unless the pool was lost to a failure of another contestant
    if contestant in problems:
        return None
    ready = Ready(f"{MODULE}:{contestant.factory}", (task,))
    try:
        return pools[contestant.pool].seconds(ready, TIMEOUT_SECS) / task.steps * 1000
    except Failed as failure:
        problems[contestant] = str(failure)
        return None


def order_of_round(contestants: tuple[Contestant, ...], number: int) -> tuple[Contestant, ...]:
    """Rotates and reverses the order, so that no contestant always follows the same one."""
    first = number % len(contestants)
    rotated = contestants[first:] + contestants[:first]
    return rotated if number % 2 == 0 else rotated[::-1]
