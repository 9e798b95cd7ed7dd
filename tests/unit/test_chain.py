"""Every record of the journal contains the hash of the one before: a changed one shows, seal or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.client.directory import DirectoryRun
from replicast.client.report import report
from replicast.client.updates import UpdateView
from replicast.core.entries import Refused, Started
from replicast.core.records import Stage
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import FileJournal
from replicast.storage.run_files import Change, RunInfo, State, write_change, write_run_info
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
    write_change(tmp_path, Change(State.FAILED, 1, worker=1, reason="<b>ValueError</b>\x1b[31m"))
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
    assert "groups/000001/log.jsonl is damaged: entry 1: missing" in missing
    assert "groups/000002/log.jsonl is damaged: entry 1: its checksum does not match" in damaged
    assert read_chain(run).length == 6


def test_what_a_group_writes_after_it_was_taken_over_is_not_in_the_chain(run: Path) -> None:
    with log_of(run).open("ab") as file:
        file.write(lines_of(run)[-1])
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
    damage(run, "started", rewritten(attempt=7))
    output = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", str(run), "-o", str(output)])
    assert result.exit_code == 1
    assert "does not follow the record before it" in output.read_text()


def test_the_report_says_which_tables_are_part_of_the_chain(run: Path) -> None:
    html = report(DirectoryRun(run))
    said = {
        title.partition("</h2>")[0].partition(" (")[0].partition(":")[0]: title.partition("<p>")[2]
        for title in html.split("<h2>")[1:]
    }
    chained = {title for title, text in said.items() if text.startswith("Part of the chain")}
    written = {
        title
        for title, text in said.items()
        if text.startswith("As the job wrote them; not part of the chain")
    }
    assert chained == {"Updates", "Receipts"}
    assert written == {"Loss and metrics", "Checkpoints", "Starts, restarts and ends", "Audits"}


def test_the_report_says_in_words_what_an_update_does(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = [
        UpdateView(
            id="a", stage=Stage.VERIFIED, sequence=3, step=1, reverted_by=4, sha256="f" * 64,
            edits=(
                {"operation": "scale", "variable": "out/kernel", "shape": None},
                {"operation": "low_rank_add", "variable": "my_dense/kernel", "shape": [3, 4]},
                {"operation": "assign", "variable": "optimizer/learning_rate", "shape": []},
            ),
        ),
        UpdateView(id="b", stage=Stage.VERIFIED, sequence=4, step=2, reverts=3),
    ]  # fmt: skip
    directory = DirectoryRun(run)
    monkeypatch.setattr(directory, "log", lambda: views)
    html = report(directory)
    words = "scale out/kernel, low rank add my_dense/kernel (3×4), assign optimizer/learning_rate (scalar)"
    assert f"<td>{words}\nreverted by update 4</td>" in html
    assert "reverts update 3" in html
    assert '<td class="short">verified</td>' in html
    assert f"sha256 {'f' * 64}</code></td>" in html
    assert html.count("<table>") == html.count('<div class="scroll"><table>') > 0
