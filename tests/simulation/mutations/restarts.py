"""Breaks of what is written down, and of what the next attempt makes of it."""

from __future__ import annotations

import contextlib
from typing import Any

from msgspec.structs import replace

from replicast.core import coordinator as coordinator_module
from replicast.core.coordinator import UNDECIDED, Coordinator
from replicast.core.entries import Committed, History
from replicast.core.events import WriteOutcome, Written
from replicast.core.operation import Ask, Boundary, EarlierSettled, Outcome
from replicast.core.operations import attempt as attempt_module
from replicast.core.operations import save as save_module
from replicast.core.operations.save import TakeSnapshot
from replicast.core.operations.trial import EndTrial
from replicast.core.operations.update import Load
from replicast.core.records import Applied, Pending, Stage
from tests.simulation.mutations.registry import ORIGINAL, broken, mutation
from tests.simulator.disk import Disk


@mutation
def let_a_stale_groups_records_count() -> Any:
    return broken(Disk, "entries", lambda self: [entry for group in self.groups for entry in group])


@mutation
def do_not_look_for_a_later_claim_after_a_write() -> Any:
    def handle(self: Coordinator, event: Any) -> Any:
        if isinstance(event, Written) and event.outcome is WriteOutcome.FENCED:
            event = replace(event, outcome=WriteOutcome.DURABLE)
        return ORIGINAL[Coordinator, "handle"](self, event)

    return broken(Coordinator, "handle", handle)


@mutation
def replay_at_the_step_after() -> Any:
    def replayed(proposal: Any, record: Committed, decided: Any) -> Any:
        return ORIGINAL[coordinator_module, "replayed"](
            proposal, replace(record, step=record.step + 1), decided
        )

    return broken(coordinator_module, "replayed", replayed)


@mutation
def replay_what_the_checkpoint_holds() -> Any:
    return broken(History, "after", lambda self, holds: ORIGINAL[History, "after"](self, frozenset()))


@mutation
def forget_the_last_replay() -> Any:
    return broken(History, "after", lambda self, holds: ORIGINAL[History, "after"](self, holds)[:-1])


@mutation
def let_new_updates_overtake_replays() -> Any:
    return broken(Coordinator, "_is_next", lambda self, operation, step: True)


@mutation
def decide_a_trial_again_after_a_restart() -> Any:
    def replayed(proposal: Any, record: Committed, decided: Any) -> Any:
        return ORIGINAL[coordinator_module, "replayed"](proposal, record, None)

    return broken(coordinator_module, "replayed", replayed)


@mutation
def revert_a_trial_on_all_workers_but_one() -> Any:
    def perform(self: EndTrial, replica: Any) -> Applied:
        if not self.kept and replica.rank != 1:
            replica.go_back()
        replica.drop_copy()
        return Applied(replica.digest())

    return broken(EndTrial, "perform", perform)


@mutation
def save_during_a_trial() -> Any:
    return broken(
        TakeSnapshot,
        "perform",
        lambda self, replica: replica.snapshot(self.id, due=self.due, again=self.again),
    )


@mutation
def forget_uncommitted_proposals_in_a_checkpoint() -> Any:
    return broken(Coordinator, "pending", lambda self: ())


@mutation
def keep_checkpoints_that_were_given_up() -> Any:
    from replicast.core.operations.attempt import Begin

    def script(self: Begin, job: Any) -> Any:
        job.take_up_journal()
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)

    return broken(Begin, "script", script)


@mutation
def save_a_state_that_differs_between_workers() -> Any:
    original = save_module.saved

    def saved(job: Any, snapshots: Any) -> Any:
        same = {rank: replace(one, digest="") for rank, one in snapshots.items() if one is not None}
        return original(job, same)

    stack = contextlib.ExitStack()
    stack.enter_context(broken(save_module, "saved", saved))
    stack.enter_context(broken(attempt_module, "saved", saved))
    return stack


@mutation
def write_a_checkpoint_before_the_payloads() -> Any:
    return broken(Coordinator, "_is_stored", lambda self, operation: True)


@mutation
def take_snapshots_on_both_sides_of_an_update_for_one_state() -> Any:
    def are_of_one_state(snapshots: Any) -> bool:
        return bool(snapshots) and None not in snapshots.values()

    return broken(save_module, "_are_of_one_state", are_of_one_state)


@mutation
def hold_proposals_of_which_nothing_is_written() -> Any:
    def pending(self: Coordinator) -> tuple[Pending, ...]:
        return tuple(
            Pending(one.proposal, tuple(one.tickets))
            for one in self.operations.values()
            if one.proposal is not None and one.proposal.content is not None and one.stage in UNDECIDED
        )

    stack = contextlib.ExitStack()
    stack.enter_context(broken(Coordinator, "_is_stored", lambda self, operation: True))
    stack.enter_context(broken(Coordinator, "pending", pending))
    return stack


@mutation
def forget_whose_proposals_a_checkpoint_holds() -> Any:
    def pending(self: Coordinator) -> tuple[Pending, ...]:
        return tuple(replace(one, tickets=()) for one in ORIGINAL[Coordinator, "pending"](self))

    return broken(Coordinator, "pending", pending)


@mutation
def bring_back_what_has_ended() -> Any:
    return broken(History, "has_ended", lambda self, pending: pending.proposal.id in self.by_id)


@mutation
def use_the_bytes_of_an_earlier_attempt() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        if isinstance(request, Ask) and isinstance(request.order, Load):
            self._run(operation, {0: operation.proposal.content})
        else:
            ORIGINAL[Coordinator, "_serve"](self, operation, request)

    return broken(Coordinator, "_serve", serve)
