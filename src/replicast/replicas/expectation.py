"""What a variable should be by checkpoint and journal: who is right when there is no majority."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from replicast.errors import ReplicastError
from replicast.runtime import Session
from replicast.storage.checkpoint import CheckpointStore, Manifest, saved_of
from replicast.storage.updates import CommittedUpdate, committed_updates, load_update
from replicast.update.edits import Array, apply_edit
from replicast.update.state import State

logger = logging.getLogger("replicast")

MOST_BYTES = 2**30
"""All workers wait meanwhile: no more than this is read of the journal for one variable."""


class _Place(NamedTuple):
    """Where an audit is: as long as nothing of this changes, what was read is valid."""

    step: int
    holds: frozenset[int]
    checkpoints_changed_at: int | None


class _Basis(NamedTuple):
    """The last checkpoint, and what this worker has applied since, in the journal's order."""

    last: Manifest
    since: tuple[CommittedUpdate, ...]


class Expectation:
    """The last checkpoint, and what the journal has changed since. On worker 0, while all stand still.

    It is the truth for a variable that training has not changed since the checkpoint: one that is frozen, a
    learning rate, or any at the very step of the checkpoint. Otherwise nobody has it, and nothing is decided.
    """

    def __init__(self, session: Session, state: State, run_dir: Path, *, durable: bool) -> None:
        self._session = session
        self._state = state
        self._run_dir = run_dir
        self._durable = durable
        self._store = CheckpointStore(run_dir)
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
        return None if value is None else self._state.fingerprint_of(value)

    def _basis(self) -> _Basis | None:
        """What checkpoint and journal hold now: read once for all variables of an audit."""
        holds = frozenset(self._session.replica.holds)
        place = _Place(self._session.step, holds, self._checkpoints_changed_at())
        if place != self._found_at:
            self._found_at, self._found = place, None
            try:
                self._found = self._read(holds)
            except (ReplicastError, OSError) as error:
                logger.warning("checkpoint and journal do not say what any variable should be: %s", error)
        return self._found

    def _checkpoints_changed_at(self) -> int | None:
        try:
            # Every checkpoint that comes or goes is renamed in it.
            return self._store.directory.stat().st_mtime_ns
        except OSError:
            return None

    def _read(self, holds: frozenset[int]) -> _Basis | None:
        last = self._store.last()
        if last is None:
            return None
        sequences = holds - saved_of(last).holds
        if sequences and not self._durable:
            return None
        recorded = committed_updates(self._run_dir) if sequences else []
        return _Basis(last, tuple(one for one in recorded if one.sequence in sequences))

    def _value(self, name: str, basis: _Basis) -> Array | None:
        if name not in basis.last.schema:
            return None
        since = [one for one in basis.since if any(edit["variable"] == name for edit in one.edits)]
        on_trial = any(one.trial is not None for one in since)  # it may have been reverted
        if on_trial or sum(one.nbytes for one in since) > MOST_BYTES:
            return None
        with self._store.open(basis.last.step) as reader:
            value = reader.read(name)
            for one in since:
                for edit in load_update(self._run_dir, one.sequence).edits:
                    if edit.variable == name:
                        value = apply_edit(edit, value)
            return value
