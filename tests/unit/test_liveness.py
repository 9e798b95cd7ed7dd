"""Whether a job is alive is known by progress seen, whatever the clocks of its machines show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from replicast.errors import ClusterError
from replicast.storage.claims import Fence
from replicast.storage.run_files import (
    ENDED,
    SILENT_SECS,
    Watch,
    WorkerNote,
    check_free,
    write_worker_note,
)


def note(rank: int = 0, at: float = 0.0, waiting_for: str = "", attempt: int = 0) -> WorkerNote:
    return WorkerNote(
        rank, 7, "there", step=31, attempt=attempt, time=at, training=True, waiting_for=waiting_for
    )


class Clock:
    """The reader's clock; `sleep` lets the time pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs


@pytest.mark.parametrize("wrong_by", [-3600.0, -15.0, 0.0, 15.0, 3600.0])
def test_a_job_whose_notes_change_is_alive_whatever_its_clock_shows(wrong_by: float) -> None:
    clock = Clock()
    seen = Watch(clock=clock)
    assert seen.look([note(at=clock.now + wrong_by)]) is None, "a note alone tells nothing"
    clock.now += 1.0
    assert seen.look([note(at=clock.now + wrong_by)]) is True
    assert seen.moving == [note(at=clock.now + wrong_by)]


@pytest.mark.parametrize("at", [0.0, 1000.0, 5000.0])
def test_a_job_whose_notes_do_not_change_is_dead_whatever_time_they_show(at: float) -> None:
    clock = Clock()
    seen = Watch(clock=clock)
    seen.until_known(lambda: [note(at=at), note(1, at=at)], clock.sleep)
    assert not seen.moving
    assert SILENT_SECS <= seen.secs < SILENT_SECS + 1.0


@pytest.mark.parametrize(
    ("looks", "alive", "moving"),
    [
        ([[note(at=1000.0)], [note(at=10.0)]], True, [0]),
        ([[note(0), note(1, at=1.0)], [note(0), note(1, at=2.0)]], True, [1]),
        ([[], [note()]], True, [0]),
        ([[note(waiting_for=ENDED)]], False, []),
        ([[note()], [note(at=1.0, waiting_for=ENDED)]], False, []),
    ],
    ids=["a clock that is set back", "one living worker", "a note that appears", "ended", "ends meanwhile"],
)
def test_progress_is_a_note_that_changes_and_an_end_that_is_noted_is_known_at_once(
    looks: list[list[WorkerNote]], alive: bool, moving: list[int]
) -> None:
    seen = Watch(clock=Clock())
    assert [seen.look(notes) for notes in looks][-1] is alive
    assert all(Watch(clock=Clock()).look(notes) is None for notes in looks[:-1]), (
        "one look alone tells nothing"
    )
    assert [one.rank for one in seen.moving] == moving


def test_without_a_note_a_watch_lasts_as_long_as_with_one() -> None:
    clock = Clock()
    seen = Watch(silent_secs=3.0, clock=clock)
    seen.until_known(list, clock.sleep)
    assert not seen.moving
    assert 3.0 <= seen.secs < 4.0


def test_a_job_that_stops_while_it_is_watched_is_dead_after_the_same_time() -> None:
    clock = Clock()
    seen = Watch(clock=clock)
    seen.look([note(at=1.0)])
    clock.now += 1.0
    assert seen.look([note(at=2.0)]) is True
    clock.now += SILENT_SECS
    assert seen.look([note(at=2.0)]) is True, "so long is no silence yet"
    clock.now += 0.5
    assert seen.look([note(at=2.0)]) is False


def claim_elsewhere(run_dir: Path, attempt: int = 0, pid: int | str = 7) -> Fence:
    """Worker 0 of a job on another host claims the directory."""
    process = {"pid": pid, "host": "there", "started": 1}
    with mock.patch("replicast.storage.claims.this_process", return_value=process):
        return Fence(run_dir, attempt)


class Elsewhere(Watch):
    """A watch in virtual time; another host acts between two looks, which are a second apart."""

    def __init__(self, act: Callable[[float], None] = lambda now: None) -> None:
        self.clock = Clock()
        super().__init__(clock=self.clock)
        self._act = act

    def look(self, notes: list[WorkerNote]) -> bool | None:  # type: ignore[override]
        found = super().look(notes)
        self.clock.now += 1.0
        self._act(self.clock.now)
        return found


