"""A job that trains, and the command line: `push`, `status`, `log`, `show`, `pull`, `revert`, `stop`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from replicast.cli import main
from replicast.client.directory import this_user
from replicast.config import TOLD_TO_END
from replicast.core.entries import Stage
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.run_files import last_metrics
from replicast.update.update import Update
from tests.jobs import environ

DEADLINE_SECS = 180.0
WORKERS = 2
TRAIN = """
import time
from pathlib import Path

import keras
import numpy as np

import replicast

keras.utils.set_random_seed(1)
strategy = replicast.Strategy()
random = np.random.default_rng(0)
x, y = random.normal(size=(60, 8)).astype("float32"), random.integers(0, 2, 60)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="out")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
replicas = replicast.Replicas(model)


class Held(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.1)  # Leaves the cores of a small machine to the commands.
        while Path("hold").exists():  # Who has passed this already waits in the next step.
            if not Path("held").exists():
                Path(f"held-{replicas.rank}").write_text(str(replicas.step))
                Path(f"held-{replicas.rank}").rename("held")
            time.sleep(0.01)


model.fit(x, y, batch_size=12, epochs=10**6, verbose=0, callbacks=[Held(), replicas.callback()])
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code, and all that it said."""

    code: int
    said: str


def command(*words: object) -> Ended:
    """Runs a command in this process, which saves the time that Python needs to start."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.output)


