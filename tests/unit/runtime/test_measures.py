"""Measurements of steps: derived from running means or used as they are, and kept for a checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.replicas.replica import MOST_BOUNDARIES as MOST
from replicast.replicas.replica import MetricHistory, RecentMetrics, mean_history
from replicast.update.trial import Trial, judged


def running_means(values: list[float], epoch: int, per_boundary: int) -> list[tuple[int, int, float]]:
    """As Keras gives them: step, batches so far in the epoch, their mean."""
    found = []
    for step in range(per_boundary, len(values) + 1, per_boundary):
        batches = (step - 1) % epoch + 1
        found.append((step, batches, sum(values[step - batches : step]) / batches))
    return found


@pytest.mark.parametrize("per_boundary", [1, 2, 5])
def test_what_each_step_measured_is_found_in_running_means(per_boundary: int) -> None:
    values = [float(value) for value in np.random.default_rng(1).normal(2.0, 1.0, 60)]
    measures = RecentMetrics()
    for step, batches, mean in running_means(values, 20, per_boundary):
        if step == 40 + per_boundary:
            assert measures.before("loss", 10) == pytest.approx(np.mean(values[30:40]))
            assert measures.before("loss", 30) == pytest.approx(np.mean(values[10:40]))
            assert measures.before("loss", 1000) == pytest.approx(np.mean(values[:40]))
            measures.begin(40)
        measures.batches = batches
        measures.note(step, per_boundary, {"loss": mean})
    during, steps = measures.during("loss")
    assert (during, steps) == (pytest.approx(np.mean(values[40:])), 20)
    measures.end(reverted=True)
    assert measures.before("loss", 10) == pytest.approx(np.mean(values[30:40]))
    measures.batches = None
    measures.note(61, 1, {"loss": 7.0})
    assert measures.before("loss", 1) == 7.0


def test_what_a_custom_loop_gives_is_taken_as_it_is_also_from_one_dict_and_only_the_last_is_kept() -> None:
    measures, logs = RecentMetrics(), {}
    for step in range(1, 4 * MOST):
        logs["loss"] = float(step)
        measures.note(step, 1, logs)
    last = 4 * MOST - 1
    assert measures.before("loss", 3) == last - 1
    assert measures.before("loss", 10**6) == last - (MOST - 1) / 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_history_keeps_what_is_no_finite_number_and_omits_what_was_reverted(wrong: float) -> None:
    measures = RecentMetrics()
    for step, value in enumerate([1.0, wrong, 3.0, 50.0], 1):
        if step == 4:
            measures.begin(3)
        measures.note(step, 1, {"loss": value, "name": "text"})
    measures.end(reverted=True)
    history = measures.history()
    assert [step for step, _, _ in history] == [1, 2, 3]
    later = RecentMetrics()
    later.note(9, 1, {"loss": 7.0})
    later.recall(json.loads(json.dumps(mean_history([history, history]))))
    assert later.before("loss", 1) == 3.0
    with pytest.raises(UpdateRefused, match="no finite value before"):
        later.before("loss", 2)


def test_a_worker_that_has_measured_nothing_is_no_part_of_the_mean() -> None:
    histories: list[MetricHistory] = [
        [(1, 1, {"loss": 2.0}), (2, 1, {"loss": 4.0})],
        [(2, 1, {"loss": 6.0, "other": 1.0})],
        [],
    ]
    assert mean_history(histories) == [(1, 1, {"loss": 2.0}), (2, 1, {"loss": 5.0})]


@pytest.mark.parametrize(
    ("trial", "during", "measured", "said"),
    [
        (Trial(5, max_increase=0.5), 0.25, 5, ["0.25 in the trial;", "at most 0.3"]),
        (Trial(5, max_increase=0.5), 0.5, 3, ["0.5 in the trial (3 of its 5 steps);", "at most 0.3"]),
        (Trial(5, "loss", 0.5, "max"), 0.5, 8, ["0.5 in the trial;", "at least 0.1"]),
    ],
)
def test_the_reason_says_what_decided(trial: Trial, during: float, measured: int, said: list[str]) -> None:
    _, reason, _ = judged(trial, 0.2, during, measured)
    assert reason.startswith("loss was 0.2 before the update")
    assert all(part in reason for part in said)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": True},
        {"steps": 2.0},
        {"steps": 1, "metric": ""},
        {"steps": 1, "max_increase": math.nan},
        {"steps": 1, "max_increase": "5 %"},
        {"steps": 1, "mode": "up"},
    ],
)
def test_a_trial_that_makes_no_sense_is_a_mistake(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Received: "):
        Trial(**options)
