"""What an update in the inbox says of itself: from the header of its file alone, which is cheap to read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import RunPath, open_plain
from replicast.storage.entry_files import summary
from replicast.tensorfiles import check_header, header_bytes
from replicast.update.parts import MAX_TENSORS
from replicast.update.trial import Trial
from replicast.update.update import Update

_MAX_HEADER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Description:
    """What an update would do, as its author wrote it; a job has not examined it.

    Attributes:
        author: Who proposed it.
        note: Why.
        edits: A summary of each edit, as in `CommittedUpdate`.
        at_step: The step that its author chose.
        trial: The condition of its trial, if any.
        reverts: The number of the update to undo, if any.
    """

    author: str
    note: str
    edits: tuple[Mapping[str, Any], ...]
    at_step: int | None
    trial: Trial | None
    reverts: int | None

    @property
    def words(self) -> str:
        """What it does in a few words: "add dense/bias (+3)"."""
        if self.reverts is not None:
            return f"reverts update {self.reverts}"
        if not self.edits:
            return "no edits"
        first = f"{self.edits[0]['operation']}".replace("_", " ") + f" {self.edits[0]['variable']}"
        return first + (f" (+{len(self.edits) - 1})" if len(self.edits) > 1 else "")


def describe(path: RunPath) -> Description | None:
    """The description in a file of the inbox; None if it is gone, very long, or not that of an update."""
    with contextlib.suppress(OSError, FileDamaged, UpdateRefused, ValueError, TypeError, AttributeError):
        return _read(path)
    return None


def _read(path: RunPath) -> Description | None:
    descriptor = open_plain(path)
    try:
        length = header_bytes(os.pread(descriptor, 8, 0))
        if length > _MAX_HEADER_BYTES:
            return None
        begin, nbytes = os.pread(descriptor, length, 0), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    outline = check_header(begin, nbytes, path.name, max_tensors=MAX_TENSORS)
    update, extra = Update.of_file(outline, path.name)
    trial, step, reverts = extra.get("trial"), extra.get("at_step"), extra.get("reverts")
    return Description(
        author=update.author,
        note=update.note,
        edits=tuple(summary(edit) for edit in update.edits),
        at_step=step if type(step) is int else None,
        trial=None if trial is None else Trial.from_json(trial),
        reverts=reverts if type(reverts) is int else None,
    )
