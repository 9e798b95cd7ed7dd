"""A script with several trainings that is killed in any of them ends with the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import jobs
from tests.pool.checks import assert_equal_on_all

TRAIN = """
import os, signal, sys, time
import keras, numpy as np, tensorflow as tf, replicast

tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(7)
strategy = replicast.Strategy()
attempt, kills = int(os.environ["REPLICAST_ATTEMPT"]), [int(step) for step in sys.argv[2:]]
save_every = int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1]
steps_between = 5 if save_every == "epoch" else save_every
random = np.random.default_rng(3)
x, y = random.normal(size=(40, 6)).astype("float32"), random.integers(0, 3, 40)

with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.2),
        keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=None), loss)
replicas = replicast.Replicas(model)
restored = replicas.restore()
print("restored", restored and restored.step, flush=True)

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if attempt < len(kills) and replicas.step == kills[attempt] and strategy.rank == 0:
            last = replicas.step // steps_between * steps_between
            while not any(replicas.run_dir.glob(f"checkpoints/{last:08d}-*/manifest.json")):
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)

class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.5)
        self.model.stop_training = epoch == 1

def train(data, *more, **options):
    callbacks = [replicas.callback(save_every=save_every), Kill()]
    model.fit(data, verbose=0, callbacks=[*callbacks, *more], **options)

data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=3).batch(8)
train(data, Halve(), epochs=6)    # stopped after 10 steps
for stage in range(3):    # up to step 25
    model.optimizer.learning_rate.assign(0.01 / (stage + 2))
    train(data, epochs=1)
train(data, keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate), epochs=2)    # up to 35
state = replicas.read(variable.name for variable in replicas.schema)
values = {name.replace("/", "."): value for name, value in state.items()}
np.savez(f"state-{strategy.rank}.npz", step=replicas.step, **values)
"""


def trained(directory: Path, *arguments: str) -> tuple[list[dict[str, np.ndarray]], list[str], str]:
    """The states at the end, what worker 0 restored in each attempt, and all that was said."""
    restarts = ("--max-restarts", str(len(arguments) - 1))
    code, said = jobs.finish(jobs.start(directory, TRAIN, *restarts, arguments=arguments))
    assert code == 0, said
    logs = sorted((directory / "run" / "logs").glob("attempt-*/worker-0.log"))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    restored = [line.removeprefix("restored ") for line in lines if line.startswith("restored ")]
    return [dict(np.load(directory / f"state-{rank}.npz")) for rank in range(2)], restored, said


@pytest.mark.parametrize(
    ("save_every", "kills", "steps"),
    [("3", ["13", "29"], ["12", "27"]), ("epoch", ["11", "31"], ["10", "30"])],
)
def test_a_job_that_is_killed_in_any_of_its_trainings_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, save_every: str, kills: list[str], steps: list[str]
) -> None:
    undisturbed, _, _ = trained(tmp_path / "undisturbed", save_every)
    killed, restored, said = trained(tmp_path / "killed", save_every, *kills)
    assert restored == ["None", *steps], said
    assert killed[0]["step"] == 35
    assert_equal_on_all([*undisturbed, *killed])
