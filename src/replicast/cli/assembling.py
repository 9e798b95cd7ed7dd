"""Makes one update of what a command line names: files of tensors, saved updates, numbers."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicast.edits import Array, Edit, Operation
from replicast.errors import UpdateRefused
from replicast.files import parse_tensors, read_tensor_bytes
from replicast.parts import MAX_TENSORS, array_to_json, edit_from_values, edit_to_json, edits_of_tensors
from replicast.update import FORMAT, Update

_METADATA = "replicast"


@dataclass(frozen=True, slots=True)
class Head:
    """What the command line says of the update as a whole; None where it says nothing.

    Attributes:
        id: What tells it from all others.
        author: Who.
        note: Why.
        reset_slots: Whether the optimizer's memory of the touched variables is reset too.
        allow_nonfinite: Whether NaN and infinity are accepted.
    """

    id: str | None = None
    author: str | None = None
    note: str | None = None
    reset_slots: bool = False
    allow_nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one option adds.

    Attributes:
        edits: Its edits.
        saved: The update they come from, when it was a saved one.
    """

    edits: tuple[Edit, ...]
    saved: Update | None = None


@dataclass(frozen=True, slots=True)
class Tensors:
    """A plain file of tensors.

    Attributes:
        tensors: The tensors by name.
    """

    tensors: dict[str, Array]


def read_file(path: Path) -> Update | Tensors:
    """A file of any kind that `push` takes.

    Raises:
        UpdateRefused: It cannot be read, or is damaged.
    """
    content = read_tensor_bytes(path, max_tensors=MAX_TENSORS)
    file = parse_tensors(content, str(path), max_tensors=MAX_TENSORS)
    if _METADATA in file.metadata:
        return Update.parse(content, str(path))[0]
    return Tensors(dict(file.tensors))


def saved_part(path: Path) -> Part:
    """All edits of a saved update.

    Raises:
        UpdateRefused: The file is no saved update.
    """
    found = read_file(path)
    if isinstance(found, Update):
        return Part(found.edits, found)
    raise UpdateRefused(
        f"{path} holds tensors and not what to do with them",
        expected="a file that Update.save wrote",
        received=f"{len(found.tensors)} tensors",
        remedy="Say what to do with them: --add, --assign, …",
    )


def tensors_part(path: Path, operation: Operation, weight: float | None = None) -> Part:
    """One edit for each variable that a plain file names.

    Raises:
        UpdateRefused: The file cannot be read, or does not fit the operation.
    """
    found = read_file(path)
    if isinstance(found, Update):
        raise UpdateRefused(
            f"{path} says itself what to do with its tensors",
            expected="a plain file of tensors",
            received="a saved update",
            remedy="Give it with --update",
        )
    return Part(edits_of_tensors(found.tensors, operation, weight))


def number_part(operation: Operation, variable: str, number: float | int | bool) -> Part:
    """One edit with one number.

    Raises:
        UpdateRefused: The name is none.
    """
    if operation is Operation.SCALE:
        return Part((edit_from_values(operation, variable, number, {}),))
    return Part((edit_from_values(operation, variable, None, {"value": number}),))


def assembled(parts: Sequence[Part], head: Head) -> Update:
    """One update of all parts, in their order.

    A saved update that comes alone keeps its id; author and note are kept where the command line has none.

    Raises:
        UpdateRefused: What the head says cannot be used.
    """
    saved = [part.saved for part in parts if part.saved is not None]
    only = saved[0] if len(parts) == 1 and saved else None
    blank = Update(
        id=head.id if head.id is not None else only.id if only is not None else None,
        author=head.author if head.author is not None else _first([one.author for one in saved], this_user()),
        note=head.note if head.note is not None else _first([one.note for one in saved], ""),
        reset_slots=head.reset_slots or any(one.reset_slots for one in saved),
        allow_nonfinite=head.allow_nonfinite or any(one.allow_nonfinite for one in saved),
    )
    edits = [edit for part in parts for edit in part.edits]
    described: dict[str, Any] = blank.describe() | {
        "format": FORMAT,
        "edits": [edit_to_json(edit, lambda _name, array: array_to_json(array)) for edit in edits],
    }
    arrays = [array for edit in edits for array in _arrays(edit, blank)]
    return Update.from_parts(described, arrays)


def this_user() -> str:
    """Who runs this, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user without a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _arrays(edit: Edit, blank: Update) -> list[Array]:
    return blank.replaced([edit]).arrays()


def _first(texts: Sequence[str], otherwise: str) -> str:
    return next((text for text in texts if text), otherwise)
