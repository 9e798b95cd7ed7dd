"""`replicast audit` on a run directory with a fake job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from replicast.storage import requests
from replicast.storage.requests import Answer
from replicast.storage.run_files import WorkerNote, append_audit, write_worker_note
from replicast.update.audit_report import Deviation, Difference
from tests.unit.played_job import LONG_AGO, heard_of, invoke, made_run, meanwhile
from tests.unit.test_audit import report

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")

EQUAL: dict[str, Any] = {"differences": (), "outcome": "equal", "healed": (), "requests": (), "declared": ()}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return made_run()


class Auditing:
    """A job that answers requests, after so many looks."""

    def __init__(self, run: Path, fields: dict[str, Any], looks: int = 3) -> None:
        self.run, self.fields, self.looks = run, fields, looks

    def act(self, _secs: float) -> None:
        self.looks -= 1
        if self.looks == 0:
            ids = tuple(map(requests.id_of, requests.waiting(self.run)))
            made = report(**self.fields | {"requests": ids})
            append_audit(self.run, made)
            for id_ in ids:
                answer = Answer("audit", "me", True, made.step, 0, 1.0, details=made.to_json())
                requests.answer(self.run, id_, answer)


def answered_by(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    meanwhile(monkeypatch, act)


def test_without_an_audit_it_says_so(run: Path) -> None:
    result = invoke("audit", run)
    assert (result.exit_code, "--now" in result.output) == (0, True)
    assert invoke("audit", run, "--json").output == ""


def test_after_a_run_without_an_audit_the_output_does_not_suggest_one(run: Path) -> None:
    heard_of(run, secs_ago=60)
    result = invoke("audit", run)
    assert result.exit_code == 0
    assert "No audit was made. Not running: last heard of" in result.output
    assert "--now" not in result.output


def test_the_list_says_when_what_who_since_when_and_what_was_done(run: Path) -> None:
    append_audit(run, report(number=1, step=200, **EQUAL))
    append_audit(run, report(requests=(), time=time.time()))
    result = invoke("audit", run)
    assert result.exit_code == 0
    first, second, *details = result.output.splitlines()
    assert first == "1970-01-01  audit 1 at step 200: 8 variables are equal on 3 workers"
    assert time.strftime("%H:%M:") in second
    for said in ("audit 3 at step 300", "some step from 201 to 290", "healed by update 17"):
        assert said in second
    assert details[0].startswith("    model/dense/kernel: worker 1 differs from workers 0 and 2 (majority)")
    assert "worker 1: 1 of 12 elements" in details[1]


def test_the_list_blames_no_worker_without_a_majority(run: Path) -> None:
    tie = Difference("model/bias", ((0,), (1,)), 0, "coordinator", {1: Deviation(1, 1, 0.5, 0.1, ())})
    append_audit(run, report(differences=(tie,), requests=()))
    assert "(no majority: worker 0's value counts)" in invoke("audit", run).output


def test_a_long_report_is_cut_and_hostile_text_is_harmless(run: Path) -> None:
    found = tuple(
        Difference(f"model/\x1b[31m{n}", ((0,), (1,)), 0, "coordinator", {1: Deviation(1, 2, 0, 0, (0,))})
        for n in range(9)
    )
    append_audit(run, report(differences=found, outcome="warned", healed=(), last_equal=None, requests=()))
    result = invoke("audit", run)
    assert result.exit_code == 1
    assert "since step 290 or before" in result.output
    assert "and 9 more lines" in result.output
    assert "\x1b" not in result.output


def test_a_time_that_no_clock_can_show_hides_no_other_report(run: Path) -> None:
    append_audit(run, report(number=1, time=1e300, **EQUAL))
    append_audit(run, report(number=2, **EQUAL))
    output = invoke("audit", run).output
    assert ("audit 1" in output, "audit 2" in output) == (True, True)


def test_as_json_every_report_is_one_line(run: Path) -> None:
    for number in range(5):
        append_audit(run, report(number=number, requests=()))
    lines = invoke("audit", run, "--json", "--last", 2).output.splitlines()
    assert [json.loads(line)["number"] for line in lines] == [3, 4]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (EQUAL, 0),
        ({}, 0),
        ({"outcome": "warned", "healed": ()}, 1),
        ({"outcome": "raised", "healed": ()}, 1),
    ],
)
def test_the_exit_code_says_whether_replicas_differ_still(
    run: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], code: int
) -> None:
    answered_by(monkeypatch, Auditing(run, fields).act)
    result = invoke("audit", run, "--now")
    assert result.exit_code == code
    assert invoke("audit", run).exit_code == code
    assert "  audit 3 at step 300: " in result.output
    assert not list(requests.waiting(run))
    assert list((run / "inbox").iterdir()) == []


def test_only_the_report_that_answers_the_request_counts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Auditing(run, {"step": 400, **EQUAL})

    def act(secs: float) -> None:
        append_audit(run, report(number=99, **EQUAL))
        job.act(secs)

    answered_by(monkeypatch, act)
    result = invoke("audit", run, "--now", "--json")
    assert json.loads(result.output)["step"] == 400


def test_a_job_that_does_not_run_is_not_waited_for(run: Path) -> None:
    heard_of(run, secs_ago=60)
    result = invoke("audit", run, "--now")
    assert result.exit_code == 3
    assert "The job is not running (last heard of 60 s ago)" in result.output
    assert not list(requests.waiting(run))


def test_a_job_that_ends_meanwhile_is_not_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered_by(monkeypatch, lambda _secs: heard_of(run, LONG_AGO))
    result = invoke("audit", run, "--now")
    assert result.exit_code == 3
    assert "ended without an audit" in result.output
    assert not list(requests.waiting(run))


def test_a_report_that_was_the_last_word_of_a_job_is_shown(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Auditing(run, {"outcome": "raised", "healed": ()}, looks=1)

    def act(secs: float) -> None:
        job.act(secs)
        heard_of(run, LONG_AGO)

    answered_by(monkeypatch, act)
    assert invoke("audit", run, "--now").exit_code == 1


def note(run: Path, rank: int, step: int, *, training: bool = True, age: float = 0.0) -> None:
    write_worker_note(run, WorkerNote(rank, 1, "box", step, 0, time.time() - age, training, waiting_for=""))


def test_a_deadline_that_passes_says_who_is_waited_for(run: Path) -> None:
    note(run, 0, 6)
    result = invoke("audit", run, "--now", "--timeout", 0)
    assert result.exit_code == 3
    assert "worker 1 is behind, at step 5, others at 6" in result.output
    note(run, 1, 5, age=30)
    assert "Waited for worker 1, not heard of" in invoke("audit", run, "--now", "--timeout", 0).output
    for rank in range(2):
        note(run, rank, 5, training=False)
    assert "training to begin" in invoke("audit", run, "--now", "--timeout", 0).output
    assert not list(requests.waiting(run))


def test_of_a_job_that_hangs_inside_a_step_the_worker_with_the_oldest_note_is_named(run: Path) -> None:
    note(run, 0, 5, age=3)
    note(run, 1, 5, age=8)
    said = invoke("audit", run, "--now", "--timeout", 0).output
    assert "every worker is at step 5" in said
    assert "worker 1 was not heard of for the longest" in said
    note(run, 1, 5)
    note(run, 0, 5)
    said = invoke("audit", run, "--now", "--timeout", 0).output
    assert "every worker is at step 5" in said
    assert "for the longest" not in said, "all write their notes: which is the oldest is chance"


def test_ctrl_c_takes_the_request_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_secs: float) -> None:
        raise KeyboardInterrupt

    answered_by(monkeypatch, interrupt)
    assert invoke("audit", run, "--now").exit_code == 130
    assert not list(requests.waiting(run))


def test_a_request_that_cannot_be_written_is_refused(run: Path) -> None:
    (run / "inbox").write_text("")
    result = invoke("audit", run, "--now")
    assert result.exit_code == 1
    assert "cannot be written" in result.output


def test_status_shows_the_last_audit_in_a_line(run: Path) -> None:
    assert "audit" not in invoke("status", run).output
    append_audit(run, report(time=time.time(), **EQUAL))
    result = invoke("status", run)
    assert "audit 3 at step 300: 8 variables are equal on 3 workers" in result.output
    assert json.loads(invoke("status", run, "--json").output)["audit"]["step"] == 300
