"""Jobs that are killed or preempted: the last attempt ends with the bits of an undisturbed run."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.journal import committed_updates
from tests.jobs import DEADLINE_SECS, finish, is_alive, logs, start
from tests.pool.checks import assert_equal_on_all

KINDS = ["arrays", "dataset", "endless", "executions", "reshuffled"]

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf, replicast
from replicast.storage import inbox
from replicast.storage.journal import Updates
from replicast.update.update import Update

tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
rank, attempt = strategy.rank, int(os.environ["REPLICAST_ATTEMPT"])
Path(f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
kinds, *plan = sys.argv[1:]
what, at_step, who = plan[attempt].split(",") if attempt < len(plan) else ("nothing", 0, 0)

random = np.random.default_rng(3)
x = random.normal(size=(80, 6)).astype("float32")
y = random.integers(0, 3, 80)

def wait_until(there):
    while not there():
        time.sleep(0.002)

def data_of(kind):
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(80, seed=3)
    if kind == "dataset":
        return {"x": rows.batch(8)}
    if kind == "endless":
        return {"x": rows.repeat().batch(8), "steps_per_epoch": 10}
    if kind == "reshuffled":
        return {"x": Reshuffled()}
    return {"x": x, "y": y, "batch_size": 8}

class Reshuffled(keras.utils.PyDataset):
    order, draws = np.arange(80), np.random.default_rng(5)

    def __len__(self):
        return 10

    def __getitem__(self, number):
        rows = self.order[8 * number : 8 * number + 8]
        return x[rows], y[rows]

    def on_epoch_end(self):
        self.order = self.draws.permutation(80)

def model_of(kind):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        per_execution = 2 if kind == "executions" else 1
        model.compile(keras.optimizers.Adam(0.01), loss, steps_per_execution=per_execution)
    return model

def bias(value):
    return Update().add("dense_1/bias", np.full(3, value, "float32"))

class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = replicas.step
        if step == 2 and rank == strategy.size - 1:
            replicas.propose(bias(0.5).scale("dense/kernel", 0.9), at_step=6)    # in the checkpoints
            replicas.propose(bias(0.25).scale("optimizer/learning_rate", 0.5), at_step=13)    # in the journal
        if step == 8 and rank == 0:
            ticket = replicas.propose(bias(-1.0).scale("dense/kernel", 1.1))    # after this step's checkpoint
        if step in (2, 8):
            replicas.sync()    # so that all is decided at this step
        if step == 8 and rank == 0:
            ticket.result(60)    # its receipt is on disk
        if step == 10 and rank == 0:
            outside = Update(id="outside", reset_slots=True).scale("dense_1/kernel", -0.5)
            inbox.submit(replicas.run_dir, outside, at_step=16)
        if step == int(at_step):
            self.suffer()
        if step == 12 and rank == 0:    # a step takes no time here: the inbox would be looked into too late
            wait_until(lambda: Updates(replicas.run_dir).has_promised("outside"))

    def suffer(self):
        if what == "kill":
            last = replicas.step // 4 * 4
            if rank == int(who):
                wait_until(lambda: any(replicas.run_dir.glob(f"checkpoints/{last:08d}-*/manifest.json")))
                Path(f"killed-{attempt}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "terminate":
            if who == "launcher":
                Path(f"here-{rank}").touch()
            elif rank == int(who):
                os.kill(os.getpid(), signal.SIGTERM)
            wait_until(self.is_told)    # or a training as short as this one would end before

    def is_told(self):
        operations = replicas.run_dir / "operations.json"
        return operations.exists() and '"leave"' in operations.read_text()

for kind in kinds.split(","):
    model = model_of(kind)
    replicas = replicast.Replicas(model)
    restored = replicas.restore()
    print("restored", restored and restored.step, flush=True)
    callbacks = [replicas.callback(save_every=4, keep=9), Act()]
    model.fit(**data_of(kind), epochs=2, verbose=0, callbacks=callbacks)
    state = replicas.read(variable.name for variable in replicas.schema)
    values = {name.replace("/", "."): value for name, value in state.items()}
    np.savez(f"{kind}-{rank}.npz", step=replicas.step, **values)
    replicas.close()
"""


