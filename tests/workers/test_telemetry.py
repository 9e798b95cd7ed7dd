"""Updates, trials and restarts in the files of TensorBoard, beside Keras' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import replicast
from replicast.core.entries import Stage
from tests.pool import Pool
from tests.threads import eventually
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import AtStep, adam, replicas_of

BATCHES, BATCH_SIZE = 10, 8
TRIED_AT, TRIAL_STEPS = 12, 6


def trained(strategy: Any, directory: Path, *, watched: bool) -> str:
    """Two attempts of a job that corrects its learning rate, and tries what makes the loss worse."""
    boards = directory / "board"
    for attempt in range(2):
        keras.utils.set_random_seed(3)
        keras.utils.clear_session(free_memory=False)  # the same names in both attempts
        model = perceptron(strategy, adam)
        options = {"run_dir": directory / "run", "durability": "disk"}
        with replicas_of(model, **options) as replicas:

            def propose(step: int, replicas: replicast.Replicas = replicas) -> None:
                if step == 2 and replicas.rank == 1:
                    rate = replicast.Update(note="too high").scale("optimizer/learning_rate", 0.5)
                    worse = replicast.Update().scale("dense_1/kernel", -3.0)
                    trial = replicast.Trial(steps=TRIAL_STEPS)
                    tickets = [
                        replicas.propose(rate, at_step=6),
                        replicas.propose(worse, at_step=TRIED_AT, trial=trial),
                    ]
                    # Training must not pass their steps before all workers have agreed to stop there.
                    eventually(lambda: all(ticket.stage is Stage.SCHEDULED for ticket in tickets))

            callbacks = [replicas.callback(), *([AtStep(propose)] if attempt == 0 else [])]
            if watched:
                callbacks.append(keras.callbacks.TensorBoard(boards, write_graph=False))
            x, y = arrays(BATCHES * BATCH_SIZE)
            model.fit(x, y, batch_size=BATCH_SIZE, epochs=3, verbose=0, callbacks=callbacks)
    return str(boards)


def told(place: Path) -> tuple[dict[str, list[str]], dict[str, list[tuple[int, float]]]]:
    """The texts and the numbers that TensorBoard reads there, by tag."""
    reader = EventAccumulator(str(place), {"tensors": 0})
    reader.Reload()
    texts: dict[str, list[str]] = {}
    numbers: dict[str, list[tuple[int, float]]] = {}
    for tag in reader.Tags()["tensors"]:
        plugin = reader.SummaryMetadata(tag).plugin_data.plugin_name
        for event in reader.Tensors(tag):
            tensor = event.tensor_proto
            if plugin == "text":
                texts.setdefault(tag, []).append(tensor.string_val[0].decode())
            else:
                assert plugin == "scalars", tag
                value = np.frombuffer(tensor.tensor_content, "<f4")[0]
                numbers.setdefault(tag, []).append((event.step, float(value)))
    return texts, numbers


def test_tensorboard_shows_updates_trials_and_restarts(pool2: Pool, tmp_path: Path) -> None:
    boards = Path(pool2.run(trained, tmp_path, watched=True)[0])
    assert sorted(one.name for one in boards.iterdir()) == ["replicast", "train"]
    eventually(lambda: len(told(boards / "replicast")[0].get("replicast/updates", ())) == 4)
    texts, numbers = told(boards / "replicast")
    rate, worse, *again = texts["replicast/updates"]
    assert rate.startswith("**Update 1: verified** at step 6\n")
    assert "too high" in rate
    assert "- scale optimizer/learning_rate " in rate
    assert worse.startswith("**Update 2: reverted** at step 12\n")
    assert [one.partition("\n")[0] for one in again] == [
        "**Update 1: verified** at step 6, again after a restart",
        "**Update 2: reverted** at step 12, again after a restart",
    ]
    assert texts["replicast/trials"][0].startswith("Update 2 is reverted: loss was ")
    assert texts["replicast/restarts"] == ["Attempt 1 begins at step 0"]
    assert [value for _, value in numbers["replicast/attempt"]] == [0.0, 1.0]
    for part in ("prepare", "stall", "apply", "verify"):
        assert [step for step, _ in numbers[f"replicast/{part}_secs"]] == [6, TRIED_AT], part
        assert all(value >= 0.0 for _, value in numbers[f"replicast/{part}_secs"])
    ((step, before), _), ((_, during), _) = (
        numbers[f"replicast/trial_loss_{when}"] for when in ("before", "during")
    )
    assert step == TRIED_AT + TRIAL_STEPS
    assert during > before


def test_without_tensorboard_nothing_is_written_for_it(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(trained, tmp_path, watched=False)
    assert not list(tmp_path.rglob("*tfevents*"))
