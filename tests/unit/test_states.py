"""A run knows how it is: the last change in states.jsonl, and what the workers last said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from replicast.client.directory import DirectoryRun
from replicast.lifetime import first
from replicast.processes import this_process
from replicast.replicas.joined_worker import RunStates
from replicast.storage.run_files import (
    ENDED,
    Change,
    JobState,
    WorkerNote,
    absent_secs,
    changes,
    read_state,
    sent_every_secs,
    write_change,
)

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")


def note(
    step: int = 7, *, age: float = 0.0, attempt: int = 0, training: bool = True, waits: str = ""
) -> WorkerNote:
    return WorkerNote(0, 1, "host", step, attempt, time.time() - age, training, waits)


def dead_process() -> dict[str, Any]:
    script = "import json; from replicast.processes import this_process; print(json.dumps(this_process()))"
    import json

    return json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)


def test_a_directory_without_a_job_was_never_started(tmp_path: Path) -> None:
    assert read_state(tmp_path, []).state is JobState.NEVER_STARTED


def test_a_job_starts_trains_restarts_and_finishes(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.STARTING, 0))
    assert read_state(tmp_path, []).state is JobState.STARTING
    assert read_state(tmp_path, [note()]).sentence == "Training at step 7"
    assert read_state(tmp_path, [note(training=False)]).state is JobState.WAITING
    write_change(tmp_path, Change(JobState.RESTARTING, 1, worker=1, reason="killed by SIGKILL"))
    restarting = read_state(tmp_path, [note(age=2.0)])
    assert restarting.state is JobState.RESTARTING
    assert restarting.sentence == "Restarting, attempt 1 (worker 1): killed by SIGKILL"
    assert read_state(tmp_path, [note(9, attempt=1)]).sentence == "Training at step 9, attempt 1"
    write_change(tmp_path, Change(JobState.FINISHED, 1, step=20))
    finished = read_state(tmp_path, [note(20, attempt=1, age=0.5, waits=ENDED)])
    assert finished.state is JobState.FINISHED
    assert finished.sentence.startswith("Finished at step 20")
    assert [one.state for one in changes(tmp_path)] == ["starting", "restarting", "finished"]


def test_a_reason_that_is_not_valid_unicode_is_escaped(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.FAILED, 0, reason="no model \udcff", last_lines=("\ud800",)))
    (change,) = changes(tmp_path)
    assert (change.reason, change.last_lines) == ("no model \\udcff", ("\\ud800",))


def test_a_note_written_just_before_the_failure_does_not_make_it_training(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.FAILED, 0, worker=1, reason="ValueError: bad", step=7))
    failed = read_state(tmp_path, [note(age=0.2)])
    assert failed.state is JobState.FAILED
    assert "(worker 1): ValueError: bad" in failed.sentence


def test_a_later_start_without_a_launcher_counts_after_the_end_of_the_first(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.FINISHED, 0, time=time.time() - 60))
    assert read_state(tmp_path, [note()]).state is JobState.TRAINING


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RESTARTING])
def test_a_start_whose_process_is_gone_is_lost(tmp_path: Path, state: JobState) -> None:
    write_change(tmp_path, Change(state, 0, process=dead_process()))
    assert read_state(tmp_path, []).state is JobState.LOST


def test_a_job_that_is_silent_and_has_no_launcher_any_more_was_lost(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.STARTING, 0, time=time.time() - 100, process=dead_process()))
    lost = read_state(tmp_path, [note(age=60)])
    assert lost.state is JobState.LOST
    assert "last heard from 60 s ago" in lost.sentence


def test_damaged_lines_hide_no_good_one(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.STARTING, 0))
    with (tmp_path / "states.jsonl").open("ab") as file:
        file.write(b'{"state": "flying"}\nnot json\n{"state": "finis')
    assert read_state(tmp_path, []).state is JobState.STARTING
    write_change(tmp_path, Change(JobState.STOPPED, 0, reason="Ctrl-C"))
    assert read_state(tmp_path, []).sentence.startswith("Stopped by Ctrl-C")


def test_long_texts_are_cut(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.FAILED, 0, reason="x" * 10**6, last_lines=("y" * 10**6,) * 1000))
    assert (tmp_path / "states.jsonl").stat().st_size < 100_000


def test_while_the_launcher_lives_the_end_of_the_workers_is_no_loss(tmp_path: Path) -> None:
    write_change(tmp_path, Change(JobState.STARTING, 0, time=time.time() - 100, process=this_process()))
    assert read_state(tmp_path, [note(100, age=3.0, waits=ENDED)]).sentence.startswith("Ending at step 100")
    silent = read_state(tmp_path, [note(age=20)])
    assert (silent.state, silent.sentence) == (
        JobState.WAITING,
        "Running at step 7: no worker has been heard from for 20 s",
    )


def test_a_script_of_one_worker_that_raises_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = RunStates(tmp_path, 0, 1, 0)
    monkeypatch.setattr(sys, "last_value", ValueError("bad"), raising=False)
    states.ended(20, told_to=False, at_exit=True)
    assert "ValueError: bad" in read_state(tmp_path, []).sentence
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    states.ended(20, told_to=False, at_exit=True)
    assert read_state(tmp_path, []).sentence.startswith("Stopped at step 20 by Ctrl-C")
    states.ended(20, told_to=False, at_exit=False)
    assert read_state(tmp_path, []).state is JobState.FINISHED, "an error of an earlier cell of a notebook"


def test_a_job_without_a_launcher_names_the_worker_that_was_lost_not_what_tensorflow_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = RunStates(tmp_path, 0, 2, 0)
    error = RuntimeError("Graph execution error:\n\nDetected at node ...\nmuch more")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    states.abandoned(20, first(1, "worker 1 was lost: its connection broke (reported by worker 0)"))
    sentence = read_state(tmp_path, []).sentence
    assert "worker 1 was lost: its connection broke (reported by worker 0)" in sentence
    assert "Graph" not in sentence
    states.abandoned(20, first(0, "worker 0 raised RuntimeError: Graph execution error:"))
    sentence = read_state(tmp_path, []).sentence
    assert "(worker 0): RuntimeError: much more" in sentence
    assert "\n" not in sentence


def test_restarts_are_counted_also_when_their_changes_are_no_longer_told(tmp_path: Path) -> None:
    for attempt in range(80):
        write_change(tmp_path, Change(JobState.RESTARTING if attempt else JobState.STARTING, attempt))
    seen = DirectoryRun(tmp_path).status()
    assert (seen.restarted, len(seen.changes)) == (79, 50)


def test_a_worker_of_a_large_job_is_not_silent_between_two_notes_that_worker_0_writes_for_it() -> None:
    assert [absent_secs(workers) for workers in (2, 100, 1000)] == [10.0, 10.0, 60.0]
    assert [sent_every_secs(workers) for workers in (2, 100, 1000)] == [2.0, 2.0, 20.0]
