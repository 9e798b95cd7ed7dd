"""`replicast withdraw`, and races between a job and a withdrawal in the inbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replicast.client.directory import this_user
from replicast.core.entries import Stage
from replicast.processes import this_process
from replicast.storage import inbox
from replicast.storage.run_files import ENDED
from replicast.update.update import Update
from tests.unit.logs import log_of
from tests.unit.played_job import LONG_AGO, PlayedJob, flat, has, heard_of, invoke, meanwhile, output_of

PUSH = ("--set", "learning_rate=0.1", "--id")
pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")


def scheduled(run: Path, stops_at: Stage | None) -> PlayedJob:
    """A job that has taken update x for step 40, and stops at a stage."""
    invoke("push", run, *PUSH, "x", "--at-step", 40)
    job = PlayedJob(run, stops_at=stops_at)
    job.act_all()
    return job


def test_what_no_job_has_taken_keeps_who_what_why_and_when(run: Path) -> None:
    invoke("push", run, *PUSH, "x", "--author", "ann", "--note", "slower", "--next-start")
    invoke("withdraw", run, "x", "--note", "too slow")
    told = flat(output_of(0, "show", run, "x"))
    for part in ("ann", "slower", "assign learning_rate", f"by {this_user()}", "too slow"):
        assert part in told
    assert has(output_of(0, "log", run), "refused or withdrawn", "ann: slower", "too slow")
    seen = json.loads(invoke("status", run, "--json").output)["refused"]
    assert [(one["id"], one["stage"], one["author"]) for one in seen] == [("x", "withdrawn", "ann")]
    assert not (run / "refused" / "x.safetensors").exists(), "its values are gone"
    invoke("push", run, *PUSH, "x", "--next-start")
    assert json.loads(invoke("status", run, "--json").output)["refused"] == [], "it is pushed again"


@pytest.mark.parametrize("stage", [Stage.PREPARED, Stage.SCHEDULED])
def test_what_a_job_has_taken_and_not_committed_is_withdrawn_by_the_job(
    run: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = scheduled(run, stage)
    meanwhile(monkeypatch, lambda _secs: job.withdraw())
    assert "withdrawn x: it will not be applied" in output_of(0, "withdraw", run, "x")
    told = "assign optimizer/learning_rate to 0.1", f"withdrawn by {this_user()}"
    for command in (["show", run, "x"], ["status", run], ["log", run]):
        assert has(output_of(0, *command), "withdrawn", *told[: 1 if command[0] == "show" else 2])
    assert "scheduled" not in invoke("status", run).output
    assert "x was withdrawn: there is nothing" in output_of(1, "withdraw", run, "x")


@pytest.mark.parametrize(
    ("stage", "secs", "said"),
    [
        (Stage.PREPARED, 30.0, "without a withdrawal. Waited for the next step"),
        (Stage.SCHEDULED, 30.0, "without a withdrawal"),
        (None, 0.0, "Too late: update x is verified, step 40"),
    ],
)
def test_what_is_committed_or_not_given_back_in_time_stays(
    run: Path, stage: Stage | None, secs: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = meanwhile(monkeypatch, lambda _secs: heard_of(run))
    scheduled(run, stage)
    before = [entry.id for entry in inbox.waiting(run)]
    result = invoke("withdraw", run, "x")
    assert (result.exit_code, said in flat(result.output)) == (3 if secs else 1, True), result.output
    assert [entry.id for entry in inbox.waiting(run)] == before
    assert sum(waited) == pytest.approx(secs)
    assert inbox.requests(run) == []


def test_what_a_dead_job_had_taken_can_be_withdrawn_unless_it_is_committed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = this_process() | {"pid": ended.pid}
    invoke("push", run, *PUSH, "x")
    inbox.note_stage(run, "x", Stage.PREPARED, taken_by=dead)
    assert invoke("withdraw", run, "x").exit_code == 0
    invoke("push", run, *PUSH, "y")
    PlayedJob(run, stops_at=Stage.COMMITTED).act_all()
    inbox.note_stage(run, "y", Stage.COMMITTED, step=7, taken_by=dead)
    assert "y is committed, step 7" in output_of(1, "withdraw", run, "y")


def taken(run: Path, taker: dict[str, Any]) -> None:
    invoke("push", run, *PUSH, "x", "--next-start")
    inbox.note_stage(run, "x", Stage.PREPARED, taken_by=taker)


ELSEWHERE = {"pid": 1, "host": "another host", "started": 1}


UNKNOWN_START = {name: value for name, value in this_process().items() if name != "started"}


@pytest.mark.parametrize(
    ("taker", "heard", "code", "listens"),
    [
        (ELSEWHERE, {}, 3, 30.0),
        (ELSEWHERE, {"secs_ago": 60}, 0, 3.0),
        (ELSEWHERE, {"waiting_for": ENDED}, 0, 0.0),
        (this_process(), {"secs_ago": LONG_AGO}, 3, 0.0),  # Only stopped: it holds what it took.
        (this_process() | {"started": 1}, {}, 0, 0.0),  # Another process has the number of a dead one.
        (UNKNOWN_START, {}, 3, 30.0),
        (UNKNOWN_START, {"secs_ago": 60}, 0, 3.0),
    ],
)
def test_a_job_holds_what_it_took_while_its_process_lives_or_it_is_heard_of(
    run: Path,
    taker: dict[str, Any],
    heard: dict[str, Any],
    code: int,
    listens: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listened = meanwhile(monkeypatch, lambda _secs: None)
    taken(run, taker)
    heard_of(run, **heard)
    listened.clear()
    assert invoke("withdraw", run, "x").exit_code == code
    assert sum(listened) == pytest.approx(listens, abs=1.5)


def test_a_job_whose_clock_is_behind_is_heard_of_while_one_listens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard_of(run, secs_ago=60)
    listened = meanwhile(monkeypatch, lambda _secs: heard_of(run, secs_ago=59))
    taken(run, ELSEWHERE)
    result = invoke("withdraw", run, "x")
    assert "without a withdrawal. Waited for the next step" in flat(result.output)
    assert (result.exit_code, sum(listened)) == (3, pytest.approx(30.0, abs=1.5)), "it is asked, as it runs"
    assert [entry.id for entry in inbox.waiting(run)] == ["x"]


def test_a_job_that_has_taken_nothing_is_not_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listened = meanwhile(monkeypatch, lambda _secs: None)
    heard_of(run, LONG_AGO)
    invoke("push", run, *PUSH, "waits", "--next-start")
    assert (invoke("withdraw", run, "waits").exit_code, listened) == (0, [])


def test_a_damaged_journal_leaves_the_update_where_it_was(run: Path) -> None:
    inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    with log_of(run).open("ab") as file:
        file.write(b"{}\n")
    assert invoke("withdraw", run, "x").exit_code == 1
    assert [entry.id for entry in inbox.waiting(run)] == ["x"]
