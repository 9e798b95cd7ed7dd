"""What worker 0 does with the inbox and the notes of a run, also when disk or another group are against it.

Threads play the workers; but for the last test, TensorFlow is only imported.
"""

from __future__ import annotations

import json
import logging
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.codec import parse_object
from replicast.config import heartbeat_file
from replicast.core.entries import Stage
from replicast.errors import JobFailed, UpdateRefused
from replicast.replicas import proposals
from replicast.replicas import worker_notes as run_files
from replicast.replicas.position import Fit, Position, Training
from replicast.replicas.worker_notes import Pace, RunFiles, memory_bytes, progress
from replicast.storage import inbox
from replicast.storage.claims import Fence
from replicast.storage.run_files import (
    METRICS,
    WorkerNote,
    last_metrics,
    measured_in,
    read_worker_notes,
    write_worker_note,
)
from replicast.update.update import Update
from tests.pool import Pool
from tests.threads import Job, Worker, eventually
from tests.workers.recipes import perceptron
from tests.workers.test_updates import replicas_of


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(run_files, "LOOK_SECS", 0.01)
    monkeypatch.setattr(proposals, "RETRY_SECS", 3600.0)
    with Job(1) as job:
        yield job


def bias(amount: float, **options: Any) -> Update:
    return Update(**options).add("dense/bias", np.full(3, amount, np.float32))


def keeping_of(job: Job, run: Path, fence: Fence | None = None) -> RunFiles:
    keeping = RunFiles(job.workers[0].session, run, training_of(job.workers[0]), fence)
    job.workers[0].hooks.on_inbox = keeping.inbox.on_outcome
    return keeping


def training_of(worker: Worker) -> Training:
    training = Training(worker.session)
    training.active = True
    return training


def train_until(job: Job, condition: Callable[[], object]) -> None:
    def step_and_look() -> object:
        job.workers[0].step()
        return condition()

    eventually(step_and_look)


def stage_of(run: Path, update_id: str) -> object:
    return getattr(inbox.answer_of(run, update_id), "stage", None)


def test_a_group_that_was_thought_dead_leaves_the_inbox_alone_and_its_next_boundary_says_why(
    job: Job, tmp_path: Path
) -> None:
    keeping = keeping_of(job, tmp_path, Fence(tmp_path, attempt=0))
    Fence(tmp_path, attempt=1)
    inbox.submit(tmp_path, bias(1.0, id="precious"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "inbox").iterdir()}
    keeping.start()
    session = job.workers[0].session
    eventually(session.threads.stopping.is_set)
    with pytest.raises(JobFailed, match=r"attempt 1.* has taken over .* was presumed dead"):
        session.arrive(1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "inbox").iterdir()} == before
    assert not (tmp_path / "refused").exists()
    assert read_worker_notes(tmp_path) == []


