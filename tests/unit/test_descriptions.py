"""An update that waits in the inbox is described by the header of its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replicast.cli.texts import what_cell
from replicast.client.directory import DirectoryRun
from replicast.files import below
from replicast.storage import inbox
from replicast.storage.inbox import describe
from replicast.update.trial import Trial
from replicast.update.update import Update

ONES = np.ones((2, 3), np.float32)
UPDATE_ID = "0123456789abcdef0123456789abcdef"


def update_of(name: str = UPDATE_ID) -> Update:
    return Update(id=name, author="ana", note="why").add("x", ONES).scale("my_y", 0.5)


def test_a_waiting_update_is_shown_with_what_it_does_who_proposed_it_and_why(tmp_path: Path) -> None:
    inbox.submit(tmp_path, update_of(), at_step=7, trial=Trial(50, "loss", 0.05))
    (view,) = DirectoryRun(tmp_path)._waiting(())
    assert (view.author, view.note, view.step, view.trial) == ("ana", "why", 7, Trial(50, "loss", 0.05))
    assert view.edits == (
        {"operation": "add", "variable": "x", "shape": [2, 3]},
        {"operation": "scale", "variable": "my_y", "shape": None, "value": 0.5},
    )
    inbox.submit(tmp_path, Update(id="undo"), reverts=3)
    assert {one.id: one.reverts for one in DirectoryRun(tmp_path)._waiting(())} == {
        UPDATE_ID: None,
        "undo": 3,
    }


def test_what_a_waiting_update_does_and_waits_for_is_on_lines_of_its_own(tmp_path: Path) -> None:
    inbox.submit(tmp_path, Update(id="undo", author="ana"), reverts=3)
    (view,) = DirectoryRun(tmp_path)._waiting(())
    assert what_cell(view).plain == "reverts update 3\nana"


def test_the_values_of_a_waiting_update_are_not_read(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of()).as_path()
    content = bytearray(path.read_bytes())
    content[-4:] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    told = describe(below(tmp_path) / "inbox" / path.name)
    assert told is not None
    assert told.words(1) == "add x (+1)"


def test_a_file_that_is_no_update_is_listed_without_a_description(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of()).as_path()
    content = path.read_bytes()
    for wrong in (b"", b"x" * 9, content[:-1], b"\xff" * 8 + content[8:], content.replace(b"add", b"axd")):
        path.write_bytes(wrong)
        (view,) = DirectoryRun(tmp_path)._waiting(())
        assert (view.id, view.edits) == (UPDATE_ID, ())
    path.unlink()
    assert describe(below(tmp_path) / "inbox" / path.name) is None
    path.symlink_to(tmp_path / "elsewhere")
    assert describe(below(tmp_path) / "inbox" / path.name) is None
