"""The journal entries that count: of each group, those that the next group took over (`groups.py`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from replicast.core.entries import Committed
from replicast.errors import FileDamaged
from replicast.files import RunDir, RunPath
from replicast.storage.damage import DamagedEntry
from replicast.storage.entry_files import EntryFile, bytes_path, read_entry
from replicast.storage.groups import Claim, entry_kinds, group_directory, last_claim
from replicast.storage.index import Covered, counts, covered_by, indexes_of, read_index

_TRIES = 3


class Counted(NamedTuple):
    """The entries that count.

    Attributes:
        files: Those that can be read, in order.
        indexed: How many of them came from an index.
        damaged: Those that are missing or damaged, in order.
    """

    files: list[EntryFile]
    indexed: int
    damaged: list[DamagedEntry]


def counted_entries(run_dir: RunDir) -> Counted:
    """Reads the entries that count: an index, and the entries after it. One that is damaged hides no other.

    Raises:
        FileDamaged: The claim, which says what counts, is damaged.
    """
    claim = last_claim(run_dir)
    for _ in range(_TRIES):
        counted = _counted_under(run_dir, claim)
        earlier, claim = claim, last_claim(run_dir) if counted.damaged else claim
        if claim == earlier:
            break
        # A group has taken over meanwhile, and has removed files that do not count.
    return counted


def _counted_under(run_dir: RunDir, claim: Claim | None) -> Counted:
    if claim is None:
        return Counted([], 0, [])
    counted = [*claim.counted, (claim.group, sys.maxsize)]
    files = _indexed(run_dir, claim.group, counted)
    indexed, covers = len(files), dict(covered_by(files))
    damaged: list[DamagedEntry] = []
    for group, most in counted:
        if group >= max(covers, default=0):
            _read_group(run_dir, group, covers.get(group, 0) + 1, most, files, damaged)
    return Counted(_in_order(run_dir, files, damaged), indexed, sorted(damaged, key=lambda one: one.place))


def _indexed(run_dir: RunDir, last_group: int, counted: Covered) -> list[EntryFile]:
    """The entries of the last index that is readable and covers only entries that count."""
    for path in indexes_of(run_dir, last_group):
        with contextlib.suppress(OSError, ValueError):
            files = read_index(path)
            if counts(covered_by(files), counted):
                return files
    return []


def _read_group(
    run_dir: RunDir, group: int, first: int, most: int, files: list[EntryFile], damaged: list[DamagedEntry]
) -> None:
    """Adds the entries of a group from `first` to the last one that counts."""
    directory = group_directory(run_dir, group)
    kinds = entry_kinds(directory)
    if len(kinds) < max(kinds, default=0):  # A listing may miss what is renamed into place meanwhile.
        kinds |= entry_kinds(directory)
    last = max(kinds, default=0) if most == sys.maxsize else most
    expected = first
    for number in sorted(number for number in kinds if first <= number <= last):
        if number > expected:
            damaged.append(_missing(directory, group, expected, number - 1))
        expected = number + 1
        try:
            files.append(read_entry(run_dir, group, number, kinds[number]))
        except FileDamaged as error:
            damaged.append(DamagedEntry(group, number, kinds[number], error))
    if expected <= last:
        damaged.append(_missing(directory, group, expected, last))


def _missing(directory: RunPath, group: int, first: int, last: int) -> DamagedEntry:
    if first < last:
        error = FileDamaged(
            directory / f"{first:06d}", f"the entries up to {last:06d} are missing too", verdict="is missing"
        )
        return DamagedEntry(group, first, None, error)
    left = (kind for kind in ("payload", "before") if bytes_path(directory, first, kind).exists())
    error = FileDamaged(directory / f"{first:06d}", "there are later entries", verdict="is missing")
    return DamagedEntry(group, first, next(left, None), error)


def _in_order(run_dir: RunDir, files: Sequence[EntryFile], damaged: list[DamagedEntry]) -> list[EntryFile]:
    """The entries without records whose number does not fit: those are added to the damaged ones.

    Committed updates are numbered consecutively from 1. Each damaged entry between two may be another one.
    """
    kept, expected, last = [], 1, (0, 0)
    for file in files:
        if isinstance(file.stored, Committed):
            sequence, place = file.stored.sequence, file.place
            between = any(last < one.place < place and one.may_be("committed") for one in damaged)
            if sequence != expected and not (between and sequence > expected):
                problem = f"it must be the record of update {expected}. Received: {sequence}"
                error = FileDamaged(file.path(run_dir), problem)
                damaged.append(DamagedEntry(file.group, file.number, file.kind, error))
                continue
            expected, last = sequence + 1, place
        kept.append(file)
    return kept
