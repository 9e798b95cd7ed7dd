"""`replicast revert`, `pull`, `stop` and `checkpoint now`, with a job that is played by the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import replicast
from replicast.core.entries import Before, Committed, Payload
from replicast.errors import NoAnswer, NotFound, RequestRefused, UpdateRefused
from replicast.storage import inbox, requests
from replicast.storage.checkpoint import CheckpointStore
from replicast.storage.checkpoint.manifest import Draft
from replicast.storage.fence import Fence
from replicast.storage.journal import FileJournal
from replicast.storage.requests import Answer
from replicast.storage.runfiles import ENDED
from replicast.update.digest import digest_array
from replicast.update.inverse import update_before
from replicast.update.update import Update
from replicast.update.validate import planned
from tests.unit.played_job import BIAS, SCHEMA, heard_of, invoke, made_run, meanwhile

NAME = "model/dense/bias"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return made_run()


def committed(
    run: Path, *updates: Update, reverts: dict[int, int] | None = None, before: dict[str, Any] | None = None
) -> FileJournal:
    """The journal of a job that has applied these updates."""
    journal = FileJournal(run, Fence(run, attempt=0))
    for sequence, update in enumerate(updates, 1):
        one = planned(update, SCHEMA)
        digest = one.content_digest()
        journal.write(Payload(one.id, digest, None, one.author, one.note), one)
        journal.write(
            Committed(
                sequence, one.id, digest, 10 * sequence, 0, workers=2, reverts=(reverts or {}).get(sequence)
            )
        )
        if before is not None:
            staged = journal.stage_before(update_before(one.id, before, {}))
            journal.write(Before(sequence, one.id, staged))
    return journal


class Answering:
    """A job that answers every request."""

    def __init__(self, run: Path, done: bool = True, problem: str = "", **details: Any) -> None:
        self.run, self.done, self.problem, self.details = run, done, problem, details
        self.values: np.ndarray | None = None
        self.asked: list[requests.Request] = []

    def act(self, _secs: float) -> None:
        for path in requests.waiting(self.run):
            request = requests.read(path)
            assert isinstance(request, requests.Request)
            self.asked.append(request)
            answer = Answer(request.kind, request.author, self.done, 700, 0, 1.0, self.problem, self.details)
            requests.answer(self.run, request.id, answer, self.values)


# revert


def test_a_dry_run_of_a_revert_says_what_it_does_and_what_becomes_of_the_training_since(run: Path) -> None:
    update = Update(id="fix").assign("dense/bias", BIAS).add("learning_rate", 0.5)
    committed(run, update, before={NAME: np.zeros(3, np.float32)})
    result = invoke("revert", run, 1, "--dry-run")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"{NAME}: goes back to exactly the values before: training of these values since then" in said
    assert "optimizer/learning_rate: subtracts what was added: training since then stays" in said
    assert not inbox.waiting(run)


def test_a_revert_asks_the_job_by_the_number_of_the_update_and_sends_no_values(run: Path) -> None:
    committed(run, Update(id="fix").add("dense/bias", BIAS))
    result = invoke("revert", run, "fix", "--note", "loss went up")
    assert result.exit_code == 0, result.output
    (waiting,) = inbox.waiting(run)
    taken = inbox.read(waiting.path)
    assert (taken.reverts, taken.forced, taken.update.note) == (1, False, "loss went up")
    assert taken.update.edits == ()
    assert "@" in taken.update.author


def test_what_cannot_be_reverted_is_refused_with_the_reason(run: Path) -> None:
    journal = committed(run, Update(id="fix").blend("dense/bias", BIAS, 0.5))
    none = invoke("revert", run, 7)
    assert (none.exit_code, "7" in none.output) == (1, True), none.output
    missing = invoke("revert", run, 1)
    assert missing.exit_code == 1
    assert "before the update are not kept" in missing.output
    assert "replicast pull" in missing.output
    digest = journal.history().committed[1].digest
    journal.write(Committed(2, "undo", digest, 20, 0, workers=2, reverts=1))
    twice = invoke("revert", run, 1)
    assert twice.exit_code == 1
    said = " ".join(twice.output.split())
    assert "is reverted already, by update 2. To revert it once more: --force" in said
    assert "received" not in said


ADD, ASSIGN = Update(id="add").add("dense/bias", BIAS), Update(id="assign").assign("dense/bias", BIAS)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (ASSIGN, f"update 2 has assigned {NAME} since then"),
        (Update().blend("dense/bias", BIAS, 0.5), f"update 2 has blended {NAME} since then"),
        (Update().scale("dense/bias", 0.0), f"update 2 has scaled {NAME} since then"),
        (Update().add("dense/bias", BIAS), ""),
        (Update().assign("learning_rate", 0.5), ""),
    ],
)
def test_what_was_added_is_not_subtracted_from_what_was_assigned_since_unless_forced(
    run: Path, later: Update, said: str
) -> None:
    committed(run, ADD, later)
    tried = " ".join(invoke("revert", run, 1, "--dry-run").output.split())
    assert (said in tried, "--force" in tried) == (True, bool(said)), tried
    result = invoke("revert", run, 1)
    assert (result.exit_code, bool(inbox.waiting(run))) == ((1, False) if said else (0, True)), result.output
    if said:
        told = " ".join(result.output.split())
        assert said in told
        assert "--force" in told
        assert invoke("revert", run, 1, "--force").exit_code == 0
        assert len(inbox.waiting(run)) == 1


def test_values_before_are_not_brought_back_over_any_later_update_unless_forced(run: Path) -> None:
    committed(run, ASSIGN, ADD, before={NAME: np.zeros(3, np.float32)})
    with pytest.raises(UpdateRefused, match=f"update 2 has added to {NAME} since then"):
        replicast.connect(run).revert(1)
    replicast.connect(run).revert(1, force=True)


def test_a_later_update_that_was_reverted_does_not_count(run: Path) -> None:
    committed(run, ADD, ASSIGN, Update(id="undo").assign("dense/bias", BIAS), reverts={3: 2})
    assert invoke("revert", run, 1).exit_code == 0


def test_a_revert_that_overwrites_an_update_counts(run: Path) -> None:
    committed(run, ASSIGN, ADD, Update(id="undo").assign("dense/bias", BIAS), reverts={3: 1})
    result = invoke("revert", run, 2)
    assert (result.exit_code, f"update 3 has assigned {NAME}" in " ".join(result.output.split())) == (1, True)


def test_a_revert_of_a_job_that_does_not_run_is_refused(run: Path) -> None:
    committed(run, Update(id="fix").add("dense/bias", BIAS))
    heard_of(run, secs_ago=60, waiting_for=ENDED)
    result = invoke("revert", run, 1)
    assert result.exit_code == 1
    assert "Finished" in result.output
    with pytest.raises(UpdateRefused):
        replicast.connect(run).revert(1)
    assert "--next-start" in result.output
    later = invoke("revert", run, 1, "--next-start")
    assert (later.exit_code, len(inbox.waiting(run))) == (0, 1), later.output
    assert "when it is started again" in " ".join(later.output.split())


def test_log_and_show_say_what_reverts_what(run: Path) -> None:
    journal = committed(run, Update(id="fix").add("dense/bias", BIAS))
    undo = planned(Update(id="undo").add("dense/bias", -BIAS), SCHEMA)
    journal.write(Payload("undo", undo.content_digest(), None), undo)
    journal.write(Committed(2, "undo", undo.content_digest(), 20, 0, workers=2, reverts=1))
    said = invoke("log", run).output
    assert ("reverted by update 2" in said, "reverts update 1" in said) == (True, True), said
    assert json.loads(invoke("show", run, 2, "--json").output)["reverts"] == 1
    assert "by update 2" in invoke("show", run, 1).output


# pull


def test_pulled_values_are_written_with_their_step_and_digest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = digest_array(BIAS)
    job = Answering(run, name=NAME, digests={"0": digest, "1": digest}, equal=True)
    job.values = BIAS
    meanwhile(monkeypatch, job.act)
    result = invoke("pull", run, "dense/bias", "-o", "bias.npy")
    assert result.exit_code == 0, result.output
    assert f"{NAME}: 3 float32 at step 700, from the job, digest {digest}" in " ".join(result.output.split())
    np.testing.assert_array_equal(np.load("bias.npy"), BIAS)
    assert job.asked[0].name == NAME
    assert list((run / "inbox").iterdir()) == []


def test_rows_and_ranges_of_rows_can_be_pulled(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.ones((4, 2), ml_dtypes.bfloat16)
    job = Answering(run, name="table", digests={"0": digest_array(rows)}, equal=True)
    job.values = rows
    meanwhile(monkeypatch, job.act)
    result = invoke("pull", run, "embeddings", "--rows", "1,5,7:9", "-o", "rows.safetensors")
    assert result.exit_code == 0, result.output
    assert job.asked[0].rows == ((1, 2), (5, 6), (7, 9))
    (array,) = safetensors.numpy.load_file("rows.safetensors").values()
    assert array.shape == (4, 2)
    assert invoke("pull", run, "embeddings", "-o", "rows.npy").exit_code == 2


def test_different_values_on_the_workers_are_told_with_an_exit_code_of_their_own(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Answering(run, name=NAME, digests={"0": digest_array(BIAS), "1": "b" * 32}, equal=False)
    job.values = BIAS
    meanwhile(monkeypatch, job.act)
    result = invoke("pull", run, "dense/bias", "-o", "bias.npy")
    assert result.exit_code == 4
    assert "those of worker 1 are not those of worker 0" in " ".join(result.output.split())
    assert Path("bias.npy").exists()


@pytest.mark.parametrize("rows", ["a", "1,", "5:3", "-1", "0:99999999999", "1:2:3", "²"])
def test_rows_that_are_none_are_a_usage_error(run: Path, rows: str) -> None:
    assert invoke("pull", run, "dense/bias", f"--rows={rows}", "-o", "a.npy").exit_code == 2


def test_an_unknown_variable_or_row_is_told_with_what_there_is(run: Path) -> None:
    unknown = invoke("pull", run, "dense/bais", "-o", "a.npy")
    assert (unknown.exit_code, "perhaps model/dense/bias" in unknown.output) == (1, True), unknown.output
    beyond = invoke("pull", run, "dense/bias", "--rows", "7", "-o", "a.npy")
    assert (beyond.exit_code, "0 to 2" in beyond.output) == (1, True), beyond.output
    assert invoke("pull", run, "dense/bias", "-o", "a.txt").exit_code == 2


def saved(run: Path, step: int = 40) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    dtypes = {"bfloat16": ml_dtypes.bfloat16}
    arrays = {
        one.name: (random.normal(size=one.shape) * 9).astype(dtypes.get(one.dtype, one.dtype))
        for one in SCHEMA
    }
    draft = Draft(step=step, epoch=0, batch=0, created_at=1.0, workers=2, attempt=0, schema=SCHEMA)
    CheckpointStore(run).write(draft, arrays.items())
    return arrays


def test_without_a_job_values_come_from_the_last_checkpoint_and_only_the_rows_are_read(run: Path) -> None:
    heard_of(run, secs_ago=60)
    connected = replicast.connect(run)
    with pytest.raises(NotFound, match="no checkpoint"):
        connected.pull("dense/bias")
    arrays = saved(run)
    pulled = connected.pull("dense/bias")
    assert (pulled.source, pulled.step) == ("checkpoint 40", 40)
    assert pulled.array.tobytes() == arrays[NAME].tobytes()
    assert pulled.digest == digest_array(arrays[NAME])
    rows = connected.pull("dense/kernel", rows=[3, 0, 1])
    np.testing.assert_array_equal(rows.array, arrays["model/dense/kernel"][[3, 0, 1]])
    table = connected.pull("embeddings", rows=[9])
    assert table.array.tobytes() == arrays["model/table/embeddings"][[9]].tobytes()


# stop, checkpoint now


def test_a_checkpoint_now_says_its_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, Answering(run).act)
    result = invoke("checkpoint", "now", run)
    assert (result.exit_code, result.output) == (0, "saved the checkpoint of step 700\n")


def test_a_refusal_of_the_job_is_told_with_its_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, Answering(run, done=False, problem="A trial is under way").act)
    result = invoke("checkpoint", "now", run)
    assert (result.exit_code, "A trial is under way" in result.output) == (1, True), result.output
    with pytest.raises(RequestRefused, match="at step 700"):
        replicast.connect(run).checkpoint(5.0)


def test_a_stop_says_where_and_whether_the_state_is_saved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Answering(run, saved=True)
    meanwhile(monkeypatch, job.act)
    result = invoke("stop", run)
    assert (result.exit_code, result.output) == (0, "stopped at step 700: the state is saved\n")
    found = requests.stopped_by(run, 0)
    assert found is not None, "the launcher reads who has stopped the job"
    assert found.author == job.asked[0].author
    job.problem = "There is no run directory"
    unsaved = invoke("stop", run)
    assert (unsaved.exit_code, "without a checkpoint" in unsaved.output) == (1, True), unsaved.output


@pytest.mark.parametrize(
    "words", [("stop",), ("checkpoint", "now"), ("pull", "dense/bias", "-o", "bias.npy")], ids=" ".join
)
def test_a_job_that_does_not_answer_is_exit_code_3(run: Path, words: tuple[str, ...]) -> None:
    command, *rest = words
    arguments = (command, run, *rest) if command != "checkpoint" else (*words, run)
    result = invoke(*arguments, "--timeout", 0)
    assert result.exit_code == 3, result.output
    assert "have passed without" in result.output
    assert not list(requests.waiting(run))


def test_what_only_a_running_job_can_do_is_not_waited_for(run: Path) -> None:
    heard_of(run, secs_ago=60)
    for act in (replicast.connect(run).stop, replicast.connect(run).checkpoint, replicast.connect(run).audit):
        with pytest.raises(NoAnswer, match="only a running job"):
            act()
