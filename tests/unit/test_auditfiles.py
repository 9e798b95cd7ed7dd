"""Reports of audits in the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicast.storage import run_files as runfiles
from replicast.storage.run_files import append_audit, last_audits, lines_from_the_end
from tests.unit.test_audit import report


def test_the_last_reports_come_in_their_order(tmp_path: Path) -> None:
    assert last_audits(tmp_path, 3) == []
    reports = [report(number=number, requests=()) for number in range(1, 401)]
    for one in reports:
        append_audit(tmp_path, one)
    assert last_audits(tmp_path, 3) == reports[-3:]
    assert last_audits(tmp_path, 1000) == reports


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_audit(tmp_path, report())
    path = tmp_path / "audits.jsonl"
    path.write_bytes(b"\xff" * 10_000_000 + b"\n" + path.read_bytes())
    monkeypatch.setattr(runfiles, "_PIECE_BYTES", 1000)
    lines = lines_from_the_end(path)
    assert next(lines).startswith(b'{"number": 3')
    assert last_audits(tmp_path, 1) == [report()]


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 64])
def test_lines_are_whole_however_the_file_is_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(runfiles, "_PIECE_BYTES", piece)
    path = tmp_path / "lines"
    for content in (b"", b"half", b"\n", b"one\n", b"one\nhalf", b"\none\n\ntwo\nhal", b"a\nb\nc\n"):
        path.write_bytes(content)
        assert list(lines_from_the_end(path)) == content.split(b"\n")[:-1][::-1]


def test_a_torn_line_is_left_out_and_takes_nothing_with_it(tmp_path: Path) -> None:
    path = tmp_path / "audits.jsonl"
    append_audit(tmp_path, report(number=1))
    whole = path.read_bytes()
    for length in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        append_audit(tmp_path, report(number=2))
        found = [one.number for one in last_audits(tmp_path, 5)]
        # Without its line break only, a report is whole.
        assert found == ([1, 2] if length < len(whole) - 1 else [1, 1, 2])


def test_lines_of_something_else_are_left_out(tmp_path: Path) -> None:
    append_audit(tmp_path, report())
    with (tmp_path / "audits.jsonl").open("ab") as file:
        file.write(b'[]\n3\n{"number": 1}\nnull\n\n')
    assert last_audits(tmp_path, 9) == [report()]
