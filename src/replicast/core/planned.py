"""What all workers report by themselves: each its part of a save or an audit, made at the same boundary.

    every worker    makes its part at the boundary, reports it, and trains on; its reports come in order
    coordinator     the first report opens the operation; when all are there, its script goes on

A worker may never report its part: its callback was skipped, or the script caught an error. Then the
operation is refused, and the refusal names the worker, as soon as it is certain or too late:

    the worker has reported a later one of this kind      it makes its reports in order
    all workers rest at a later boundary, or in close     they have reported what they made before
    `meet_secs` after the first report                    whatever the reason is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicast.core.gather import Gather
from replicast.core.operation import Operation
from replicast.core.reports import ReportId


class PlannedReports:
    """The reports of all workers that are not complete. A part of the coordinator.

    Args:
        size: The number of workers.
        secs: How long the last report may come after the first one.
        open_: Opens the operation that collects these reports.
        set_timer: Calls something after a time.
        resume: Goes on with a script, with the reports by rank or a `Refusal`.
    """

    def __init__(
        self,
        size: int,
        secs: float,
        *,
        open_: Callable[[ReportId], None],
        set_timer: Callable[[float, Callable[[], None]], None],
        resume: Callable[[Operation, Any], None],
    ) -> None:
        self._size = size
        self._secs = secs
        self._open = open_
        self._set_timer = set_timer
        self._resume = resume
        self._gathers: dict[ReportId, tuple[Gather, Operation]] = {}
        self._latest: dict[tuple[str, int], ReportId] = {}  # by kind and rank

    def collect(self, operation: Operation, id_: ReportId) -> None:
        """The script of the operation goes on when all workers have reported, or one will not."""
        gather = Gather(f"report its {id_.kind} of step {id_.step}", range(self._size))
        self._gathers[id_] = gather, operation

        def late() -> None:
            if gather.missing:
                gather.answers.clear()
                self._resume(operation, gather.timed_out(self._secs))

        self._set_timer(self._secs, late)

    def is_collecting(self, operation: Operation) -> bool:
        """Whether the operation waits for reports."""
        return any(one is operation for _, one in self._gathers.values())

    def add(self, rank: int, id_: ReportId, value: Any) -> None:
        """A worker has reported its part."""
        if id_ not in self._gathers:
            self._open(id_)
        self._latest[id_.kind, rank] = id_
        gather, operation = self._gathers[id_]
        if gather.add(rank, value):
            del self._gathers[id_]
            self._resume(operation, gather.refusal() or gather.answers)
        for other in [one for one in self._gathers if one.kind == id_.kind]:
            self._give_up_passed(other)

    def give_up(self, before: int | None) -> None:
        """All workers rest: what one of them has not reported by now, it never will.

        Args:
            before: Only what belongs to an earlier step; None for all.
        """
        for id_ in [one for one in self._gathers if before is None or one.step < before]:
            gather, operation = self._gathers.pop(id_)
            self._resume(operation, gather.refused_by(gather.missing))

    def _give_up_passed(self, id_: ReportId) -> None:
        """Refuses what a worker will not report, because it has reported a later one.

        The reports are kept until every worker has made its own or passed it: a late one opens nothing.
        """
        gather, operation = self._gathers[id_]
        passed = [rank for rank in gather.missing if self._latest.get((id_.kind, rank), id_) > id_]
        if passed:
            gather.answers.clear()
            if len(passed) == len(gather.missing):
                del self._gathers[id_]
            self._resume(operation, gather.refused_by(passed))