def test_what_a_group_had_taken_before_it_was_thought_dead_is_not_refused_by_it(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = keeping_of(job, tmp_path, Fence(tmp_path, attempt=0))
    session = job.workers[0].session
    outcome, others = job.workers[0].hooks.on_inbox, []

    def taken_over_just_before(ticket: str, tell: Any) -> None:
        others.append(Fence(tmp_path, attempt=1))
        outcome(ticket, tell)

    job.workers[0].hooks.on_inbox = taken_over_just_before
    inbox.submit(tmp_path, bias(np.nan, id="precious"))
    keeping.start()
    eventually(session.threads.stopping.is_set)
    eventually(lambda: len(others) == 1)  # its directory is seen before its claim is complete
    keeping.finish()
    assert [entry.id for entry in inbox.waiting(tmp_path)] == ["precious"]
    assert not (tmp_path / "refused").exists()
    assert "has taken over" in caplog.text


def test_the_end_of_a_group_that_was_thought_dead_is_not_said_of_the_next(job: Job, tmp_path: Path) -> None:
    keeping = keeping_of(job, tmp_path, Fence(tmp_path, attempt=0))
    Fence(tmp_path, attempt=1)
    note = WorkerNote(0, 1, "host", 5, 1, 2.5, training=True, waiting_for="")
    write_worker_note(tmp_path, note)
    keeping.note_end()
    keeping.finish()
    assert read_worker_notes(tmp_path) == [note]


@pytest.mark.parametrize("linked", [False, True])
def test_a_disk_that_is_away_or_a_link_in_its_place_stops_no_training_and_is_said_once(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, linked: bool
) -> None:
    keeping = keeping_of(job, tmp_path, Fence(tmp_path, attempt=0))
    inbox.submit(tmp_path, bias(1.0, id="later"))
    (tmp_path / "groups").rename(tmp_path / "away")
    if linked:
        (tmp_path / "groups").symlink_to("away")
    keeping.start()
    eventually(lambda: "cannot be kept up to date" in caplog.text)
    assert read_worker_notes(tmp_path) == []
    (tmp_path / "groups").unlink(missing_ok=True)
    (tmp_path / "away").rename(tmp_path / "groups")
    train_until(job, lambda: stage_of(tmp_path, "later") == Stage.VERIFIED)
    assert caplog.text.count("cannot be kept up to date") == 1


def test_a_metric_that_is_no_float_hides_no_other_and_stops_no_training(job: Job, tmp_path: Path) -> None:
    keeping = keeping_of(job, tmp_path)
    measures = job.workers[0].session.replica.measures
    measures.note(1, 1, {"huge": 10**400, "words": "many", "loss": 1.0, "\udcff": 2.0})
    keeping.start()
    eventually(lambda: last_metrics(tmp_path))
    assert (last_metrics(tmp_path) or {})["values"] == {"loss": 1.0, "\\udcff": 2.0}
    assert measures.history() == [(1, 1, {"loss": 1.0, "\udcff": 2.0})]


def test_the_metrics_of_the_last_steps_are_written_when_the_script_raises(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "NOTE_SECS", 1e9)
    keeping, session = keeping_of(job, tmp_path), job.workers[0].session
    keeping.start()
    for step in (59, 60):
        session.replica.measures.note(step, 1, {"loss": 60.0 - step})
    session.abandon()
    keeping.note_end()
    assert [one["step"] for one in measured_in(tmp_path, METRICS)] == [60, 59]


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The second arguments with which a function of the inbox is called from now on."""
    real, calls = getattr(inbox, name), []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(arguments[-1] if len(arguments) == 1 else arguments[1])
        return real(*arguments, **options)

    monkeypatch.setattr(inbox, name, counted)
    return calls


def warnings_in(caplog: pytest.LogCaptureFixture, path: Path) -> list[bool]:
    """Of each warning, whether it names the path."""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [str(path) in text for text in said]


def block(run: Path, update_id: str) -> None:
    """Puts a full folder where the update would be moved to when it is refused."""
    (run / "refused" / f"{update_id}.safetensors" / "part").mkdir(parents=True)


def test_a_number_in_a_note_that_no_chart_can_have_ends_no_job(job: Job, tmp_path: Path) -> None:
    keeping = keeping_of(job, tmp_path, Fence(tmp_path, attempt=0))
    note = WorkerNote(0, 1, "host", 1, 0, 1.0, training=True, waiting_for="")
    write_worker_note(tmp_path, note)
    for rank, number in enumerate((10**400, -(10**400), 2**63), start=1):
        strange = note.to_json() | {"rank": rank, "memory_bytes": number, "step": number}
        (tmp_path / "workers" / f"{rank}.json").write_text(json.dumps(strange))
    keeping.start()
    train_until(job, lambda: (tmp_path / "workers.jsonl").exists())
    assert [one.rank for one in read_worker_notes(tmp_path)] == [0]


def test_an_entry_that_cannot_be_moved_away_keeps_no_other_waiting_and_is_refused_once(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block(tmp_path, "a-folder")
    folder = tmp_path / "inbox" / "a-folder.safetensors"
    (folder / "part").mkdir(parents=True)
    looks, refused = count_calls(monkeypatch, "waiting"), count_calls(monkeypatch, "refuse")
    keeping_of(job, tmp_path).start()
    eventually(lambda: refused)
    inbox.submit(tmp_path, bias(1.0, id="good"))
    train_until(job, lambda: stage_of(tmp_path, "good") == Stage.VERIFIED)
    seen = len(looks)
    eventually(lambda: len(looks) > seen + 3)
    assert [path.as_path() for path in refused] == [folder]
    assert warnings_in(caplog, folder) == [True]


def test_an_entry_that_cannot_leave_the_inbox_keeps_no_other_from_its_word(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block(tmp_path, "bad")
    bad = inbox.submit(tmp_path, Update(id="bad").scale("of/another/model", 2.0))
    good = inbox.submit(tmp_path, bias(1.0, id="good"))
    looks, refused = count_calls(monkeypatch, "waiting"), count_calls(monkeypatch, "refuse")
    keeping_of(job, tmp_path).start()
    train_until(job, lambda: not good.exists() and refused)
    assert stage_of(tmp_path, "good") == Stage.VERIFIED
    seen = len(looks)
    eventually(lambda: len(looks) > seen + 3)
    assert refused == [bad]
    assert warnings_in(caplog, bad) == [True]


def test_an_entry_that_was_set_aside_is_tried_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposals, "RETRY_SECS", 0.05)
    block(tmp_path, "bad")
    bad = inbox.submit(tmp_path, Update(id="bad").scale("of/another/model", 2.0))
    refused = count_calls(monkeypatch, "refuse")
    keeping_of(job, tmp_path).start()
    eventually(lambda: refused)
    (tmp_path / "refused" / "bad.safetensors" / "part").rmdir()
    (tmp_path / "refused" / "bad.safetensors").rmdir()
    eventually(lambda: not bad.exists())
    assert isinstance(inbox.ended(tmp_path)["bad"].refusal, UpdateRefused)


def put(run: Path, update: Update, trial: object) -> Path:
    """Puts a file into the inbox that `submit` would not write."""
    path = run / "inbox" / f"{update.id}.safetensors"
    path.parent.mkdir(exist_ok=True)
    written = run / "written"  # A running job must not read half of it.
    written.write_bytes(b"".join(update.file_chunks({"trial": trial})))
    return written.rename(path)


def test_an_entry_with_an_absurd_number_is_refused_and_the_job_continues(job: Job, tmp_path: Path) -> None:
    put(tmp_path, bias(1.0, id="absurd"), {"steps": 5, "max_increase": 10**400})
    inbox.submit(tmp_path, bias(1.0, id="good"))
    keeping_of(job, tmp_path).start()
    train_until(job, lambda: stage_of(tmp_path, "good") == Stage.VERIFIED)
    assert list(inbox.ended(tmp_path)) == ["absurd"]
    eventually(lambda: inbox.waiting(tmp_path) == [])


@pytest.mark.parametrize(
    "where", ["replicast.storage.inbox.take", "replicast.replicas.replica.Parcels.publish"]
)
def test_an_entry_that_causes_an_unexpected_error_is_refused_with_it_and_the_job_continues(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real, calls = pkgutil.resolve_name(where), []

    def faulty(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise ZeroDivisionError("nobody foresaw this")
        return real(*arguments, **named)

    put(tmp_path, bias(1.0, id="a-bad"), None)
    monkeypatch.setattr(where, faulty)
    keeping_of(job, tmp_path).start()
    eventually(lambda: "a-bad" in inbox.ended(tmp_path))
    assert "ZeroDivisionError: nobody foresaw this" in str(inbox.ended(tmp_path)["a-bad"].refusal)
    put(tmp_path, bias(1.0, id="good"), None)
    train_until(job, lambda: stage_of(tmp_path, "good") == Stage.VERIFIED)
    eventually(lambda: inbox.waiting(tmp_path) == [])


def test_the_name_of_an_entry_puts_no_line_and_no_colour_into_the_log(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(*_: Any) -> Any:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(inbox, "take", faulty)
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a\nroot ALL=(ALL) NOPASSWD: ALL\x1b[2J.safetensors").write_bytes(b"x")
    keeping_of(job, tmp_path).start()
    eventually(lambda: inbox.ended(tmp_path))
    messages = [record.getMessage() for record in caplog.records]
    assert any("a\\nroot ALL" in text for text in messages)
    assert not any("\n" in text or "\x1b" in text for text in messages)


def test_an_update_that_a_job_has_taken_for_a_later_step_is_given_back_when_it_is_asked_for(
    job: Job, tmp_path: Path
) -> None:
    path = inbox.submit(tmp_path, bias(1.0, id="later"), at_step=10**6)
    keeping_of(job, tmp_path).start()
    eventually(lambda: stage_of(tmp_path, "later") == Stage.SCHEDULED)
    asked = inbox.ask(tmp_path, "withdraw", author="me", timeout_secs=600.0, name="later")
    train_until(job, lambda: stage_of(tmp_path, "later") == Stage.WITHDRAWN)
    eventually(lambda: not path.exists())
    assert [one.stage for one in inbox.ended(tmp_path).values()] == [Stage.WITHDRAWN]
    eventually(lambda: stage_of(tmp_path, asked.id) == Stage.WITHDRAWN)
    eventually(lambda: inbox.requests(tmp_path) == [])


def test_every_worker_writes_a_heartbeat_and_the_last_one_says_that_all_is_done(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert heartbeat_file({}, rank=0) is None
    path = heartbeat_file({"REPLICAST_PROGRESS_FILE": str(tmp_path / "beat-{rank}.json")}, rank=3)
    assert path == tmp_path / "beat-3.json"
    monkeypatch.setattr(run_files, "NOTE_SECS", 0.01)
    job.workers[0].session.attempt = 2
    training = training_of(job.workers[0])
    training.position = Position(epoch=1, batch=10, fits=(Fit(epochs=4, batches=20),))
    keeping = RunFiles(job.workers[0].session, None, training, heartbeat=path)
    keeping.logs = {"loss": np.nan, "accuracy": 0.5, "text": "no number"}
    keeping.start()
    eventually(path.exists)
    beat = parse_object(path.read_bytes())
    assert (beat["rank"], beat["attempt"], beat["step"], beat["training"]) == (0, 2, 0, True)
    assert (beat["percent"], beat["metrics"]) == (37, {"loss": None, "accuracy": 0.5})
    keeping.finish()
    eventually(lambda: parse_object(path.read_bytes())["percent"] == 100)
    assert not caplog.records


def test_a_heartbeat_that_cannot_be_written_costs_one_warning(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_files, "NOTE_SECS", 0.01)
    beat = tmp_path / "missing" / "beat.json"
    keeping = RunFiles(job.workers[0].session, None, training_of(job.workers[0]), heartbeat=beat)
    keeping.start()
    eventually(lambda: "The heartbeat file cannot be written" in caplog.text)
    keeping.note_end()
    job.workers[0].step()
    assert caplog.text.count("The heartbeat file cannot be written") == 1


def begin(strategy: Any, directory: Path) -> list[str]:
    with replicas_of(perceptron(strategy), run_dir=directory) as replicas:
        replicas.boundary()
    return sorted(path.name for path in directory.rglob(".tmp-*"))


def test_a_job_removes_the_temporaries_of_dead_workers_when_it_starts(pool1: Pool, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "workers", tmp_path / "checkpoints"):
        place.mkdir(exist_ok=True)
        (place / ".tmp-0123").mkdir() if place.name == "checkpoints" else (place / ".tmp-0123").touch()
    assert pool1.run(begin, tmp_path) == [[]]


# What a worker's note tells of its pace and its way.


def test_the_step_time_is_the_mean_of_the_last_steps() -> None:
    pace = Pace()
    not_measured = {"own_secs": None, "own_since": None}
    assert pace.look(0, 100.0, training=True) == {"step_secs": None, "stepped_at": None} | not_measured
    assert pace.look(10, 101.0, training=True) == {"step_secs": 0.1, "stepped_at": 101.0} | not_measured
    assert pace.look(10, 102.0, training=True) == {"step_secs": 0.1, "stepped_at": 101.0} | not_measured
    assert pace.look(15, 103.0, training=True)["step_secs"] == pytest.approx(0.2)


def test_the_own_time_of_a_step_is_without_waiting_and_is_known_with_the_moment_it_changed() -> None:
    pace, waited = Pace(), 0.0
    for second in range(60):  # Ten steps a second; from 30 s on, it waits no more: it has become slow.
        waited += 0.8 if second < 30 else 0.0
        told = pace.look(10 * second, 100.0 + second, waited, training=True)
        if second == 29:
            assert told["own_secs"] == pytest.approx(0.02)
            assert told["own_since"] == 104.0, "the fifth look"
    assert told["own_secs"] == pytest.approx(0.1)
    assert 130.0 < told["own_since"] <= 140.0


def test_a_pause_between_two_trainings_is_no_slow_step() -> None:
    pace = Pace()
    pace.look(0, 100.0, training=True)
    pace.look(10, 101.0, training=True)
    pace.look(10, 400.0, training=False)
    pace.look(10, 500.0, training=True)
    assert pace.look(20, 501.0, training=True)["step_secs"] == pytest.approx(0.1)


def test_a_step_that_goes_back_begins_a_new_mean() -> None:
    pace = Pace()
    pace.look(10, 100.0, training=True)
    pace.look(20, 101.0, training=True)
    assert pace.look(10, 102.0, training=True)["step_secs"] == pytest.approx(0.1)
    assert pace.look(15, 103.0, training=True)["step_secs"] == pytest.approx(0.2)


def test_the_steps_left_are_those_of_all_epochs_that_remain() -> None:
    fits = (Fit(2, 10), Fit(4, 25))
    assert progress(Position(1, 5, fits)) == {"epoch": 1, "epochs": 4, "steps_left": 70}
    assert progress(Position(4, 0, fits)) == {"epoch": 3, "epochs": 4, "steps_left": 0}


def test_what_is_not_known_is_not_told() -> None:
    assert progress(Position(1, 5, (Fit(4),))) == {"epoch": 1, "epochs": 4}
    assert progress(Position(2, 5, (), "loop")) == {"epoch": 2}


def test_the_memory_of_a_process_is_known() -> None:
    assert (memory_bytes() or 0) > 1_000_000
