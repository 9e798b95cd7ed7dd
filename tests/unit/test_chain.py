"""Every record of the journal contains the hash of the one before: a changed one shows, seal or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.core.entries import Refused, Started
from replicast.storage.chain import read_chain
from replicast.storage.fence import Fence
from replicast.storage.journal import FileJournal
from replicast.storage.runfiles import RunInfo, write_run_info
from replicast.storage.states import Change, State, write_change
from replicast.strictjson import sealed, unsealed
from replicast.update.schema import Schema


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts: the second continues the chain of the first."""
    for attempt in (0, 1):
        fence = Fence(tmp_path, attempt)
        write_run_info(fence, RunInfo(2, Schema([]), 2, attempt, 1.0))
        journal = FileJournal(tmp_path, fence)
        journal.write(Started(attempt, None))
        journal.write(Refused(f"id-{attempt}", "a" * 32, "<script>alert(1)</script>"))
        fence.release()
    write_change(tmp_path, Change(State.FAILED, 1, worker=1, reason="<b>ValueError</b>\x1b[31m"))
    return tmp_path


def test_the_chain_goes_through_all_attempts(run: Path) -> None:
    chain = read_chain(run)
    assert chain.problems == ()
    assert chain.length == 6
    assert len(chain.last) == 64


def test_an_old_record_that_is_rewritten_with_a_valid_seal_shows(run: Path) -> None:
    path = run / "groups" / "000001" / "000002.refused.json"
    fields = unsealed(path.read_bytes())
    path.write_bytes(sealed(fields | {"problem": "nothing was refused"}))
    (problem,) = read_chain(run).problems
    assert "groups/000002/claim.json does not follow the record before it" in problem


def test_a_removed_or_damaged_record_shows(run: Path) -> None:
    (run / "groups" / "000001" / "000001.started.json").unlink()
    (run / "groups" / "000002" / "000001.started.json").write_bytes(b"{")
    assert len(read_chain(run).problems) == 2


def test_what_a_group_writes_after_it_was_taken_over_is_not_in_the_chain(run: Path) -> None:
    late = run / "groups" / "000001" / "000003.refused.json"
    late.write_bytes((run / "groups" / "000001" / "000002.refused.json").read_bytes())
    assert read_chain(run).problems == ()


def test_the_report_is_one_file_in_which_everything_of_a_job_is_text(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", str(run), "-o", str(output)])
    assert result.exit_code == 0, result.output
    html = output.read_text()
    assert "All 6 records are as they were written" in html
    assert "<b>ValueError" not in html
    assert "&lt;b&gt;ValueError" in html
    assert "\x1b" not in html
    assert "<script" not in html
    assert "http" not in html


def test_the_report_says_which_record_was_changed(run: Path, tmp_path: Path) -> None:
    path = run / "groups" / "000001" / "000001.started.json"
    path.write_bytes(sealed(json.loads(json.dumps(unsealed(path.read_bytes()))) | {"attempt": 7}))
    output = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", str(run), "-o", str(output)])
    assert result.exit_code == 1
    assert "does not follow the record before it" in output.read_text()