def process(*words: object) -> Ended:
    """Runs a command as people do."""
    ended = subprocess.run(
        [sys.executable, "-m", "replicast", *map(str, words)],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECS,
    )
    return Ended(ended.returncode, ended.stdout)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Workers that train in `tmp_path`, which is the current directory, until told to end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "train.py").write_text(TRAIN)
    with subprocess.Popen(
        [sys.executable, "-m", "replicast", "run", "-n", str(WORKERS), "--run-dir", "run", "train.py"],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.terminate()  # Its workers go with it.
            try:
                launcher.communicate(timeout=120)
            finally:
                launcher.kill()


def eventually(condition: Callable[[], object], launcher: subprocess.Popen[str], otherwise: str) -> None:
    end = time.monotonic() + DEADLINE_SECS
    while not condition():
        if launcher.poll() is not None and launcher.stdout is not None:
            pytest.fail(f"the job has ended: {launcher.stdout.read()}")
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def stage_of(run: Path, update_id: str) -> object:
    return getattr(inbox.answer_of(run, update_id), "stage", None)


SAME_ON_ALL = rf"^  digest [0-9a-f]{{32}}, the same on {WORKERS} workers$"
DELTA = np.array([0.5, -0.25], np.float32)


def test_a_training_job_is_changed_and_stopped_from_outside(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    eventually(lambda: last_metrics(tmp_path / "run") is not None, job, "no step was trained")
    safetensors.numpy.save_file({"out/bias": DELTA}, tmp_path / "delta.safetensors")
    a_change_reaches_all_workers_at_one_step(tmp_path)
    an_audit_can_be_asked_for(tmp_path)
    bad_updates_in_the_inbox_are_refused_by_the_job(job, tmp_path)
    the_step_can_be_chosen(job, tmp_path)
    the_other_commands_tell_of_it(tmp_path)
    values_can_be_pulled_and_reverted_and_the_state_saved(tmp_path)
    an_audit_can_be_asked_for(tmp_path)
    it_can_be_stopped_and_has_saved_its_state(job, tmp_path)


def a_change_reaches_all_workers_at_one_step(directory: Path) -> None:
    options = ("--id", "delta", "--note", "by hand", "--wait")
    added = process("push", "run", "--add", "delta.safetensors", *options)
    assert added.code == 0, added
    assert re.search(r"^verified: number 1, applied at step \d+$", added.said, re.MULTILINE), added
    assert re.search(SAME_ON_ALL, added.said, re.MULTILINE), added


def an_audit_can_be_asked_for(directory: Path) -> None:
    asked = process("audit", "run", "--now")
    assert asked.code == 0, asked
    assert re.fullmatch(
        rf"\S+  audit \d+ at step \d+: \d+ variables are equal on {WORKERS} workers\n", asked.said
    ), asked
    assert list((directory / "run" / "inbox").glob("*.request.json")) == []
    (number,) = re.findall(r"audit (\d+) ", asked.said)
    listed = command("audit", "run", "--json", "--last", 100_000)
    assert number in {str(json.loads(line)["number"]) for line in listed.said.splitlines()}
    assert f"variables are equal on {WORKERS} workers" in " ".join(command("status", "run").said.split())


def bad_updates_in_the_inbox_are_refused_by_the_job(job: subprocess.Popen[str], directory: Path) -> None:
    run, content = directory / "run", (directory / "delta.safetensors").read_bytes()
    inbox.submit(run, Update(id="nan").add("out/bias", DELTA * np.float32(np.nan)))
    inbox.submit(run, Update(id="shape").add("out/bias", DELTA[:1]))
    for name, complete in {"torn": content[:-1], "\x1b[31mevil": content}.items():
        (directory / "copy").write_bytes(complete)
        (directory / "copy").rename(run / "inbox" / f"{name}.safetensors")
    eventually(lambda: len(inbox.ended(run)) == 4 and not inbox.waiting(run), job, "not all were refused")


def the_step_can_be_chosen(job: subprocess.Popen[str], directory: Path) -> None:
    run = directory / "run"
    far = ("push", "run", "--scale", "hidden/kernel=0.5", "--at-step", 10**9, "--id", "far")
    assert command(*far).code == 0

    eventually(lambda: stage_of(run, "far") == Stage.SCHEDULED, job, "it was never scheduled")
    given_up = command(*far, "--wait", "--timeout", 0)
    assert given_up.code == 3, given_up
    assert f"scheduled for step {10**9}" in given_up.said
    assert command("withdraw", "run", "far").code == 0
    assert "withdrawn" in command("show", "run", "far").said
    assert command("withdraw", "run", "delta").code == 1, "it is applied already"

    (directory / "hold").touch()
    eventually((directory / "held").exists, job, "the training was not held")
    step = int((directory / "held").read_text()) + 20  # None is further ahead than an epoch of five steps.
    near = ("push", "run", "--set", "learning_rate=0.002", "--reset-slots", "--at-step", step, "--id", "near")
    assert command(*near).code == 0
    eventually(lambda: stage_of(run, "near") == Stage.SCHEDULED, job, "it was never scheduled")
    (directory / "hold").unlink()
    scheduled = command(*near, "--wait")
    assert scheduled.code == 0, scheduled
    assert f"applied at step {step}\n" in scheduled.said
    past = command("push", "run", "--set", "learning_rate=0.002", "--at-step", 1)
    assert past.code == 1, past


def the_other_commands_tell_of_it(directory: Path) -> None:
    log = command("log", "run", "--json")
    listed = {one["id"]: one for one in map(json.loads, log.said.splitlines())}
    assert {name: one["stage"] for name, one in listed.items()} == {"delta": "verified", "near": "verified"}
    assert listed["delta"]["note"] == "by hand"
    assert len(listed["delta"]["digests"]) == WORKERS
    assert len(set(listed["delta"]["digests"].values())) == 1
    table = command("log", "run")
    assert (table.code, "sequential/out/bias" in table.said) == (0, True), table
    shown = json.loads(command("show", "run", 1, "--json").said)
    assert shown["edits"][0]["values"]["maximum"] == 0.5
    status = json.loads(command("status", "run", "--json").said)
    assert [worker["rank"] for worker in status["workers"]] == list(range(WORKERS))
    assert "loss" in status["metrics"]["values"]
    refused = dict.fromkeys(("nan", "shape", "torn", "\x1b[31mevil"), "refused")
    assert {one["id"]: one["stage"] for one in status["refused"]} == {**refused, "far": "withdrawn"}
    seen = command("status", "run")
    assert (seen.code, f"run: {WORKERS} workers" in seen.said, "\x1b" in seen.said) == (0, True, False), seen


def values_can_be_pulled_and_reverted_and_the_state_saved(directory: Path) -> None:
    pulled = command("pull", "run", "learning_rate", "-o", "rate.npy")
    assert pulled.code == 0, pulled
    assert np.load(directory / "rate.npy") == np.float32(0.002)
    planned = command("revert", "run", "near", "--dry-run")
    assert planned.code == 0, planned
    assert "goes back to exactly the values before" in planned.said
    reverted = command("revert", "run", "near", "--wait")
    assert reverted.code == 0, reverted
    assert re.search(SAME_ON_ALL, reverted.said, re.MULTILINE), reverted
    assert command("pull", "run", "learning_rate", "-o", "rate.npy").code == 0
    assert np.load(directory / "rate.npy") == np.float32(0.001)
    again = command("revert", "run", "near")
    assert again.code == 1, again
    assert "is reverted already" in again.said
    rows = command("pull", "run", "hidden/kernel", "--rows", "1,5:7", "-o", "rows.safetensors")
    assert rows.code == 0, rows
    found = safetensors.numpy.load_file(directory / "rows.safetensors")
    assert {name: array.shape for name, array in found.items() if not name.endswith(".indices")} == {
        "sequential/hidden/kernel": (3, 4)
    }
    assert found["sequential/hidden/kernel.indices"].tolist() == [1, 5, 6]
    saved = command("checkpoint", "now", "run")
    assert saved.code == 0, saved
    assert [one.step for one in CheckpointStore(directory / "run").manifests()] == [
        int(re.findall(r"of step (\d+)", saved.said)[0])
    ]


def it_can_be_stopped_and_has_saved_its_state(job: subprocess.Popen[str], directory: Path) -> None:
    stopped = command("stop", "run")
    assert stopped.code == 0, stopped
    step = int(re.findall(r"stopped at step (\d+)", stopped.said)[0])
    said, _ = job.communicate(timeout=DEADLINE_SECS)
    assert job.returncode == TOLD_TO_END, said
    assert f"replicast: stopped by {this_user()} at step {step}" in said
    assert "restart" not in said
    pulled = command("pull", "run", "out/bias", "-o", "bias.npy")
    assert pulled.code == 0, pulled
    assert f"from the checkpoint {step}" in pulled.said
    assert np.load(directory / "bias.npy").shape == (2,)
