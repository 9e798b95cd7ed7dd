"""Every worker's note reaches worker 0's run directory, also from a host that does not see it.

Threads play the workers; TensorFlow is only imported.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from replicast.replicas import worker_notes
from replicast.replicas.position import Training
from replicast.replicas.worker_notes import DistantNotes, RunFiles
from replicast.storage.claims import Fence
from replicast.storage.run_files import ENDED, WorkerNote, read_worker_notes, write_worker_note
from tests.threads import Job, eventually

NOTE = WorkerNote(1, 100, "far", 7, 0, 2.5, training=True, waiting_for="")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(worker_notes, "LOOK_SECS", 0.01)
    monkeypatch.setattr(worker_notes, "NOTE_SECS", 0.01)
    monkeypatch.setattr(worker_notes, "SEES_SECS", 0.0)
    monkeypatch.setattr(worker_notes, "sent_every_secs", lambda workers: 0.01)
    with Job(2) as job:
        yield job


def files_of_both(
    job: Job, shared: Path, there: Path | None, *, launcher_reads: bool = False
) -> list[RunFiles]:
    """Worker 0's, and those of a worker 1 whose host has another directory, or none, at that path."""
    fence = Fence(shared, 0)
    first, other = (worker.session for worker in job.workers)
    trainings = [Training(worker.session) for worker in job.workers]
    group = fence.identity
    both = [
        RunFiles(first, shared, trainings[0], fence),
        RunFiles(other, there, trainings[1], group=group, launcher_reads=launcher_reads),
    ]
    job.workers[0].hooks.on_note = both[0].on_note
    for one in both:
        one.start()
    return both


def note_of(run: Path, rank: int) -> WorkerNote | None:
    return next((note for note in read_worker_notes(run) if note.rank == rank), None)


def step_of(run: Path, rank: int) -> int | None:
    note = note_of(run, rank)
    return None if note is None else note.step


def train(job: Job, steps: int) -> None:
    job.train(steps, closes=False)


def close(job: Job) -> None:
    """All workers meet for the last time, and stop their threads."""
    job.on_all(lambda worker: worker.session.rest("close"))
    job.on_all(lambda worker: worker.session.stop())


def test_the_note_of_a_worker_that_does_not_see_the_run_directory_appears_there(
    job: Job, tmp_path: Path
) -> None:
    shared, there = tmp_path / "shared", tmp_path / "there"
    files_of_both(job, shared, there)[1].training.active = True
    train(job, 5)
    eventually(lambda: step_of(shared, 1) == 5)
    train(job, 2)
    eventually(lambda: step_of(shared, 1) == 7)
    note = note_of(shared, 1)
    assert note is not None
    assert (note.host, note.attempt, note.training) == (socket.gethostname(), 0, True)
    assert not there.exists(), "it creates no directory of its own"


def test_a_worker_without_a_run_directory_is_seen_too(job: Job, tmp_path: Path) -> None:
    files_of_both(job, tmp_path, None)
    eventually(lambda: note_of(tmp_path, 1))


def test_a_worker_of_a_launcher_also_writes_where_its_launcher_reads(job: Job, tmp_path: Path) -> None:
    shared, there = tmp_path / "shared", tmp_path / "there"
    there.mkdir()
    files_of_both(job, shared, there, launcher_reads=True)
    train(job, 3)
    eventually(lambda: step_of(shared, 1) == 3 and step_of(there, 1) == 3)
    assert sorted(path.name for path in there.rglob("*.json")) == ["1.json"]