@dataclass
class Job:
    """A launcher in a directory of its own, started as often as a test likes."""

    directory: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def start(self, kinds: str, *plan: str, workers: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
        """Starts it on some `KINDS` of data; `plan` says what happens in each attempt.

        "kill,STEP,WORKER" or "terminate,STEP,WORKER".
        """
        options = ("--max-restarts", str(restarts))
        process = start(self.directory, TRAIN, *options, arguments=(kinds, *plan), workers=workers)
        self.started.append(process)
        return process

    def run(self, kinds: str, *plan: str, **options: int) -> tuple[int, str]:
        return finish(self.start(kinds, *plan, **options))

    def states(self, kind: str, workers: int = 2) -> list[dict[str, np.ndarray]]:
        return [dict(np.load(self.directory / f"{kind}-{rank}.npz")) for rank in range(workers)]

    def restored(self, attempt: int) -> list[str]:
        """What each worker has restored in an attempt."""
        lines = [line for log in logs(self.directory, attempt) for line in log.splitlines()]
        return [line for line in lines if line.startswith("restored ")]

    def orphans(self) -> list[int]:
        pids = [int(path.read_text()) for path in self.directory.glob("pid-*")]
        return [pid for pid in pids if is_alive(pid)]

    def wait_for(self, name: str) -> None:
        ends = time.monotonic() + DEADLINE_SECS
        while not (self.directory / name).exists():
            assert time.monotonic() < ends, f"{name} never came"
            assert self.started[-1].poll() is None, finish(self.started[-1])
            time.sleep(0.02)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Job]]:
    """Makes jobs; what is left of their launchers is ended, and their workers with them."""
    made: list[Job] = []

    def make(name: str) -> Job:
        made.append(Job(tmp_path_factory.mktemp(name)))
        return made[-1]

    yield make
    for each in made:
        for process in each.started:
            with process:
                process.kill()


Jobs = Callable[[str], Job]


@pytest.fixture(scope="module")
def undisturbed(job: Jobs) -> Job:
    """One job in which nothing happens, that trains on one kind of data after the other."""
    made = job("undisturbed")
    code, said = made.run(",".join(KINDS))
    assert code == 0, said
    return made


def journal_of(run_dir: Path) -> list[tuple[int, str, int, int]]:
    """What was committed for which step, and where it was applied last."""
    return [(one.sequence, one.id, one.step, one.receipts[-1].step) for one in committed_updates(run_dir)]


def steps_in(run_dir: Path) -> list[int]:
    store = CheckpointStore(run_dir)
    assert store.problems() == []
    return [found.step for found in store.manifests()]


def assert_same_end(found: Job, undisturbed: Job, kind: str) -> None:
    place = KINDS.index(kind)
    expected_run = undisturbed.run_dir / (f"replicas-{place + 1}" if place else "")
    assert journal_of(found.run_dir) == journal_of(expected_run)
    assert len(journal_of(found.run_dir)) == 4
    assert_equal_on_all([*undisturbed.states(kind), *found.states(kind)])
    assert found.states(kind)[0]["step"] == 20
    assert list((found.directory / "shm").iterdir()) == [], "shared memory is left behind"
    assert inbox.waiting(found.run_dir) == []
    assert found.orphans() == []


KILLS = {
    "arrays": ["kill,10,0", "kill,14,1"],
    "dataset": ["kill,14,0"],
    "endless": ["kill,14,1"],
    "reshuffled": ["kill,14,1"],
    "executions": ["kill,10,1"],
}


@pytest.mark.parametrize("kind", KILLS)
def test_a_job_whose_workers_are_killed_within_an_epoch_ends_with_the_bits_of_an_undisturbed_one(
    job: Jobs, undisturbed: Job, kind: str
) -> None:
    killed, plan = job(kind), KILLS[kind]
    code, said = killed.run(kind, *plan, restarts=len(plan))
    assert code == 0, said
    for attempt, step in enumerate(int(each.split(",")[1]) for each in plan):
        assert (killed.directory / f"killed-{attempt}").exists(), "nobody was killed"
        assert killed.restored(attempt + 1) == [f"restored {step // 4 * 4}"] * 2
    assert_same_end(killed, undisturbed, kind)


def test_sigterm_to_one_worker_saves_at_one_boundary_and_a_later_start_continues_to_the_same_bits(
    job: Jobs, undisturbed: Job
) -> None:
    left = job("one-worker")
    code, said = left.run("dataset", "terminate,10,1")
    assert code == 143, said
    assert "was told to stop (SIGTERM)" in said
    assert "failed" not in said
    assert left.orphans() == []
    assert steps_in(left.run_dir) == [4, 8, 11], said
    code, said = left.run("dataset", "terminate,10,1")
    assert code == 0, said
    assert left.restored(1) == ["restored 11"] * 2
    assert_same_end(left, undisturbed, "dataset")


def test_sigterm_to_the_launcher_does_the_same_and_until_then_no_other_launcher_may_use_the_directory(
    job: Jobs, undisturbed: Job
) -> None:
    left = job("launcher")
    process = left.start("arrays", "terminate,10,launcher")
    left.wait_for("here-0")
    left.wait_for("here-1")
    code, said = left.run("arrays")
    assert code == 2
    assert f"Another `replicast run` (process {process.pid} on " in said
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == 143, said
    assert left.orphans() == []
    assert steps_in(left.run_dir) == [4, 8, 11], said
    code, said = left.run("arrays", "terminate,10,launcher")
    assert code == 0, said
    assert left.restored(1) == ["restored 11"] * 2
    assert_same_end(left, undisturbed, "arrays")
