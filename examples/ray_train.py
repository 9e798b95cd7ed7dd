"""The training of restart.py under Ray Train: it survives a killed worker, and SIGTERM saves.

pip install 'replicast[cpu,demo]' 'ray[train]'
python examples/ray_train.py --run-dir /shared/runs/ray

Ray sets TF_CONFIG in its workers and starts all of them again when one fails, `max_failures` times. The run
directory must be visible to worker 0 wherever Ray starts it; `replicast status RUN` shows the attempts.
SIGTERM to a worker (`ray stop`, a pod that is deleted) saves on all workers before they exit, although Ray
runs the loop in a thread.
"""

import argparse
import os
from pathlib import Path

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train_loop(config):
    os.environ["TF_USE_LEGACY_KERAS"] = "0"  # Ray sets it to 1, for Keras 2.
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import replicast
    from replicast.update.digest import digest_state

    keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()  # So that repeated steps give the same bits.
    strategy = replicast.Strategy()
    digits = load_digits()
    images, labels = digits.images.astype("float32") / 16.0, digits.target
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")

    replicas = replicast.Replicas(model, run_dir=config["run_dir"])
    restored = replicas.restore()
    print(f"resumes after step {restored.step if restored is not None else 0}", flush=True)

    class Report(keras.callbacks.Callback):
        """Runs on every worker, at the same steps: ray.train.report waits for all of them."""

        def on_epoch_end(self, epoch, logs=None):
            ray.train.report({"epoch": epoch, "step": replicas.step, "loss": logs["loss"]})
            if ray.train.get_preemption_info() is not None:  # Ray is about to take a machine away.
                replicas.leave()

    saving = replicas.callback(save_every=20)
    model.fit(images, labels, batch_size=64, epochs=config["epochs"], callbacks=[saving, Report()], verbose=0)
    print(f"trained {replicas.step} steps", flush=True)
    print("digest of the weights:", digest_state({w.path: w.numpy() for w in model.weights}), flush=True)
    replicas.close()  # Ray kills its workers when the loop has returned: nothing is called at their exit.


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/ray"))
    options = parser.parse_args()
    trainer = TensorflowTrainer(
        train_loop,
        train_loop_config={"run_dir": str(options.run_dir.absolute()), "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=options.run_dir.name,
            storage_path=str(options.run_dir.absolute().parent / "ray-results"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)
