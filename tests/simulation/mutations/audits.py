"""Breaks of audits, and of what workers report by themselves."""

from __future__ import annotations

from typing import Any

from replicast.core.coordinator import Coordinator
from replicast.core.operation import Ask, Go
from replicast.core.operations import audit as audit_module
from replicast.core.operations.audit import Audit, DeliverReport
from replicast.core.records import ReportId
from tests.simulation.mutations.registry import ORIGINAL, broken, mutation


@mutation
def heal_nothing() -> Any:
    def differences(self: Audit, job: Any, seen: Any) -> Any:
        return ()
        yield

    return broken(Audit, "_differences", differences)


@mutation
def raise_an_audit_before_all_have_its_report() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        report = isinstance(request, Ask) and isinstance(request.order, DeliverReport)
        ORIGINAL[Coordinator, "_serve"](self, operation, Go(request.order) if report else request)

    return broken(Coordinator, "_serve", serve)


@mutation
def keep_the_threads_that_rest_when_an_audit_raises() -> Any:
    return broken(Coordinator, "end_rest", lambda self, operation, refusal: None)


@mutation
def do_not_raise_what_an_audit_found() -> Any:
    return broken(DeliverReport, "perform", lambda self, replica: replica.report(self.report, raises=False))


@mutation
def heal_with_the_value_of_the_minority() -> Any:
    def reference_of(groups: Any, expected: Any) -> Any:
        return min(list(groups.values())[-1]), "minority"

    return broken(audit_module, "reference_of", reference_of)


@mutation
def take_the_reports_of_different_boundaries_for_one() -> Any:
    def answered(self: Coordinator, rank: int, number: Any, value: Any) -> None:
        if isinstance(number, ReportId) and rank == 1:
            before = self.__dict__.setdefault("before", {})
            number, before[number.kind] = before.get(number.kind, number), number
        ORIGINAL[Coordinator, "_answered"](self, rank, number, value)

    return broken(Coordinator, "_answered", answered)
