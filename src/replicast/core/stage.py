"""The stage of an operation: one enum for tickets, `status`, the command line and the journal."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """The stages of an operation, in order. It never goes back."""

    PROPOSED = "proposed"  # the coordinator has it
    PREPARED = "prepared"  # every worker holds its bytes and has checked them; nothing has changed
    SCHEDULED = "scheduled"  # durable, and every worker will stop at its step; it can still be withdrawn
    COMMITTED = "committed"  # the record is durable: it will be applied, after a restart if necessary
    APPLIED = "applied"  # every worker has applied it; a trial is in progress
    VERIFIED = "verified"  # every worker reported the same digest
    REVERTED = "reverted"  # its trial failed: every replica is back at the state before it
    WITHDRAWN = "withdrawn"  # withdrawn before it was committed; nothing has changed
    REFUSED = "refused"  # not accepted; nothing has changed
    FAILED = "failed"  # committed, and the workers' digests differ

    @property
    def is_final(self) -> bool:
        """Whether this is a final stage."""
        return self in _FINAL


_FINAL = frozenset({Stage.VERIFIED, Stage.REVERTED, Stage.WITHDRAWN, Stage.REFUSED, Stage.FAILED})
