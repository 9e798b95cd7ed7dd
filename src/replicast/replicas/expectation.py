"""The value of a variable according to checkpoint and journal: decides an audit without a majority."""

from __future__ import annotations

import logging
from typing import NamedTuple

from replicast.errors import ReplicastError
from replicast.files import RunDir
from replicast.runtime import Session
from replicast.storage.checkpoint import CheckpointStore, Manifest, saved_of
from replicast.storage.updates import CommittedUpdate, committed_updates, load_update
from replicast.update.edits import Array, apply_edit
from replicast.update.state import State

logger = logging.getLogger("replicast")

MOST_BYTES = 2**30
"""The most bytes to read from the journal for one variable, since all workers wait meanwhile."""


class _Place(NamedTuple):
    """The circumstances of an audit. While they are the same, what was read before stays valid."""

    step: int
    holds: frozenset[int]
    checkpoints_changed_at: int | None


class _Basis(NamedTuple):
    """The last checkpoint, and the updates applied since then, in the journal's order."""

    last: Manifest
    since: tuple[CommittedUpdate, ...]


class Expectation:
    """Computes values from the last checkpoint and the journal. On worker 0, while all workers are stopped.

    The result is right for a variable that training has not changed since the checkpoint: a frozen one, a
    learning rate, or any variable at the step of the checkpoint. For all others it matches no worker's
    value, and decides nothing.
    """

    def __init__(self, session: Session, state: State, run_dir: RunDir, *, durable: bool) -> None:
        self._session = session
        self._state = state
        self._run_dir = run_dir
        self._durable = durable
        self._store = CheckpointStore(run_dir)
        self._found_at: _Place | None = None
        self._found: _Basis | None = None

    def fingerprint(self, name: str) -> str | None:
        """The expected fingerprint of a variable; None if it is not known."""
        basis = self._basis()
        try:
            value = None if basis is None else self._value(name, basis)
        except (ReplicastError, OSError) as error:
            logger.warning("%s: no expected value can be read from checkpoint and journal: %s", name, error)
            return None
        return None if value is None else self._state.fingerprint_of(value)

    def _basis(self) -> _Basis | None:
        """Reads checkpoint and journal, once for all variables of an audit."""
        holds = frozenset(self._session.replica.holds)
        place = _Place(self._session.step, holds, self._checkpoints_changed_at())
        if place != self._found_at:
            self._found_at, self._found = place, None
            try:
                self._found = self._read(holds)
            except (ReplicastError, OSError) as error:
                logger.warning("expected values cannot be read from checkpoint and journal: %s", error)
        return self._found

    def _checkpoints_changed_at(self) -> int | None:
        try:
            # Adding or removing a checkpoint is a rename in this directory.
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
