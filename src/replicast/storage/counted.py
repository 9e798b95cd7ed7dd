"""The journal entries that count: of each group, those that the next group took over (`groups.py`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

from replicast.core.entries import Committed
from replicast.errors import FileDamaged
from replicast.storage.entry_files import EntryFile, read_entry
from replicast.storage.groups import Claim, entry_kinds, entry_path, group_directory, last_claim
from replicast.storage.index import Covered, counts, covered_by, indexes_of, read_index

_TRIES = 3


def counted_entries(run_dir: Path) -> tuple[list[EntryFile], int]:
    """The entries that count, in order, and how many of them came from an index.

    Opens an index, and the entries after it.

    Raises:
        FileDamaged: An entry is missing or damaged.
    """
    claim = last_claim(run_dir)
    for _ in range(_TRIES):
        try:
            return _counted_under(run_dir, claim)
        except FileDamaged:
            earlier, claim = claim, last_claim(run_dir)
            if claim == earlier:
                raise
            # A group has taken over meanwhile, and has removed files that do not count.
    return _counted_under(run_dir, claim)


def _counted_under(run_dir: Path, claim: Claim | None) -> tuple[list[EntryFile], int]:
    if claim is None:
        return [], 0
    counted = [*claim.counted, (claim.group, sys.maxsize)]
    files = _indexed(run_dir, claim.group, counted)
    indexed, covers = len(files), dict(covered_by(files))
    for group, most in counted:
        if group < max(covers, default=0):
            continue
        files.extend(_entries_of(run_dir, group, covers.get(group, 0) + 1, most))
    _check_order(run_dir, files)
    return files, indexed


def _indexed(run_dir: Path, last_group: int, counted: Covered) -> list[EntryFile]:
    """The entries of the last index that is readable and covers only entries that count."""
    for path in indexes_of(run_dir, last_group):
        with contextlib.suppress(OSError, ValueError):
            files = read_index(path)
            if counts(covered_by(files), counted):
                return files
    return []


def _entries_of(run_dir: Path, group: int, first: int, most: int) -> list[EntryFile]:
    """The entries of a group from `first` to the last one that counts."""
    directory = group_directory(run_dir, group)
    kinds = entry_kinds(directory)
    last = max(kinds, default=0) if most == sys.maxsize else most
    files = []
    for number in range(first, last + 1):
        if number not in kinds:
            other = entry_path(directory, max(kinds), kinds[max(kinds)]).name
            problem = f"the journal has {other}, but no entry of this number. Move away what is not its own"
            raise FileDamaged(directory / f"{number:06d}", problem)
        files.append(read_entry(run_dir, group, number, kinds[number]))
    return files


def _check_order(run_dir: Path, files: Iterable[EntryFile]) -> None:
    """Raises unless the committed updates are numbered consecutively from 1."""
    expected = 1
    for file in files:
        if isinstance(file.stored, Committed):
            if file.stored.sequence != expected:
                problem = f"it must be the record of update {expected}. Received: {file.stored.sequence}"
                raise FileDamaged(file.path(run_dir), problem)
            expected += 1