@pytest.mark.parametrize("wrong_by", [-3600.0, 0.0, 3600.0])
def test_a_job_that_runs_on_another_host_is_not_taken_over_and_named(tmp_path: Path, wrong_by: float) -> None:
    claim_elsewhere(tmp_path)
    write_worker_note(tmp_path, note())
    running = Elsewhere(lambda now: write_worker_note(tmp_path, note(at=now + wrong_by)))
    told: list[str] = []
    said = (
        r"worker 0, process 7 on host 'there', has written a note while it was watched for 2\.0 s, and is at "
        r"step 31.*REPLICAST_TAKE_OVER=1"
    )
    with pytest.raises(ClusterError, match=said):
        check_free(tmp_path, tell=told.append, watched=running)
    assert "watching for 10 s whether the job of host 'there'" in told[0]


def test_a_claim_puts_no_line_into_what_is_said_of_it(tmp_path: Path) -> None:
    claim_elsewhere(tmp_path, pid="7\nreplicast: all is well")
    write_worker_note(tmp_path, note())
    running = Elsewhere(lambda now: write_worker_note(tmp_path, note(at=now)))
    with pytest.raises(ClusterError, match=r"process '7\\nreplicast: all is well' on host 'there'"):
        check_free(tmp_path, watched=running)


def test_a_job_that_starts_on_another_host_counts_before_its_first_note(tmp_path: Path) -> None:
    claim_elsewhere(tmp_path)
    write_worker_note(tmp_path, note(waiting_for=ENDED))
    claim_elsewhere(tmp_path, attempt=1)

    def begin(now: float) -> None:
        if now > 1005.0:
            write_worker_note(tmp_path, note(at=now, attempt=1))

    starting = Elsewhere(begin)
    with pytest.raises(ClusterError, match="is running"):
        check_free(tmp_path, watched=starting)


def test_a_job_of_another_host_that_has_crashed_is_taken_over_after_a_bounded_watch(tmp_path: Path) -> None:
    claim_elsewhere(tmp_path)
    write_worker_note(tmp_path, note())
    outliving = Elsewhere(lambda now: write_worker_note(tmp_path, note(1, at=now)))
    found = check_free(tmp_path, watched=outliving)
    assert SILENT_SECS <= outliving.secs < SILENT_SECS + 2.0, "worker 1 lives some seconds longer"
    never = mock.Mock(side_effect=AssertionError("watched twice"))
    assert check_free(tmp_path, found, never) == found, "the workers do not watch what the launcher has"
    claim_elsewhere(tmp_path, pid=8)
    with pytest.raises(AssertionError, match="watched twice"):
        check_free(tmp_path, found, never)


@pytest.mark.parametrize("end", ["released", "noted", "this host", "forced"])
def test_a_start_does_not_wait_where_it_is_known_that_nobody_runs(tmp_path: Path, end: str) -> None:
    fence = claim_elsewhere(tmp_path)
    write_worker_note(tmp_path, note(waiting_for=ENDED if end == "noted" else ""))
    if end == "released":
        fence.release()
    elif end == "this host":
        gone = {"pid": 2**22 + 1, "host": "here", "started": 1}
        with mock.patch("replicast.storage.claims.this_process", return_value=gone):
            Fence(tmp_path, attempt=1)
    seen = Elsewhere()
    with mock.patch("socket.gethostname", return_value="here"):
        found = check_free(tmp_path, "1" if end == "forced" else "", watched=seen)
    assert seen.secs <= 1.0, "one look at most"
    assert found != "1", "what was forced once is not forced for ever"


@contextmanager
def running_elsewhere(run_dir: Path) -> Iterator[None]:
    """A job of another host writes notes as long as the context lasts."""
    claim_elsewhere(run_dir)
    over = threading.Event()

    def write() -> None:
        count = 0.0
        while not over.wait(0.05):
            count += 1.0
            write_worker_note(run_dir, note(at=count))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def test_the_launcher_refuses_the_directory_of_a_job_on_another_host_until_it_is_told_to_take_it_over(
    tmp_path: Path,
) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text("import os, json; print(json.dumps(dict(os.environ)))")
    command = [sys.executable, "-m", "replicast", "run", "--run-dir", str(run), "--tee", "none"]
    with running_elsewhere(run):
        before = {path.name for path in run.iterdir()}
        refused = subprocess.run([*command, str(script)], capture_output=True, text=True)
        assert refused.returncode == 2, refused.stderr
        assert "worker 0, process 7 on host 'there', has written a note" in refused.stderr
        assert {path.name for path in run.iterdir()} - before <= {"launcher-0.lock", "workers"}
        environ = {**os.environ, "REPLICAST_TAKE_OVER": "1"}
        forced = subprocess.run([*command, str(script)], env=environ, capture_output=True, text=True)
        assert forced.returncode == 0, forced.stderr
    seen = json.loads((run / "logs/attempt-0/worker-0.log").read_text())
    assert len(seen["REPLICAST_TAKE_OVER"]) == 64, "that job, and no later one"
