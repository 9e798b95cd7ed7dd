"""What a variable should be by checkpoint and journal: who is right when there is no majority."""

from __future__ import annotations

import logging
from pathlib import Path

from replicast.checkpoint import CheckpointStore
from replicast.edits import Array, apply_edit
from replicast.errors import ReplicastError
from replicast.journal import AnyJournal, Record
from replicast.protocol import Member

logger = logging.getLogger("replicast")

MOST_BYTES = 2**30
"""All workers wait meanwhile: no more than this is read of the journal for one variable."""


class Expectation:
    """The last checkpoint, and what the journal has changed since. On worker 0, while all stand still.

    It is the truth for a variable that training has not changed since the checkpoint: one that is frozen, a
    learning rate, or any at the very step of the checkpoint. Else no worker has it, and nothing is decided.
    """

    def __init__(self, member: Member, run_dir: Path, journal: AnyJournal) -> None:
        self._member = member
        self._store = CheckpointStore(run_dir)
        self._journal = journal

    def fingerprint(self, name: str) -> str | None:
        """What the variable's fingerprint should be; None when that is not known."""
        try:
            value = self._value(name)
        except (ReplicastError, OSError) as error:
            logger.warning("checkpoint and journal do not say what %s should be: %s", name, error)
            return None
        return None if value is None else self._member.state.fingerprint_of(value)

    def _value(self, name: str) -> Array | None:
        last = self._store.last()
        if last is None or name not in last.schema:
            return None
        later = set(last.extra.get("committed_for_later", ()))
        since = [
            record
            for record in self._journal.records()
            if (record.sequence > last.sequence or record.sequence in later)
            and record.sequence in self._member.applied
            and any(edit["variable"] == name for edit in record.edits)
        ]
        if sum(record.nbytes for record in since) > MOST_BYTES or any(map(_is_trial, since)):
            return None
        with self._store.open(last.step) as reader:
            value = reader.read(name)
            for record in since:
                for edit in self._journal.load(record.sequence).edits:
                    if edit.variable == name:
                        value = apply_edit(edit, value)
            return value


def _is_trial(record: Record) -> bool:
    """Whether it may have been taken back."""
    return record.trial is not None
