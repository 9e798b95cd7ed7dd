"""`replicast withdraw`, and the inbox where a job and somebody who withdraws may meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from replicast import inbox
from replicast.files import write_durably
from replicast.update import Stage, Update
from tests.unit.played_job import PlayedJob, heard_of, invoke, made_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return made_run()


def test_what_waits_can_be_withdrawn_by_the_beginning_of_its_id(run: Path) -> None:
    invoke("push", run, "--set", "learning_rate=0.1")
    (waiting,) = inbox.waiting(run)
    result = invoke("withdraw", run, waiting.id[:6])
    assert result.exit_code == 0
    assert f"withdrawn {waiting.id}" in result.output
    assert list((run / "inbox").iterdir()) == []
    gone = invoke("withdraw", run, waiting.id)
    assert (gone.exit_code, "There is no update" in gone.output) == (1, True)


@pytest.mark.parametrize("stage", [Stage.STAGED, Stage.COMMITTED, None])
def test_what_a_living_job_has_taken_cannot_be_withdrawn(run: Path, stage: Stage | None) -> None:
    invoke("push", run, "--set", "learning_rate=0.1", "--id", "x")
    played = PlayedJob(run)
    played.stops_at = stage
    played.act_all()
    before = [entry.id for entry in inbox.waiting(run)]
    result = invoke("withdraw", run, "x")
    assert result.exit_code == 1
    assert "Too late: update x is" in result.output
    assert [entry.id for entry in inbox.waiting(run)] == before


def test_what_a_dead_job_had_taken_can_be_withdrawn_unless_it_is_committed(run: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = inbox.this_process() | {"pid": ended.pid}
    invoke("push", run, "--set", "learning_rate=0.1", "--id", "x")
    inbox.note_stage(run, "x", Stage.STAGED, taken_by=dead)
    assert invoke("withdraw", run, "x").exit_code == 0
    invoke("push", run, "--set", "learning_rate=0.1", "--id", "y")
    played = PlayedJob(run)
    played.stops_at = Stage.COMMITTED
    played.act_all()
    inbox.note_stage(run, "y", Stage.COMMITTED, step=7, taken_by=dead)
    result = invoke("withdraw", run, "y")
    assert (result.exit_code, "y is committed, step 7" in result.output) == (1, True)


def test_a_job_on_another_host_counts_as_alive_while_it_is_heard_of(run: Path) -> None:
    invoke("push", run, "--set", "learning_rate=0.1", "--id", "x")
    inbox.note_stage(run, "x", Stage.PROPOSED, taken_by={"pid": 1, "host": "another host"})
    assert invoke("withdraw", run, "x").exit_code == 1
    heard_of(run, secs_ago=60)
    assert invoke("withdraw", run, "x").exit_code == 0


def between(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> list[object]:
    """Lets something happen before the inbox calls one of its functions; returns its result."""
    real, happened = getattr(inbox, name), []

    def first_act(*arguments: object, **options: object) -> object:
        if not happened:
            happened.append(act())
        return real(*arguments, **options)

    monkeypatch.setattr(inbox, name, first_act)
    return happened


def test_withdrawing_between_the_jobs_note_and_its_reading_is_too_late(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    happened = between(monkeypatch, "read", lambda: inbox.withdraw(run, "x", job_is_running=True))
    assert inbox.take(run, path) is not None
    assert happened == [False]


def test_taking_between_the_withdrawals_rename_and_its_look_loses_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    happened = between(monkeypatch, "_is_taken", lambda: inbox.take(run, path))
    assert not inbox.withdraw(run, "x", job_is_running=True)
    assert happened == [None]
    assert inbox.take(run, path) is not None


def test_a_damaged_journal_leaves_the_update_where_it_was(run: Path) -> None:
    inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    (run / "updates").mkdir()
    write_durably(run / "updates" / "000001.json", [b"{}"])
    assert invoke("withdraw", run, "x").exit_code == 1
    assert [entry.id for entry in inbox.waiting(run)] == ["x"]


def test_a_withdrawal_takes_no_path(run: Path) -> None:
    assert not inbox.withdraw(run, "../inbox/x", job_is_running=False)


def test_notes_of_updates_that_left_long_ago_are_removed(run: Path) -> None:
    for name in ("waits", "left", "young"):
        path = inbox.submit(run, Update(id=name).assign("learning_rate", 1))
        if name != "waits":
            inbox.done(path)
    (run / "inbox" / ".tmp-half").touch()
    for name in ("waits.stage.json", "left.stage.json", ".tmp-half"):
        os.utime(run / "inbox" / name, (1000, 1000))
    inbox.clean(run)
    left = sorted(path.name for path in (run / "inbox").iterdir())
    assert left == ["waits.safetensors", "waits.stage.json", "young.stage.json"]
