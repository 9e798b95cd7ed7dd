"""How a running job is asked for something, and what is said when it does not answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from replicast.client import Run, connect
from replicast.core.entries import Stage
from replicast.errors import NoAnswer, RequestFailed
from replicast.storage import inbox
from replicast.storage.inbox import InboxAnswer
from replicast.storage.run_files import WorkerNote, append_audit, write_worker_note
from tests.unit.played_job import LONG_AGO, heard_of, invoke, meanwhile
from tests.unit.test_audit import report

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")


@pytest.fixture
def run(directory: Path) -> Run:
    return connect(directory)


def answers(directory: Path, **fields: Any) -> None:
    """What a job does that is asked for an audit."""
    for path in inbox.requests(directory):
        made = report(**fields | {"requests": (inbox.id_of(path),)})
        append_audit(directory, made)
        answer = InboxAnswer(Stage.VERIFIED, 1.0, made.step, details=made.to_json())
        inbox.answer(directory, inbox.id_of(path), answer)


def test_only_the_report_that_answers_the_request_counts(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(_secs: float) -> None:
        append_audit(directory, report(number=99))
        answers(directory, step=400)

    meanwhile(monkeypatch, act)
    assert run.audit().step == 400
    assert list((directory / "inbox").iterdir()) == []


@pytest.mark.parametrize("answered", [True, False])
def test_a_job_that_ends_meanwhile_is_not_waited_for_and_its_last_word_counts(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    def act(_secs: float) -> None:
        if answered:
            answers(directory, outcome="raised")
        heard_of(directory, LONG_AGO)

    meanwhile(monkeypatch, act)
    if answered:
        assert run.audit().outcome == "raised"
    else:
        with pytest.raises(NoAnswer, match="ended without an audit"):
            run.audit()
    assert not list(inbox.requests(directory))


def note(directory: Path, rank: int, step: int = 5, *, training: bool = True, age: float = 0.0) -> None:
    written = WorkerNote(rank, 1, "box", step, 0, time.time() - age, training, waiting_for="")
    write_worker_note(directory, written)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"step": 6}, {}, "Furthest behind: worker 1, at step 5"),
        ({"step": 6}, {"age": 30}, "Waited for worker 1, not heard from"),
        ({"training": False}, {"training": False}, "training to begin"),
        ({}, {}, "Furthest behind: workers 0 and 1, at step 5"),
    ],
)
def test_a_deadline_that_passes_says_who_is_waited_for(
    run: Run, directory: Path, first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    note(directory, 0, **first)
    note(directory, 1, **second)
    with pytest.raises(NoAnswer, match=said):
        run.audit(timeout=0)
    assert not list(inbox.requests(directory))


def test_ctrl_c_withdraws_the_request(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_secs: float) -> None:
        raise KeyboardInterrupt

    meanwhile(monkeypatch, interrupt)
    result = invoke("audit", directory, "--now")
    assert (result.exit_code, result.output) == (130, "Stopped.\n")
    assert not list(inbox.requests(directory))


def test_a_request_that_cannot_be_written_is_refused(run: Run, directory: Path) -> None:
    (directory / "inbox").write_text("")
    with pytest.raises(RequestFailed, match="cannot be written"):
        run.audit()
