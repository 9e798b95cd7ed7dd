"""A guard on real workers: a change beyond a bound is refused, and training is not affected."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicast
from replicast.storage import inbox
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import AtStep, adam, replicas_of

WAIT_SECS = 60.0
EPOCHS, BATCH, EXAMPLES = 3, 16, 96


def too_much() -> dict[str, Any]:
    """Proposals that exceed a bound each, by their ids, with what the refusal must say."""
    bias = "dense_1/bias"
    return {
        "norm": (Update(id="norm").add(bias, np.full(4, 100, "f4")), "max_norm"),
        "relative": (Update(id="relative").scale("dense/kernel", 3.0), "max_relative_change"),
        "denied": (Update(id="denied").assign("optimizer/learning_rate", 0.5), "deny"),
        "later": (Update(id="later").scale("dense/kernel", 9.0), "max_relative_change"),
        "nan": (Update(id="nan", allow_nonfinite=True).add(bias, np.full(4, np.nan, "f4")), "require_finite"),
    }


def trained(strategy: Any, guarded: bool, directory: Path) -> dict[str, Any]:
    """A training in which, with a guard, worker 1, a function and the inbox propose too much."""
    model = perceptron(strategy, adam)
    guard = replicast.Guard(max_norm=50.0, max_relative_change=0.5, deny=["optimizer/learning_rate"])
    options: dict[str, Any] = {"guard": guard, "run_dir": directory} if guarded else {}
    tickets: dict[str, Any] = {}
    steps = EPOCHS * EXAMPLES // BATCH

    def act(step: int) -> None:
        if not guarded or step != 4:
            return
        if strategy.rank == 0:
            inbox.submit(directory, Update(id="pushed").scale("dense/kernel", 4.0))
            ends = time.monotonic() + WAIT_SECS
            while "pushed" not in inbox.refusals(directory):
                assert time.monotonic() < ends, "the inbox is not looked into"
                time.sleep(0.01)
        else:
            for id_, (update, _) in too_much().items():
                tickets[id_] = replicas.propose(update, at_step=steps - 1 if id_ == "later" else None)
            tickets["function"] = replicas.propose(
                lambda values: {"dense/kernel": values["dense/kernel"] * np.float32(-1)}
            )

    with replicas_of(model, **options) as replicas:
        x, y = arrays(EXAMPLES)
        model.fit(
            x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0,
            callbacks=[AtStep(act), replicas.callback()],
        )  # fmt: skip
        refusals = {}
        for id_, ticket in tickets.items():
            with pytest.raises(replicast.UpdateRefused) as caught:
                ticket.result(WAIT_SECS)
            refusals[id_] = str(caught.value)
        return {"refusals": refusals, "history": len(replicas.history), "digest": digest(model)}


def test_too_much_is_refused_with_its_bound_and_training_is_unaffected(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(trained, guarded=True, directory=tmp_path / "run")
    assert_equal_on_all([result["digest"] for result in results])
    undisturbed = pool2.run(trained, guarded=False, directory=tmp_path / "none")
    assert results[0]["digest"] == undisturbed[0]["digest"]
    assert [result["history"] for result in results] == [0, 0]
    for id_, (_, bound) in too_much().items():
        assert bound in results[1]["refusals"][id_], id_
    assert "Received: 2, 4 times the bound" in results[1]["refusals"]["function"]
    pushed = inbox.refusals(tmp_path / "run")["pushed"]
    assert (pushed.expected, pushed.received) == ("at most 0.5 (max_relative_change)", "3, 6 times the bound")
