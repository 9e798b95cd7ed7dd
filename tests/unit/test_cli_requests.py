"""`replicast revert`, `pull`, `stop` and `checkpoint now`, with a job that is played by the test."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from msgspec.structs import replace

import replicast
from replicast.cli import runs
from replicast.client.directory import DirectoryRun
from replicast.client.run import Brief
from replicast.core.entries import Before, Committed, Payload, Stage
from replicast.errors import NotFound, RequestFailed, RequestRefused
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore, Manifest
from replicast.storage.claims import Fence
from replicast.storage.inbox import InboxAnswer
from replicast.storage.journal import FileJournal
from replicast.storage.run_files import (
    ENDED,
    FORMAT,
    Change,
    JobState,
    RunInfo,
    WorkerNote,
    write_change,
    write_run_info,
    write_worker_note,
)
from replicast.update.digest import digest_array
from replicast.update.schema import Schema, planned, update_before
from replicast.update.update import Update
from tests.unit.played_job import BIAS, SCHEMA, flat, has, heard_of, invoke, meanwhile, output_of

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")

NAME = "model/dense/bias"


def committed(
    run: Path, *updates: Update, reverts: dict[int, int] | None = None, before: dict[str, Any] | None = None
) -> FileJournal:
    """The journal of a job that has applied these updates."""
    journal = FileJournal(run, Fence(run, attempt=0))
    for sequence, update in enumerate(updates, 1):
        one = planned(update, SCHEMA)
        digest = one.content_digest()
        journal.write(Payload(one.id, digest, None, one.author, one.note), one)
        undone = (reverts or {}).get(sequence)
        journal.write(Committed(sequence, one.id, digest, 10 * sequence, 0, workers=2, reverts=undone))
        if before is not None:
            staged = journal.stage_before(update_before(one.id, before, {}))
            journal.write(Before(sequence, one.id, staged))
    return journal


class Answering:
    """A job that answers every request."""

    def __init__(self, run: Path, stage: Stage = Stage.VERIFIED, problem: str = "", **details: Any) -> None:
        self.run, self.stage, self.problem, self.details = run, stage, problem, details
        self.values: np.ndarray | None = None
        self.asked: list[inbox.InboxRequest] = []

    def act(self, _secs: float) -> None:
        for path in inbox.requests(self.run):
            request = inbox.read_request(path)
            self.asked.append(request)
            told = (self.stage, 1.0, 700, self.problem, request.kind, request.author)
            inbox.answer(self.run, request.id, InboxAnswer(*told, details=self.details), self.values)


@pytest.mark.parametrize("digits", [19, 4301])
@pytest.mark.parametrize(
    "command",
    [
        *("show run N", "revert run N", "revert run N --dry-run", "withdraw run N"),
        *("pull run dense/bias --rows N -o a.safetensors", "pull run dense/bias --rows 0:N -o a.safetensors"),
        *("log run --last N", "audit run --last N"),
        "push run --scale dense/bias=2 --at-step N --dry-run",
        "push run --scale dense/bias=2 --trial-steps N --dry-run",
        *("checkpoint show run N", "checkpoint verify run N"),
        "checkpoint patch run N --scale dense/bias=2 -o out",
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_in_words(run: Path, command: str, digits: int) -> None:
    (run / "inbox").mkdir()
    result = invoke(*(part.replace("N", "9" * digits) for part in command.split()))  # no traceback
    assert result.exit_code in (0, 1, 2)
    assert not any(words in result.output for words in ("Traceback", "File name too long"))


# revert


def test_a_dry_run_of_a_revert_says_what_it_does_and_what_becomes_of_the_training_since(run: Path) -> None:
    update = Update(id="fix").assign("dense/bias", BIAS).add("learning_rate", 0.5)
    committed(run, update, before={NAME: np.zeros(3, np.float32)})
    back = f"{NAME}: goes back to exactly the values before: training of these values since then"
    stays = "optimizer/learning_rate: subtracts what was added: training since then stays"
    assert has(output_of(0, "revert", run, 1, "--dry-run"), back, stays)
    assert not inbox.waiting(run)


def test_a_revert_asks_the_job_by_the_number_of_the_update_and_sends_no_values(run: Path) -> None:
    committed(run, ADD)
    assert "which reverts update add" in output_of(0, "revert", run, "add", "--note", "loss went up")
    (waiting,) = inbox.waiting(run)
    taken = inbox.read(waiting.path)
    assert (taken.reverts, taken.forced, taken.update.note) == (1, False, "loss went up")
    assert (taken.update.edits, "@" in taken.update.author) == ((), True)


def test_what_cannot_be_reverted_is_refused_with_the_reason(run: Path) -> None:
    journal = committed(run, Update(id="fix").blend("dense/bias", BIAS, 0.5))
    assert "7" in output_of(1, "revert", run, 7)
    assert has(output_of(1, "revert", run, 1), "before the update are not kept", "replicast pull")
    journal.write(Committed(2, "undo", journal.history().committed[1].digest, 20, 0, workers=2, reverts=1))
    said = flat(output_of(1, "revert", run, 1))
    assert "is reverted already, by update 2. To revert it once more: --force" in said
    assert "received" not in said


ADD, ASSIGN = Update(id="add").add("dense/bias", BIAS), Update(id="assign").assign("dense/bias", BIAS)
UNDO = Update(id="undo").assign("dense/bias", BIAS)


@pytest.mark.parametrize(
    ("updates", "reverts", "which", "said"),
    [
        ([ADD, ASSIGN], {}, 1, f"update 2 has assigned {NAME} since then"),
        ([ADD, Update().blend("dense/bias", BIAS, 0.5)], {}, 1, f"update 2 has blended {NAME} since then"),
        ([ADD, Update().scale("dense/bias", 0.0)], {}, 1, f"update 2 has scaled {NAME} since then"),
        ([ASSIGN, ADD], {}, 1, f"update 2 has added to {NAME} since then"),
        ([ASSIGN, ADD, UNDO], {3: 1}, 2, f"update 3 has assigned {NAME}"),
        ([ADD, Update().add("dense/bias", BIAS)], {}, 1, ""),
        ([ADD, Update().assign("learning_rate", 0.5)], {}, 1, ""),
        ([ADD, ASSIGN, UNDO], {3: 2}, 1, ""),  # A later update that was reverted does not count.
    ],
)
def test_a_revert_does_not_undo_what_came_later_unless_forced(
    run: Path, updates: list[Update], reverts: dict[int, int], which: int, said: str
) -> None:
    before = {NAME: np.zeros(3, np.float32)} if updates[0] is ASSIGN else None
    committed(run, *updates, reverts=reverts, before=before)
    tried, asked = invoke("revert", run, which, "--dry-run"), invoke("revert", run, which)
    for told in map(flat, (tried.output, asked.output)):
        assert (not said or said in told, "--force" in told) == (True, bool(said)), told
    assert (tried.exit_code, asked.exit_code) == (0, 1 if said else 0)
    assert bool(inbox.waiting(run)) != bool(said)
    if said:
        assert invoke("revert", run, which, "--force").exit_code == 0
        assert len(inbox.waiting(run)) == 1


def test_a_revert_of_a_job_that_does_not_run_is_refused(run: Path) -> None:
    committed(run, ADD)
    heard_of(run, secs_ago=60, waiting_for=ENDED)
    assert has(output_of(1, "revert", run, 1), "Finished", "--next-start")
    assert "when it is started again" in flat(output_of(0, "revert", run, 1, "--next-start"))
    assert len(inbox.waiting(run)) == 1


def test_log_and_show_say_what_reverts_what(run: Path) -> None:
    committed(run, ADD, UNDO, reverts={2: 1})
    said = invoke("log", run).output
    assert ("reverted by update 2" in said, "reverts update 1" in said) == (True, True), said
    assert "by update 2" in invoke("show", run, 1).output


# pull


@pytest.mark.parametrize("other", ["", "b" * 32], ids=["equal", "different"])
def test_pulled_values_are_written_with_their_step_and_digest_and_said_to_differ(
    run: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = digest_array(BIAS)
    job = Answering(run, name=NAME, digests={"0": digest, "1": other or digest})
    job.values = BIAS
    meanwhile(monkeypatch, job.act)
    said = flat(output_of(4 if other else 0, "pull", run, "dense/bias", "-o", "bias.npy"))
    assert f"{NAME}: 3 float32 at step 700, from the job, digest {digest}" in said
    assert ("worker 1 differs from worker 0" in said) == bool(other)
    np.testing.assert_array_equal(np.load("bias.npy"), BIAS)
    assert (job.asked[0].name, list((run / "inbox").iterdir())) == (NAME, [])


def test_rows_and_ranges_of_rows_can_be_pulled(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.ones((4, 2), ml_dtypes.bfloat16)
    job = Answering(run, name="table", digests={"0": digest_array(rows)}, equal=True)
    job.values = rows
    meanwhile(monkeypatch, job.act)
    output_of(0, "pull", run, "embeddings", "--rows", "1,5,7:9", "-o", "rows.safetensors")
    assert job.asked[0].rows == ((1, 2), (5, 6), (7, 9))
    written = safetensors.numpy.load_file("rows.safetensors")
    name = "model/table/embeddings"
    assert (written[name].shape, written[f"{name}.indices"].tolist()) == ((4, 2), [1, 5, 7, 8])
    heard_of(run)
    output_of(0, "push", run, "--assign-rows", "rows.safetensors", "--id", "back")
    (back,) = inbox.read(inbox.waiting(run)[0].path).update.edits
    assert (back.operation, back.variable, back.arrays["indices"].tolist()) == (
        "assign_rows",
        name,
        [1, 5, 7, 8],
    )
    assert back.arrays["rows"].tobytes() == rows.tobytes(), "what was pulled can be pushed back"
    job.values = np.ones((10, 2), ml_dtypes.bfloat16)
    assert invoke("pull", run, "embeddings", "-o", "rows.npy").exit_code == 2


def test_an_unknown_variable_or_row_is_told_with_what_there_is(run: Path) -> None:
    assert "perhaps model/dense/bias" in output_of(1, "pull", run, "dense/bais", "-o", "a.npy")
    assert "0 to 2" in output_of(1, "pull", run, "dense/bias", "--rows", "7", "-o", "a.safetensors")
    for wrong in (
        ("-o", "a.txt"),
        *(("--rows", rows, "-o", "a.safetensors") for rows in ("a", "2:1", "0:" + "9" * 9999)),
    ):
        output_of(2, "pull", run, "dense/bias", *wrong)
    for rows in ("-1", "1,-2:5"):
        said = flat(output_of(2, "pull", run, "dense/bias", "--rows", rows, "-o", "a.safetensors"))
        assert "Rows are counted from 0" in said
    said = flat(output_of(2, "pull", run, "dense/bias", "--rows", "1", "-o", "a.npy"))
    assert "Write a .safetensors file" in said, "a .npy file would not say which rows they are"


def saved(run: Path, step: int = 40) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    dtypes = {"bfloat16": ml_dtypes.bfloat16}
    arrays = {
        one.name: (random.normal(size=one.shape) * 9).astype(dtypes.get(one.dtype, one.dtype))
        for one in SCHEMA
    }
    draft = Manifest(step=step, epoch=0, batch=0, created_at=1.0, workers=2, attempt=0, schema=SCHEMA)
    CheckpointStore(run).write(draft, arrays)
    return arrays


def test_without_a_job_values_come_from_the_last_checkpoint_and_only_the_rows_are_read(run: Path) -> None:
    heard_of(run, secs_ago=60)
    connected = replicast.connect(run)
    with pytest.raises(NotFound, match="no checkpoint"):
        connected.pull("dense/bias")
    arrays = saved(run)
    pulled = connected.pull("dense/bias")
    assert (pulled.source, pulled.step) == ("checkpoint 40", 40)
    with pytest.raises(
        RequestRefused, match=r"too many values of model/dense/bias\. Expected: at most 11 bytes"
    ):
        connected.pull("dense/bias", max_bytes=11)
    assert connected.pull("dense/bias", [1, 2], max_bytes=11).array.size == 2
    assert pulled.array.tobytes() == arrays[NAME].tobytes()
    assert pulled.digest == digest_array(arrays[NAME])
    rows = connected.pull("dense/kernel", rows=[3, 0, 1])
    np.testing.assert_array_equal(rows.array, arrays["model/dense/kernel"][[3, 0, 1]])
    table = connected.pull("embeddings", rows=[9])
    assert table.array.tobytes() == arrays["model/table/embeddings"][[9]].tobytes()
    smaller = Schema([replace(one, shape=(1,)) if one.name == NAME else one for one in SCHEMA])
    write_run_info(Fence(run, attempt=1), RunInfo(FORMAT, smaller, 2, 1, time.time()))
    with pytest.raises(RequestRefused, match="Received: 12"):  # As it is in the checkpoint.
        connected.pull("dense/bias", max_bytes=11)


# stop, checkpoint now


def test_a_checkpoint_now_says_its_step_or_why_there_is_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Answering(run)
    meanwhile(monkeypatch, job.act)
    assert output_of(0, "checkpoint", "now", run) == "saved the checkpoint of step 700\n"
    job.stage, job.problem = Stage.REFUSED, "A trial is under way"
    assert "at step 700: A trial is under way" in output_of(1, "checkpoint", "now", run)


def test_a_stop_says_where_and_whether_the_state_is_saved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Answering(run)
    meanwhile(monkeypatch, job.act)
    monkeypatch.setattr(runs, "EXIT_SECS", 0.0)  # The workers of this job never exit.
    said = output_of(0, "stop", run)
    assert said.startswith("stopped at step 700: the state is saved\nIts workers have not exited yet")
    found = inbox.stopped_by(run, 0)
    assert found is not None, "the launcher reads who has stopped the job"
    assert found.author == job.asked[0].author
    job.problem = "There is no run directory"
    assert "without a checkpoint" in output_of(1, "stop", run)


@pytest.mark.parametrize("served", [False, True])
def test_a_stop_waits_until_the_job_or_its_server_has_ended(
    run: Path, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, after = Answering(run), list[float]()

    def act(secs: float) -> None:
        if job.asked:
            after.append(secs)
        if len(after) == 3 and not served:
            write_change(run, Change(JobState.STOPPED, 0))
        job.act(secs)

    def gone(_run: DirectoryRun) -> Brief:
        raise RequestFailed("The server cannot be reached")

    meanwhile(monkeypatch, act)
    if served:
        monkeypatch.setattr(DirectoryRun, "brief", gone)
    assert output_of(0, "stop", run) == "stopped at step 700: the state is saved\n"
    assert len(after) == (0 if served else 3)


@pytest.mark.parametrize("command", ["stop run", "checkpoint now run", "pull run dense/bias -o bias.npy"])
def test_a_job_that_does_not_answer_is_exit_code_3(run: Path, command: str) -> None:
    assert "have passed without" in output_of(3, *command.split(), "--timeout", 0)
    assert not inbox.requests(run)


def test_an_answer_that_cannot_be_read_is_told_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_rubbish(_secs: float) -> None:
        for path in inbox.requests(run):
            path.with_name(f"{inbox.id_of(path)}.answer.json").as_path().write_text("{")

    meanwhile(monkeypatch, answer_rubbish)
    assert "answer.json is damaged" in output_of(1, "checkpoint", "now", run, "--timeout", 5)
    assert not list((run / "inbox").iterdir())


@pytest.mark.parametrize("digests", [5, {}, {"zero": "a"}], ids=str)
def test_an_answer_that_says_nothing_valid_is_told_in_words(
    run: Path, monkeypatch: pytest.MonkeyPatch, digests: Any
) -> None:
    job = Answering(run, digests=digests, step="many")
    job.values = BIAS
    meanwhile(monkeypatch, job.act)
    for words in (("pull", run, "dense/bias", "-o", "bias.npy"), ("audit", run, "--now")):
        assert "The answer to the request is not valid" in flat(output_of(1, *words))


def test_after_training_went_back_everybody_names_the_checkpoint_that_a_start_goes_on_from(run: Path) -> None:
    heard_of(run, waiting_for=ENDED)
    for step in (60, 100):
        saved(run, step)
    again = saved(run, 60)  # training has gone back, and begins another line
    pulled = replicast.connect(run).pull("dense/bias")
    assert (pulled.source, pulled.step) == ("checkpoint 60", 60)
    np.testing.assert_array_equal(pulled.array, again[NAME])
    assert "The next start continues from step 60" in invoke("checkpoint", "list", run).output


# the clocks of two machines


class Ticking(Answering):
    """A job that answers, and whose workers write a note in every moment, by a clock that is wrong."""

    wrong_by_secs = 0.0
    later_secs = 0.0

    def act(self, secs: float) -> None:
        self.later_secs += secs
        heard_of(self.run, secs_ago=self.wrong_by_secs - self.later_secs)
        super().act(secs)


@pytest.mark.parametrize("wrong_by_secs", [15.0, 3600.0, -15.0, -3600.0])
def test_a_job_whose_clock_is_another_one_is_asked_and_shown_as_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, wrong_by_secs: float
) -> None:
    job = Ticking(run, name=NAME, digests={"0": digest_array(BIAS)}, equal=True)
    job.wrong_by_secs, job.values = wrong_by_secs, BIAS
    saved(run)
    heard_of(run, secs_ago=wrong_by_secs)
    listened = meanwhile(monkeypatch, job.act)
    status = invoke("status", run)
    assert (status.exit_code, "Training at step 5" in status.output) == (0, True), status.output
    assert "not seen" not in status.output
    assert invoke("checkpoint", "now", run).output == "saved the checkpoint of step 700\n"
    assert "from the job" in output_of(0, "pull", run, "dense/bias", "-o", "bias.npy")
    by_its_clock = time.time() - wrong_by_secs
    assert all(abs(one.requested_at - by_its_clock) < 60 for one in job.asked)
    assert all(one.deadline > by_its_clock for one in job.asked)
    assert sum(listened) < 3.0, "the difference of the clocks is found out once, by the first change"


@pytest.mark.parametrize("wrong_by_secs", [15.0, -15.0])
def test_a_job_that_is_dead_is_found_out_by_its_silence_once_and_not_by_a_clock(
    run: Path, monkeypatch: pytest.MonkeyPatch, wrong_by_secs: float
) -> None:
    saved(run)
    heard_of(run, secs_ago=wrong_by_secs)
    listened = meanwhile(monkeypatch, lambda _secs: None)
    assert "Not running" in invoke("status", run).output
    assert sum(listened) == pytest.approx(3.0)
    assert invoke("checkpoint", "now", run).exit_code == 3
    assert replicast.connect(run).pull("dense/bias").source == "checkpoint 40"
    assert sum(listened) == pytest.approx(3.0), "nobody listens again before a note has changed"


def test_nobody_listens_to_a_job_whose_note_is_recent_whose_processes_are_gone_or_that_has_said_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened = meanwhile(monkeypatch, lambda _secs: None)
    assert "Training" in invoke("status", run).output
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for rank in range(2):
        old = time.time() - 60
        here = socket.gethostname()
        write_worker_note(run, WorkerNote(rank, gone.pid, here, 5, 0, old, training=True, waiting_for=""))
    assert "Not running" in invoke("status", run).output
    heard_of(run, secs_ago=60)
    write_change(run, Change(JobState.FAILED, 0, time=time.time() - 50, reason="killed"))
    assert "Failed at step 5: killed" in invoke("status", run).output
    assert listened == []
