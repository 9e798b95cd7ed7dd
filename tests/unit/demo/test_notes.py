"""Notes in files: written by workers, read while they are being written."""

from __future__ import annotations

from pathlib import Path

from replicast.demo.act_one import CONTINUED, TRAINED
from replicast.demo.notes import Note, NoteReader, NoteWriter, Progress
from tests.unit.demo.played import moment


def test_notes_come_back_as_they_were_written_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    reader = NoteReader(path)
    assert list(reader.new()) == []
    written: list[Note] = [Progress(doing="training", done=3, loss=0.5), moment(TRAINED, 0, "a")]
    writer = NoteWriter(path)
    for note in written:
        writer.write(note)
    assert list(reader.new()) == written
    assert list(reader.new()) == []


def test_a_note_that_is_half_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    NoteWriter(path).write(moment(TRAINED, 0, "a"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    reader = NoteReader(path)
    assert len(list(reader.new())) == 1
    path.write_bytes(whole + whole)
    assert len(list(reader.new())) == 1


def test_what_an_audit_found_comes_back_with_the_moment(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    written = moment(CONTINUED, 0, "a")
    assert written.audit is not None
    NoteWriter(path).write(written)
    assert list(NoteReader(path).new()) == [written]
