"""Every record of the journal contains the hash of the one before: a changed one shows, seal or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.core.entries import Refused, Started
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import FileJournal
from replicast.storage.run_files import Change, JobState, RunInfo, write_change, write_run_info
from replicast.update.schema import Schema
from tests.unit.logs import cut, damage, lines_of, log_of, remove, rewritten


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts: the second continues the chain of the first."""
    for attempt in (0, 1):
        fence = Fence(tmp_path, attempt)
        write_run_info(fence, RunInfo(2, Schema([]), 2, attempt, 1.0))
        journal = FileJournal(tmp_path, fence)
        journal.write(Started(attempt, None))
        journal.write(Refused(f"id-{attempt}", ("a" * 32,), "<script>alert(1)</script>"))
        fence.release()
    write_change(tmp_path, Change(JobState.FAILED, 1, worker=1, reason="<b>ValueError</b>\x1b[31m"))
    return tmp_path


def test_the_chain_goes_through_all_attempts(run: Path) -> None:
    chain = read_chain(run)
    assert chain.problems == ()
    assert chain.length == 6
    assert len(chain.last) == 64


def test_an_old_record_that_is_rewritten_with_a_valid_seal_shows(run: Path) -> None:
    damage(run, "refused", rewritten(problem="nothing was refused"))
    (problem,) = read_chain(run).problems
    assert problem.startswith("Entry 0 of")
    assert "groups/000002/log.jsonl does not follow the record before it" in problem


def test_a_removed_or_damaged_record_shows(run: Path) -> None:
    damage(run, "started", remove)
    damage(run, "started", cut, group=2)
    missing, damaged = read_chain(run).problems
    assert "groups/000001/log.jsonl is damaged: entry 1, the start: missing" in missing
    assert "groups/000002/log.jsonl is damaged: entry 1, the start: its checksum does not match" in damaged
    assert read_chain(run).length == 6


def test_what_a_group_writes_after_it_was_taken_over_is_not_in_the_chain(run: Path) -> None:
    with log_of(run).open("ab") as file:
        file.write(lines_of(run)[-1])
    assert read_chain(run).problems == ()


def data_of(html: str) -> dict[str, Any]:
    """What a report has inside."""
    found: dict[str, Any] = json.loads(html.partition('id="report-data">')[2].partition("</script>")[0])
    return found


def test_the_report_is_one_file_in_which_nothing_of_a_job_is_markup(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", str(run), "-o", str(output)])
    assert result.exit_code == 0, result.output
    html = output.read_text()
    data = data_of(html)
    assert (data["chain"]["length"], data["chain"]["problems"]) == (6, [])
    assert data["changes"][0]["reason"] == "<b>ValueError</b>\x1b[31m"
    assert "<b>ValueError" not in html
    assert 'src="static' not in html
    assert 'href="static' not in html


def test_the_report_says_which_record_was_changed(run: Path, tmp_path: Path) -> None:
    damage(run, "started", rewritten(attempt=7))
    output = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", str(run), "-o", str(output)])
    assert result.exit_code == 1
    (problem,) = data_of(output.read_text())["chain"]["problems"]
    assert "does not follow the record before it" in problem
