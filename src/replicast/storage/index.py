"""An index: many entries of the journal in one file, so that a start need not open each of them.

    groups/000003/000412.index.jsonl     every entry that counts up to the 412th of the third group

The first line says how many entries of which group the index covers, the last line is the seal, and each line
between them is an entry without its summary of edits. An index is derived data: if it is damaged, missing, or
covers entries that do not count, readers open the entries instead. So it is written without a sync.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from replicast.files import MAX_JSON_BYTES, RunDir, RunPath, read_small, write_quickly
from replicast.storage.entry_files import EntryFile, parsed
from replicast.storage.groups import group_directory, group_numbers
from replicast.strictjson import parse_object

FORMAT = 1
_NAME = re.compile(r"([0-9]{6,})\.index\.jsonl")

Covered: TypeAlias = Sequence[tuple[int, int]]
"""Groups in order, each with its number of entries."""


def write_index(run_dir: RunDir, group: int, files: Sequence[EntryFile]) -> None:
    """Writes an index of the entries that count so far, and removes the earlier indexes of this run.

    Args:
        run_dir: The run directory.
        group: The group that writes.
        files: All entries that count, in order.

    Raises:
        OSError: It cannot be written.
    """
    covers = covered_by(files)
    own = dict(covers).get(group, 0)
    lines = [_line({"format": FORMAT, "covers": covers})]
    lines.extend(_line(file.without_edits().fields()) for file in files)
    body = "".join(lines)
    path = group_directory(run_dir, group) / f"{own:06d}.index.jsonl"
    write_quickly(path, body + _seal(body))
    for old in indexes_of(run_dir, group):
        if old != path:
            with contextlib.suppress(OSError):
                old.unlink()


def read_index(path: RunPath) -> list[EntryFile]:
    """Reads the entries in an index.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    text = read_small(path, max_bytes=MAX_JSON_BYTES).decode()
    body = text[: text.rfind("\n", 0, -1) + 1]
    if not body or text != body + _seal(body):
        raise ValueError("its seal does not match its content")
    head, *entries = body.splitlines()
    described = parse_object(head)
    if described.get("format") != FORMAT:
        raise ValueError(f"it has format {described.get('format')!r}")
    files = [parsed(str(fields.get("kind")), fields) for fields in map(parse_object, entries)]
    if described.get("covers") != [list(each) for each in covered_by(files)]:
        raise ValueError("it has other entries than its first line says")
    return files


def covered_by(files: Iterable[EntryFile]) -> list[tuple[int, int]]:
    """The groups of these entries, with the number of entries of each.

    Raises:
        ValueError: They are not the first entries of each group, in order.
    """
    covers: dict[int, int] = {}
    for file in files:
        if file.number != covers.get(file.group, 0) + 1 or file.group < max(covers, default=0):
            raise ValueError(f"entry {file.number} of group {file.group} is in the wrong place")
        covers[file.group] = file.number
    return list(covers.items())


def counts(covers: Covered, counted: Covered) -> bool:
    """Whether the covered entries are a prefix of those that count."""
    if len(covers) > len(counted):
        return False
    if not covers:
        return True
    (group, entries), (last_group, most) = covers[-1], counted[len(covers) - 1]
    before = len(covers) - 1
    return list(covers[:-1]) == list(counted[:before]) and group == last_group and entries <= most


def indexes_of(run_dir: RunDir, last_group: int) -> Iterator[RunPath]:
    """The indexes of the groups up to this one, the last one first."""
    for group in group_numbers(run_dir):
        directory = group_directory(run_dir, group)
        if group <= last_group and directory.is_dir():
            matches = [_NAME.fullmatch(path.name) for path in directory.iterdir()]
            found = sorted((int(match[1]), match[0]) for match in matches if match is not None)
            yield from (directory / name for _, name in reversed(found))


def _line(fields: object) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _seal(body: str) -> str:
    return _line({"seal": hashlib.sha256(body.encode()).hexdigest()})
