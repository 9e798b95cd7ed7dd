"""Breaks of what is asked for from outside, of pulls, and of reverts."""

from __future__ import annotations

from typing import Any

from replicast.core.coordinator import Coordinator
from replicast.core.operation import Ask, Boundary, Operation, Outcome
from replicast.core.operations import revert
from replicast.core.operations.pull import Pull, PulledRows, TakeRows
from replicast.core.operations.revert import Keep
from replicast.core.operations.trial import EndTrial
from replicast.core.records import Applied, Stage
from tests.simulation.mutations.registry import ORIGINAL, broken, mutation


@mutation
def revert_what_is_reverted() -> Any:
    return broken(revert, "why_not", lambda history, sequence, forced=False: "")


@mutation
def save_before_the_overwritten_values_are_durable() -> Any:
    return broken(Keep, "only_writes", False)


@mutation
def keep_overwritten_values_only_once() -> Any:
    def keep_before(self: Coordinator, record: Any) -> None:
        if record.sequence not in self.history.before:
            ORIGINAL[Coordinator, "keep_before"](self, record)

    return broken(Coordinator, "keep_before", keep_before)


@mutation
def revert_what_is_just_being_applied() -> Any:
    return broken(Operation, "is_applying", lambda self, id_: False)


@mutation
def revert_what_is_still_to_be_replayed() -> Any:
    return broken(Coordinator, "replayed_at", lambda self, sequence: None)


@mutation
def hold_the_overwritten_values_of_a_reverted_trial() -> Any:
    def perform(self: EndTrial, replica: Any) -> Applied:
        if not self.kept:
            replica.go_back()
        replica.drop_copy()
        return Applied(replica.digest())

    return broken(EndTrial, "perform", perform)


@mutation
def forget_who_asked() -> Any:
    def request(self: Coordinator, message: Any) -> None:
        ORIGINAL[Coordinator, "_request"](self, type(message)(message.kind, (), message.arguments))

    return broken(Coordinator, "_request", request)


@mutation
def pull_from_each_worker_at_a_boundary_of_its_own() -> Any:
    def script(self: Pull, job: Any) -> Any:
        digests = {}
        for rank in range(job.size):
            step = yield Boundary()
            digests |= yield Ask(TakeRows(self.id, self.name, self.rows), (rank,))
        return Outcome(Stage.VERIFIED, PulledRows(self.name, self.rows, step, digests))

    return broken(Pull, "script", script)
