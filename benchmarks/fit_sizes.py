"""Steps of three sizes: `fit` on two workers beside torch DDP (gloo), and both without any exchange.

    python -m benchmarks.fit_sizes --torch PYTHON [--rounds N] [--sizes 0.1 0.67 5.8] [--only NAME ...]

`PYTHON` is an interpreter that has torch. Every kind of process exists at the same time and is idle while
another one runs; contestants take turns. A worker has one thread. The columns: time of a step on the slower
worker (range), CPU time of a step in one worker, and ratios to the named contestants in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORKERS = 2
BATCH = 128
UNITS = {"0.1": (128,), "0.67": (512, 512), "5.8": (2048, 2048)}
STEPS = {"0.1": 300, "0.67": 120, "5.8": 24}
CONTESTANTS = {
    "fit, arrays": ("shared", "fit_arrays"),
    "fit, tf.data": ("shared", "fit_dataset"),
    "constant batch": ("shared", "loop"),
    "fit, arrays, TensorFlow's all-reduce": ("tensorflow", "fit_arrays"),
    "constant batch, TensorFlow's all-reduce": ("tensorflow", "loop"),
    "constant batch, no exchange": ("alone", "loop"),
    "torch DDP, arrays": ("torch", "ddp_arrays"),
    "torch DDP, constant batch": ("torch", "ddp"),
    "torch, no exchange": ("torch", "torch_alone"),
}
Train = Callable[[], None]


def data(steps: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.standard_normal((steps * BATCH, 784), dtype=np.float32)
    return x, random.integers(0, 10, len(x)).astype(np.int64)


def keras_trains(kind: str, units: tuple[int, ...], steps: int) -> dict[str, Train]:
    """The ways to train with Keras, compiled and ready."""
    import keras
    import tensorflow as tf

    import replicast

    if kind == "alone":
        strategy: Any = tf.distribute.get_strategy()
    else:
        strategy = _strategy(replicast, "auto" if kind == "shared" else "tensorflow")
    x, y = data(steps)

    def model() -> Any:
        hidden = [keras.layers.Dense(width, activation="relu") for width in units]
        return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])

    with strategy.scope():
        fitted, looped = model(), model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        fitted.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
        optimizer = keras.optimizers.Adam()
        optimizer.build(looped.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(BATCH).prefetch(2)

    def on_replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            losses = keras.ops.sparse_categorical_crossentropy(y, looped(x, training=True), from_logits=True)
            total = tf.reduce_sum(losses) / BATCH
        optimizer.apply(tape.gradient(total, looped.trainable_variables), looped.trainable_variables)

    @tf.function
    def step(batch: Any) -> None:
        strategy.run(on_replica, args=batch)

    share = tuple(tf.constant(array[: BATCH // WORKERS]) for array in (x, y))

    def loop() -> None:
        for _ in range(steps):
            step(share)

    return {
        "loop": loop,
        "fit_arrays": lambda: fitted.fit(x, y, batch_size=BATCH, verbose=0),
        "fit_dataset": lambda: fitted.fit(dataset, verbose=0),
    }


_strategies: list[Any] = []


def _strategy(replicast: Any, all_reduce: str) -> Any:
    if not _strategies:
        _strategies.append(replicast.Strategy(all_reduce=all_reduce))
    return _strategies[0]


def torch_trains(units: tuple[int, ...], steps: int) -> dict[str, Train]:
    import torch

    if not torch.distributed.is_initialized():
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    x, y = map(torch.from_numpy, data(steps))
    mine = BATCH // WORKERS

    def trained(parallel: bool, constant: bool) -> Train:
        layers: list[Any] = []
        for one, other in zip((784, *units), units, strict=False):
            layers += [torch.nn.Linear(one, other), torch.nn.ReLU()]
        net: Any = torch.nn.Sequential(*layers, torch.nn.Linear(units[-1], 10))
        net = torch.nn.parallel.DistributedDataParallel(net) if parallel else net
        optimizer, loss_of = torch.optim.Adam(net.parameters()), torch.nn.CrossEntropyLoss()

        def train() -> None:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
            for number in range(steps):
                rows = order[number * BATCH :][rank * mine : (rank + 1) * mine]
                batch = (x[:mine], y[:mine]) if constant else (x[rows], y[rows])
                optimizer.zero_grad()
                loss_of(net(batch[0]), batch[1]).backward()
                optimizer.step()

        return train

    return {
        "ddp_arrays": trained(parallel=True, constant=False),
        "ddp": trained(parallel=True, constant=True),
        "torch_alone": trained(parallel=False, constant=True),
    }


def work(kind: str) -> None:
    """A worker: reads which way and size to train, trains, and writes how long it took."""
    trains: dict[str, dict[str, Train]] = {}
    for line in sys.stdin:
        size, way = line.split()
        if size not in trains:
            make = torch_trains if kind == "torch" else lambda *task: keras_trains(kind, *task)
            trains[size] = make(UNITS[size], STEPS[size])
        begun, cpu = time.perf_counter(), time.process_time()
        trains[size][way]()
        took = [time.perf_counter() - begun, time.process_time() - cpu]
        REPLIES.write(" ".join(str(secs / STEPS[size] * 1000) for secs in took) + "\n")
        REPLIES.flush()


REPLIES = sys.stdout


class Group:
    """The workers of one kind."""

    def __init__(self, kind: str, python: str) -> None:
        ports = [_free_port() for _ in range(WORKERS)]
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        self._processes = []
        for rank in range(WORKERS):
            environ = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "2",
                "OMP_NUM_THREADS": "1",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "CUDA_VISIBLE_DEVICES": "-1",
            }
            environ.pop("TF_CONFIG", None)
            if kind in ("shared", "tensorflow"):
                task = {"type": "worker", "index": rank}
                environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
            self._processes.append(
                subprocess.Popen(
                    [python, "-m", "benchmarks.fit_sizes", "--work", kind],
                    cwd=Path(__file__).resolve().parents[1],
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=None if "FIT_SIZES_DEBUG" in os.environ else subprocess.DEVNULL,
                    text=True,
                )
            )

    def ms(self, size: str, way: str) -> tuple[float, float]:
        """The time of a step on the slower worker, and the CPU time of a step in the busier one."""
        for process in self._processes:
            process.stdin.write(f"{size} {way}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        replies = [process.stdout.readline().split() for process in self._processes]  # type: ignore[union-attr]
        return max(float(reply[0]) for reply in replies), max(float(reply[1]) for reply in replies)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(torch_python: str | None, rounds: int, sizes: list[str], only: list[str]) -> None:
    groups: dict[str, Group] = {}
    chosen = {name: where for name, where in CONTESTANTS.items() if not only or name in only}
    if torch_python is None:
        chosen = {name: where for name, where in chosen.items() if where[0] != "torch"}
    try:
        for kind, _ in chosen.values():
            if kind not in groups:
                groups[kind] = Group(kind, torch_python or "" if kind == "torch" else sys.executable)
        for size in sizes:
            for kind, way in chosen.values():
                groups[kind].ms(size, way)
            times: dict[str, list[float]] = {name: [] for name in chosen}
            cpu: dict[str, list[float]] = {name: [] for name in chosen}
            for _ in range(rounds):
                for name, (kind, way) in chosen.items():
                    wall, busy = groups[kind].ms(size, way)
                    times[name].append(wall)
                    cpu[name].append(busy)
            sys.stdout.write(f"\n{size} M parameters, ms per step, load {os.getloadavg()[0]:.1f}\n")
            for name, found in times.items():
                line = f"  {name:40}{statistics.median(found):8.2f} ({min(found):.2f} to {max(found):.2f})"
                line += f"  CPU {statistics.median(cpu[name]):.2f} "
                for other in ("torch DDP, arrays", "constant batch", "constant batch, no exchange"):
                    if other in times and other != name:
                        ratios = [one / two for one, two in zip(found, times[other], strict=True)]
                        line += f"  {statistics.median(ratios):5.2f}"
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
    finally:
        for group in groups.values():
            group.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work")
    parser.add_argument("--torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=list(UNITS))
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    if given.work:
        work(given.work)
    else:
        measure(given.torch, given.rounds, given.sizes, given.only)
