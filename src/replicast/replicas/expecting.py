"""What a variable should be by checkpoint and journal: who is right when there is no majority."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from replicast.checkpoint import CheckpointStore, Manifest
from replicast.edits import Array, apply_edit
from replicast.errors import ReplicastError
from replicast.journal import AnyJournal, Record
from replicast.protocol import Member

logger = logging.getLogger("replicast")

MOST_BYTES = 2**30
"""All workers wait meanwhile: no more than this is read of the journal for one variable."""


class _Place(NamedTuple):
    """Where an audit is: as long as nothing of this changes, what was read counts."""

    step: int
    applied: frozenset[int]
    checkpoints_changed_at: int | None


class _Basis(NamedTuple):
    """The last checkpoint, and what this worker has applied since, in the journal's order."""

    last: Manifest
    since: tuple[Record, ...]


class Expectation:
    """The last checkpoint, and what the journal has changed since. On worker 0, while all stand still.

    It is the truth for a variable that training has not changed since the checkpoint: one that is frozen, a
    learning rate, or any at the very step of the checkpoint. Else no worker has it, and nothing is decided.
    """

    def __init__(self, member: Member, run_dir: Path, journal: AnyJournal) -> None:
        self._member = member
        self._store = CheckpointStore(run_dir)
        self._journal = journal
        self._found_at: _Place | None = None
        self._found: _Basis | None = None

    def fingerprint(self, name: str) -> str | None:
        """What the variable's fingerprint should be; None when that is not known."""
        basis = self._basis()
        try:
            value = None if basis is None else self._value(name, basis)
        except (ReplicastError, OSError) as error:
            logger.warning("checkpoint and journal do not say what %s should be: %s", name, error)
            return None
        return None if value is None else self._member.state.fingerprint_of(value)

    def _basis(self) -> _Basis | None:
        """What checkpoint and journal hold now: read once for all variables of an audit."""
        applied = frozenset(self._member.applied)
        place = _Place(self._member.gate.step, applied, self._checkpoints_changed_at())
        if place != self._found_at:
            self._found_at, self._found = place, None
            try:
                self._found = self._read(applied)
            except (ReplicastError, OSError) as error:
                logger.warning("checkpoint and journal do not say what any variable should be: %s", error)
        return self._found

    def _checkpoints_changed_at(self) -> int | None:
        try:
            # Every checkpoint that comes or goes is renamed in it.
            return self._store.directory.stat().st_mtime_ns
        except OSError:
            return None

    def _read(self, applied: frozenset[int]) -> _Basis | None:
        last = self._store.last()
        if last is None:
            return None
        later = set(last.extra.get("committed_for_later", ()))
        since = tuple(
            record
            for record in self._journal.records()
            if (record.sequence > last.sequence or record.sequence in later) and record.sequence in applied
        )
        return _Basis(last, since)

    def _value(self, name: str, basis: _Basis) -> Array | None:
        if name not in basis.last.schema:
            return None
        since = [record for record in basis.since if any(edit["variable"] == name for edit in record.edits)]
        if sum(record.nbytes for record in since) > MOST_BYTES or any(map(_is_trial, since)):
            return None
        with self._store.open(basis.last.step) as reader:
            value = reader.read(name)
            for record in since:
                for edit in self._journal.load(record.sequence).edits:
                    if edit.variable == name:
                        value = apply_edit(edit, value)
            return value


def _is_trial(record: Record) -> bool:
    """Whether it may have been taken back."""
    return record.trial is not None