def test_a_worker_that_sees_the_directory_late_writes_itself_and_worker_0_does_not_any_more(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, there = tmp_path / "shared", tmp_path / "there"
    by_worker_0: list[WorkerNote] = []
    by_itself: list[WorkerNote] = []

    def write(run_dir: Path, note: WorkerNote) -> None:
        write_worker_note(run_dir, note)
        if note.rank == 1:
            (by_itself if Path(str(run_dir)) == there else by_worker_0).append(note)

    monkeypatch.setattr(worker_notes, "write_worker_note", write)
    first, other = files_of_both(job, shared, there)
    eventually(lambda: by_worker_0)
    there.symlink_to(shared)  # as a shared file system that shows it late
    eventually(lambda: by_itself)
    close(job)
    other.finish()
    first.finish()
    assert ENDED not in [note.waiting_for for note in by_worker_0]
    assert by_itself[-1].waiting_for == ENDED


def test_a_bad_note_ends_nothing_and_is_said_once(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = job.workers[0]
    files = RunFiles(first.session, tmp_path, Training(first.session), Fence(tmp_path, 0))
    job.workers[0].hooks.on_note = files.on_note
    files.start()
    session = job.workers[1].session
    session.send_note("{")
    eventually(lambda: "a note of worker 1 is not valid and is ignored" in caplog.text)
    for _ in range(3):
        session.send_note("nonsense")
        train(job, 2)
    session.send_note(json.dumps(NOTE.to_json()))
    eventually(lambda: step_of(tmp_path, 1) == NOTE.step)
    train(job, 2)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "5",
        '{"rank": 1}',
        "[" * 4000,
        json.dumps({**NOTE.to_json(), "step": "7"}),
        json.dumps({**NOTE.to_json(), "time": float("nan")}),
        json.dumps({**NOTE.to_json(), "step": 10**400}),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_note_is_not_written(tmp_path: Path, text: str) -> None:
    warned: list[tuple[Path, str, Exception]] = []
    notes = DistantNotes(lambda *about: warned.append(about))
    notes.receive(1, text)
    notes.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(warned) == 1


def test_a_note_has_the_rank_of_its_sender_and_times_of_worker_0_s_clock(tmp_path: Path) -> None:
    notes = DistantNotes(lambda *about: pytest.fail(str(about)))
    slow_clock = time.time() - 3600
    before = time.time()
    notes.receive(1, json.dumps(replace(NOTE, rank=0, time=slow_clock, stepped_at=slow_clock - 2).to_json()))
    after = time.time()
    notes.receive(2, json.dumps(replace(NOTE, time=1e308, stepped_at=-1e308).to_json()))
    notes.write(tmp_path, secs=math.inf)  # usually a tenth of a second, in which a busy machine may write one
    first, second = read_worker_notes(tmp_path)
    assert (first.rank, second.rank) == (1, 2)
    assert before <= first.time <= after
    assert first.stepped_at == pytest.approx(first.time - 2)
    assert second.stepped_at == 0.0


def test_of_many_notes_the_last_of_each_worker_is_written_a_few_at_a_time(tmp_path: Path) -> None:
    notes = DistantNotes(lambda *about: pytest.fail(str(about)))
    for step in range(3):
        for rank in range(1, 5):
            notes.receive(rank, json.dumps(replace(NOTE, step=step).to_json()))
    seen = []
    for _ in range(5):
        notes.write(tmp_path, secs=0.0)  # the time of this look is over after one
        seen.append([note.step for note in read_worker_notes(tmp_path)])
    assert seen == [[2], [2, 2], [2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2]]


def test_a_note_that_another_thread_takes_first_is_written_by_that_one_alone(tmp_path: Path) -> None:
    notes = DistantNotes(lambda *about: pytest.fail(str(about)))
    lock = notes._lock

    class OtherThreadFirst:
        """A thread of the job that a slow disk holds up still writes when the script ends."""

        def __enter__(self) -> None:
            notes._lock = lock
            notes.write(tmp_path)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    notes.receive(1, json.dumps(NOTE.to_json()))
    notes._lock = OtherThreadFirst()  # type: ignore[assignment]
    notes.write(tmp_path)
    assert [note.rank for note in read_worker_notes(tmp_path)] == [1]
