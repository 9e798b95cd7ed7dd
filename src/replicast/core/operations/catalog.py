"""Which operation is made for what comes in."""

from __future__ import annotations

from typing import Any

from replicast.core.entries import Committed, Decided
from replicast.core.operation import Operation
from replicast.core.operations.begin import Begin
from replicast.core.operations.close import Close
from replicast.core.operations.function import Function
from replicast.core.operations.update import Update
from replicast.core.proposal import Proposal


def proposed(proposal: Proposal, *, scheduled: bool = False) -> Operation:
    """For what somebody proposes, or has scheduled in an earlier attempt."""
    if proposal.content is None:
        return Function(proposal)
    return Update(proposal, scheduled=scheduled)


def replayed(proposal: Proposal, record: Committed, decided: Decided | None) -> Operation:
    """For an update of the journal that is applied again."""
    return Update(proposal, record)


def collective(intent: tuple[Any, ...], id_: str) -> Operation:
    """For what all training threads wait in."""
    match intent:
        case ("begin",):
            return Begin(id_)
        case ("close",):
            return Close(id_)
    raise ValueError(f"All workers rest for an unknown reason. Received: {intent!r}")


def requested(kind: str, id_: str) -> Operation:
    """For what somebody asks all workers to do."""
    raise ValueError(f"There is no such request. Received: {kind!r}")


def planned(kind: str, step: int) -> Operation:
    """For what every worker does by itself at planned steps."""
    raise ValueError(f"There is no such plan. Received: {kind!r}")
