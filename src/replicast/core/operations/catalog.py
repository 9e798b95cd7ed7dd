"""Which operation is made for what comes in."""

from __future__ import annotations

from typing import Any

from replicast.core.entries import Committed, Decided
from replicast.core.operation import Operation
from replicast.core.operations.audit import Audit
from replicast.core.operations.begin import Begin
from replicast.core.operations.function import Function
from replicast.core.operations.leave import Close, Leave
from replicast.core.operations.pull import Pull
from replicast.core.operations.revert import Revert
from replicast.core.operations.save import Save
from replicast.core.operations.sync import Meet, Sync
from replicast.core.operations.trial import TrialUpdate
from replicast.core.operations.update import Update
from replicast.core.records import Proposal, ReportId


def proposed(proposal: Proposal, *, scheduled: bool = False, stored: bool = False) -> Operation:
    """The operation for a proposal, including those scheduled or made in an earlier attempt."""
    if proposal.reverts is not None:
        return Revert(proposal, stored=stored)
    if proposal.content is None:
        return Function(proposal)
    kind = Update if proposal.trial is None else TrialUpdate
    return kind(proposal, scheduled=scheduled, stored=stored)


def replayed(proposal: Proposal, record: Committed, decided: Decided | None) -> Operation:
    """For an update of the journal that is applied again."""
    if record.trial is not None:
        return TrialUpdate(proposal, record, decided)
    return Update(proposal, record)


def collective(intent: tuple[Any, ...], id_: str) -> Operation:
    """For what all training threads rest in."""
    match intent:
        case ("begin",):
            return Begin(id_)
        case ("close",):
            return Close(id_)
        case ("sync", source, *names):
            return Sync(id_, source, tuple(names))
        case ("audit", policy):
            return Audit(id_, policy)
        case ("save",):
            return Save(id_)
        case ("meet", *_):
            return Meet(id_)
    raise ValueError(f"All workers rest for an unknown reason. Received: {intent!r}")


def requested(kind: str, id_: str, arguments: tuple[Any, ...] = ()) -> Operation:
    """The operation for a request to all workers at one of the next boundaries."""
    kinds: dict[str, type[Leave | Audit | Save | Pull]] = {
        "leave": Leave,
        "audit": Audit,
        "save": Save,
        "pull": Pull,
    }
    operation = kinds[kind](id_, *arguments)
    operation.arguments = arguments
    return operation


def planned(report: ReportId) -> Operation:
    """For what every worker reports by itself."""
    kinds: dict[str, type[Audit | Save]] = {"audit": Audit, "save": Save}
    return kinds[report.kind](str(report), report=report)
