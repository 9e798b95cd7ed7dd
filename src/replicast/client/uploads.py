"""An update in a file that somebody else sent: mapped, so that a large one is never whole in memory."""

from __future__ import annotations

import os
import secrets

import numpy as np

from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import TEMPORARY, RunDir, RunPath, below, outline_of, parse_tensors
from replicast.update.edits import EditKind
from replicast.update.update import MAX_TENSORS, Update, edits_of_tensors

_METADATA = "replicast"
_SOURCE = "The uploaded file"


def new_upload(run_dir: RunDir) -> RunPath:
    """A name beside the inbox for a file on its way in. If it is left behind, the job removes it."""
    return below(run_dir) / "inbox" / f"{TEMPORARY}upload-{secrets.token_hex(8)}"


def update_in(
    path: RunPath,
    *,
    operation: EditKind | None = None,
    weight: float | None = None,
    id: str | None = None,  # noqa: A002 - the name of the thing
    note: str | None = None,
    author: str = "",
    reset_slots: bool = False,
    allow_nonfinite: bool = False,
) -> Update:
    """The update in a file that nobody else changes. Its arrays are views of the mapped file."""
    try:
        update = _read(path, operation, weight)
    except FileDamaged as error:
        verdict = f": {error.problem}" if error.problem else ""
        raise UpdateRefused(
            f"{_SOURCE} {error.verdict}{verdict}",
            expected=error.expected,
            received=error.received,
            remedy=error.remedy,
        ) from error
    blank = Update(
        id=id if id is not None else update.id if update.id_was_given or operation is None else None,
        note=update.note if note is None else note,
        author=update.author if update.author else author,
        reset_slots=reset_slots or update.reset_slots,
        allow_nonfinite=allow_nonfinite or update.allow_nonfinite,
    )
    return Update.from_parts(blank.describe() | {"edits": update.describe()["edits"]}, update.arrays())


def _read(path: RunPath, operation: EditKind | None, weight: float | None) -> Update:
    outline_of(path, max_tensors=MAX_TENSORS)
    with os.fdopen(path.open(os.O_RDONLY), "rb") as opened:
        content = np.memmap(opened, np.uint8, "r").data
    if operation is None:
        return Update.parse(content, _SOURCE, remedy="Say what to do with them: choose an operation")[0]
    file = parse_tensors(content, _SOURCE, max_tensors=MAX_TENSORS)
    if _METADATA in file.metadata:
        raise UpdateRefused(
            f"{_SOURCE} says itself what to do with its tensors",
            expected="a plain file of tensors",
            received="a saved update",
            remedy="Send it without an operation",
        )
    return Update().replaced(edits_of_tensors(file.tensors, operation, weight))
