"""The progress bar of a `fit` that continues from a restored state."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from replicast.launcher.screen import LineAssembler, with_its_loss
from replicast.training.resuming import callbacks_of, count_done_batches
from tests.pool import Pool
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import replicas_of

BATCHES, DONE, EPOCHS = 8, 5, 2


class Crashes(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == DONE:
            raise ArithmeticError


def batches(length_is_known: bool) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(arrays(8 * BATCHES)).batch(8)
    return data if length_is_known else data.filter(lambda x, y: True)


def counts_on_the_bar(strategy: Any, run_dir: Path, length_is_known: bool) -> list[list[tuple[int, str]]]:
    """What the bar of each epoch counts after a restart that goes on in the first one."""
    model = perceptron(strategy)
    options: dict[str, Any] = {"x": batches(length_is_known), "epochs": EPOCHS}
    with replicas_of(model, run_dir=run_dir) as replicas:
        callbacks = [replicas.callback(save_every=DONE), Crashes()]
        with pytest.raises(ArithmeticError):
            model.fit(**options, verbose=0, callbacks=callbacks)
    with replicas_of(model, run_dir=run_dir) as replicas, contextlib.redirect_stdout(io.StringIO()) as out:
        replicas.restore()
        model.fit(**options, verbose=1, callbacks=[replicas.callback(), Every()])
    epochs = re.split(r"Epoch \d/\d\n", out.getvalue())[1:]
    return [
        [(int(count), of) for count, of in re.findall(r"(\d+)/(\d+|Unknown)\b", epoch)] for epoch in epochs
    ]


class Every(keras.callbacks.Callback):
    """Has the bar drawn at every batch; Keras leaves out those that follow too soon."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for other in callbacks_of(self.model) or []:
            if isinstance(other, keras.callbacks.ProgbarLogger):
                other.progbar.interval = -1.0


def test_the_bar_of_a_restored_fit_counts_from_the_batch_with_which_training_continues(
    pool2: Pool, tmp_path: Path
) -> None:
    counts, _ = pool2.run(counts_on_the_bar, tmp_path, True)
    of = str(BATCHES)
    assert counts[0] == [(count, of) for count in (5, 6, 7, 8, 8)]
    assert counts[1] == [(count, of) for count in (1, 2, 3, 4, 5, 6, 7, 8, 8)]


def test_the_bar_finds_the_length_of_an_epoch_that_was_restored_in_the_middle(
    pool2: Pool, tmp_path: Path
) -> None:
    counts, _ = pool2.run(counts_on_the_bar, tmp_path, False)
    assert counts[0] == [(count, "Unknown") for count in (5, 6, 7, 8)] + [(8, "8")]
    assert counts[1][-1] == (8, "8")


@pytest.mark.parametrize("target", [100, None])
@pytest.mark.parametrize("metrics", [[], [("accuracy", 0.5), ("loss", 2.30258)], [("loss", 1e-9)]])
def test_the_launcher_knows_the_bar_of_this_keras_from_what_is_written_behind_it(
    target: int | None, metrics: list[tuple[str, float]]
) -> None:
    bar = keras.utils.Progbar(target, interval=-1.0)
    assembler = LineAssembler()
    for count in (1, 37):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            bar.update(count, metrics)
        assembler.feed(out.getvalue().encode())
        drawn = assembler.partial
        assert f"{count}/" in drawn
        assert assembler.feed(b"2026-11-17: a log line\n") == ["2026-11-17: a log line"]
        assert assembler.partial == drawn.rstrip()
        assert [name for name, _ in metrics if f"{name}: " in with_its_loss(drawn, 68)] == [
            n for n, _ in metrics
        ]


def test_batches_that_were_done_before_are_not_in_the_time_of_a_batch() -> None:
    logger = keras.callbacks.ProgbarLogger()
    logger.set_params({"verbose": 1, "epochs": 5, "steps": 100})
    with contextlib.redirect_stdout(io.StringIO()):
        logger.on_epoch_begin(3)
        count_done_batches(logger, 90)
        logger.progbar._start -= 8.0
        logger.progbar.interval = -1.0
    with contextlib.redirect_stdout(io.StringIO()) as out:
        logger.on_train_batch_end(3)
    assert re.search(r"94/100.*12s\x1b\[0m 2s/step", out.getvalue()), out.getvalue()
