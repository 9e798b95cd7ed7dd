"""Deliberate breaks of the core, each of which the simulation must notice.

`python -m tests.simulation.mutations` prints which schedule is the first to notice each: for `CAUGHT_BY`, and
for docs/faults.md.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from msgspec.structs import replace

from replicast.core import coordinator as coordinator_module
from replicast.core.coordinator import UNDECIDED, Coordinator
from replicast.core.entries import Committed, History, Pending, Scheduled, Stage
from replicast.core.messages import Applied, CloseInbox, Do, ReportId, Tell, Write, WriteOutcome, Written
from replicast.core.operation import (
    Ask,
    Boundary,
    EarlierSettled,
    Gather,
    Go,
    Meeting,
    Operation,
    Outcome,
    Persist,
)
from replicast.core.operations import apply as apply_module
from replicast.core.operations import attempt as attempt_module
from replicast.core.operations.apply import (
    Apply,
    BeginTrial,
    Discard,
    EndTrial,
    Keep,
    Load,
    Prepare,
    UpdateOperation,
)
from replicast.core.operations.attempt import Begin, TakeSnapshot
from replicast.core.operations.audit import Audit, DeliverReport, Pull, PulledRows, TakeRows
from replicast.core.worker import WorkerMachine
from replicast.update import audit_report
from tests.simulator import StoryFailed, World, random_plan
from tests.simulator.disk import Disk

Mutation = Callable[[], contextlib.AbstractContextManager[Any]]
MUTATIONS: dict[str, Mutation] = {}
CAUGHT_BY: dict[str, int] = {}
"""The first schedule, from 0 on, that notices each break; of the rarest, one that does."""
ORIGINAL = {
    (owner, name): getattr(owner, name)
    for owner, name in [
        (Coordinator, "_want"),
        (Coordinator, "_answered"),
        (Coordinator, "keep_before"),
        (Coordinator, "pending"),
        (Coordinator, "_propose"),
        (Coordinator, "_request"),
        (Coordinator, "_serve"),
        (Coordinator, "_withdraw"),
        (Coordinator, "take_up_journal"),
        (Coordinator, "handle"),
        (History, "after"),
        (Meeting, "step"),
        (WorkerMachine, "_do"),
        (WorkerMachine, "_go_on"),
        (UpdateOperation, "__init__"),
    ]
}
"""What is broken, as it was."""


def mutation(seed: int) -> Callable[[Mutation], Mutation]:
    """Adds a break, under its name in words; the schedule of the seed notices it."""

    def add(make: Mutation) -> Mutation:
        name = make.__name__.replace("_", " ")
        MUTATIONS[name], CAUGHT_BY[name] = make, seed
        return make

    return add


def broken(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """The core with another value there."""
    return mock.patch.object(owner, name, value)


# Breaks of audits, and of what workers report by themselves.


@mutation(35)
def heal_nothing() -> Any:
    def differences(self: Audit, job: Any, seen: Any) -> Any:
        return ()
        yield

    return broken(Audit, "_differences", differences)


@mutation(35)
def raise_an_audit_before_all_have_its_report() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        report = isinstance(request, Ask) and isinstance(request.order, DeliverReport)
        ORIGINAL[Coordinator, "_serve"](self, operation, Go(request.order) if report else request)

    return broken(Coordinator, "_serve", serve)


@mutation(636)
def keep_the_threads_that_rest_when_an_audit_raises() -> Any:
    return broken(Coordinator, "end_rest", lambda self, operation, refusal: None)


@mutation(35)
def do_not_raise_what_an_audit_found() -> Any:
    return broken(DeliverReport, "perform", lambda self, replica: replica.report(self.report, False))


@mutation(35)
def heal_with_the_value_of_the_minority() -> Any:
    def reference_of(groups: Any, expected: Any) -> Any:
        return min(list(groups.values())[-1]), "minority"

    return broken(audit_report, "reference_of", reference_of)


@mutation(0)
def take_the_reports_of_different_boundaries_for_one() -> Any:
    def answered(self: Coordinator, rank: int, number: Any, value: Any) -> None:
        if isinstance(number, ReportId) and rank == 1:
            before = self.__dict__.setdefault("before", {})
            number, before[number.kind] = before.get(number.kind, number), number
        ORIGINAL[Coordinator, "_answered"](self, rank, number, value)

    return broken(Coordinator, "_answered", answered)


# Breaks of where the workers stop, and of what is applied there in which order.


@mutation(0)
def skip_the_stop() -> Any:
    """The workers have said where they are: that is taken for standing there."""
    return broken(Meeting, "step", lambda self: self.latest if self.answered else None)


@mutation(0)
def pass_a_boundary_in_spite_of_a_stop() -> Any:
    def go_on(self: WorkerMachine) -> None:
        stops, self._stops = self._stops, {}
        ORIGINAL[WorkerMachine, "_go_on"](self)
        self._stops = stops

    return broken(WorkerMachine, "_go_on", go_on)


@mutation(11)
def choose_the_earliest_boundary_instead_of_the_latest() -> Any:
    return broken(Meeting, "latest", property(lambda self: min(self.steps.values())))


@mutation(0)
def apply_twice() -> Any:
    def twice(self: WorkerMachine, do: Do) -> None:
        ORIGINAL[WorkerMachine, "_do"](self, do)
        if not do.order.in_background:
            ORIGINAL[WorkerMachine, "_do"](self, do)

    return broken(WorkerMachine, "_do", twice)


@mutation(14079)
def leave_a_stop_up_when_a_rest_ends() -> Any:
    def rests_end(self: Coordinator) -> None:
        self._here = None
        _original_rests_end(self)

    _original_rests_end = Coordinator._end_rests
    return broken(Coordinator, "_end_rests", rests_end)


@mutation(636)
def end_a_rest_while_another_operation_has_the_turn() -> Any:
    def resume_rests(self: Coordinator) -> bool:
        resume, self._resuming = self._resuming, None
        if resume is None:
            return False
        self._end_rests()
        self._say(resume)
        return True

    return broken(Coordinator, "_resume_rests", resume_rests)


@mutation(320)
def apply_in_another_order_on_one_worker() -> Any:
    def go_on(self: WorkerMachine) -> None:
        if self.rank == 1:
            self._orders.reverse()
        ORIGINAL[WorkerMachine, "_go_on"](self)

    return broken(WorkerMachine, "_go_on", go_on)


@mutation(157)
def commit_others_during_a_trial() -> Any:
    return broken(Coordinator, "_deferred", lambda self, operation: None)


@mutation(1)
def ignore_at_step() -> Any:
    def want(self: Coordinator, operation: Any, at_step: int | None) -> None:
        if operation.replays is None and operation is not None and operation.meeting is not None:
            self._release(operation.meeting)
            operation.meeting = None
        ORIGINAL[Coordinator, "_want"](self, operation, None if operation.replays is None else at_step)

    return broken(Coordinator, "_want", want)


@mutation(95)
def wait_without_a_deadline() -> Any:
    return broken(Coordinator, "_set_timer", lambda self, secs, then: None)


@mutation(67)
def do_not_ask_again_when_a_worker_rests_early() -> Any:
    def at(self: Coordinator, rank: int, number: int, step: int, standing: bool) -> None:
        meeting = self._meetings.get(number)
        if meeting is not None and meeting.at_step is None and meeting.answered and step < meeting.target:
            return
        _original_at(self, rank, number, step, standing)

    _original_at = Coordinator._at
    return broken(Coordinator, "_at", at)


@mutation(59)
def do_not_say_until_when_an_update_waits() -> Any:
    def tell_progress(self: Coordinator, operation: Any, tickets: Any) -> None:
        self._say(Tell(operation.id, tickets, operation.stage, operation.step))

    return broken(Coordinator, "_tell_progress", tell_progress)


# Breaks of what is accepted and refused, and of what authors are told.


@mutation(0)
def acknowledge_before_the_journal_is_durable() -> Any:
    def write(self: Coordinator, entry: Any, then: Callable[[Any], None]) -> None:
        number = next(self._numbers)
        self._writes[number] = entry, lambda refusal: None
        self._commands.append(Write(number, entry))
        self.history.add(entry)
        then(None)

    return broken(Coordinator, "_write", write)


@mutation(20)
def commit_after_a_refusal() -> Any:
    return broken(Gather, "refusal", lambda self: None)


@mutation(6)
def forget_the_id_check() -> Any:
    def propose(self: Coordinator, rank: int, message: Any) -> None:
        self._known.pop(message.proposal.id, None)
        self.history.by_id.pop(message.proposal.id, None)
        ORIGINAL[Coordinator, "_propose"](self, rank, message)

    return broken(Coordinator, "_propose", propose)


@mutation(35)
def keep_what_was_prepared_by_id_alone() -> Any:
    def prepare(self: Prepare, replica: Any) -> None:
        replica.prepare(self.id, "", self.content)

    def apply(self: Apply, replica: Any) -> Any:
        return replica.apply(self.id, "", self.sequence, keep=True)

    stack = contextlib.ExitStack()
    stack.enter_context(broken(Prepare, "perform", prepare))
    stack.enter_context(broken(Apply, "perform", apply))
    stack.enter_context(
        broken(BeginTrial, "perform", lambda self, replica: (replica.keep_copy(), apply(self, replica))[1])
    )
    return stack


@mutation(834)
def refuse_what_is_committed() -> Any:
    def refused(self: Coordinator, operation: Any, refusal: Any) -> None:
        self._finish(operation, Outcome(Stage.REFUSED, refusal))

    return broken(Coordinator, "_refused", refused)


@mutation(10)
def accept_other_content_under_the_same_id() -> Any:
    return broken(coordinator_module, "has_other_content", lambda proposal, known, record: False)


@mutation(46)
def lose_a_withdrawal() -> Any:
    def withdraw(self: Coordinator, ticket: str, id_: str) -> None:
        self._tell(Tell(id_, (ticket,), Stage.WITHDRAWN))

    return broken(Coordinator, "_withdraw", withdraw)


@mutation(52)
def tell_a_withdrawal_before_it_is_written() -> Any:
    def withdraw(self: Coordinator, ticket: str, id_: str) -> None:
        if id_ in self._known:
            self._tell(Tell(id_, (ticket,), Stage.WITHDRAWN))
        ORIGINAL[Coordinator, "_withdraw"](self, ticket, id_)

    return broken(Coordinator, "_withdraw", withdraw)


@mutation(1)
def promise_a_step_without_writing_it_down() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        if isinstance(request, Persist) and isinstance(request.entry, Scheduled):
            self._run(operation, None)
        else:
            ORIGINAL[Coordinator, "_serve"](self, operation, request)

    return broken(Coordinator, "_serve", serve)


@mutation(7)
def remove_from_the_inbox_when_it_is_read() -> Any:
    def propose(self: Coordinator, rank: int, message: Any) -> None:
        ORIGINAL[Coordinator, "_propose"](self, rank, message)
        if message.ticket in self._inbox:
            self._inbox.discard(message.ticket)
            self._commands.append(CloseInbox(message.ticket, Tell(message.proposal.id, (), Stage.PROPOSED)))

    return broken(Coordinator, "_propose", propose)


@mutation(820)
def tell_a_refusal_that_a_restart_would_undo() -> Any:
    def write_refusal(self: Coordinator, tell: Tell, operation: Any, whole: bool) -> None:
        self._forget(operation)
        self._tell(tell)

    return broken(Coordinator, "_write_refusal", write_refusal)


@mutation(389)
def keep_the_bytes_of_what_was_refused() -> Any:
    return broken(Discard, "perform", lambda self, replica: None)


# Breaks of what is asked for from outside, of pulls, and of reverts.


@mutation(0)
def revert_what_is_reverted() -> Any:
    return broken(apply_module, "why_not", lambda history, sequence, forced=False: "")


@mutation(0)
def save_before_the_overwritten_values_are_durable() -> Any:
    return broken(Keep, "only_writes", False)


@mutation(1540)
def keep_overwritten_values_only_once() -> Any:
    def keep_before(self: Coordinator, record: Any) -> None:
        if record.sequence not in self.history.before:
            ORIGINAL[Coordinator, "keep_before"](self, record)

    return broken(Coordinator, "keep_before", keep_before)


@mutation(417)
def revert_what_is_just_being_applied() -> Any:
    return broken(Operation, "is_applying", lambda self, id_: False)


@mutation(1162)
def revert_what_is_still_to_be_replayed() -> Any:
    return broken(Coordinator, "replayed_at", lambda self, sequence: None)


@mutation(17)
def hold_the_overwritten_values_of_a_reverted_trial() -> Any:
    def perform(self: EndTrial, replica: Any) -> Applied:
        if not self.kept:
            replica.go_back()
        replica.drop_copy()
        return Applied(replica.digest())

    return broken(EndTrial, "perform", perform)


@mutation(1)
def forget_who_asked() -> Any:
    def request(self: Coordinator, message: Any) -> None:
        ORIGINAL[Coordinator, "_request"](self, type(message)(message.kind, (), message.arguments))

    return broken(Coordinator, "_request", request)


@mutation(1072)
def pull_from_each_worker_at_a_boundary_of_its_own() -> Any:
    def script(self: Pull, job: Any) -> Any:
        take, digests = TakeRows(self.id, *self.arguments), {}
        for rank in range(job.size):
            step = yield Boundary()
            digests |= yield Ask(take, (rank,))
        return Outcome(Stage.VERIFIED, PulledRows(take.name, take.rows, step, digests))

    return broken(Pull, "script", script)


# Breaks of what is written down, and of what the next attempt makes of it.


@mutation(118)
def let_a_stale_groups_records_count() -> Any:
    return broken(Disk, "entries", lambda self: [entry for group in self.groups for entry in group])


@mutation(40)
def do_not_look_for_a_later_claim_after_a_write() -> Any:
    def handle(self: Coordinator, event: Any) -> Any:
        if isinstance(event, Written) and event.outcome is WriteOutcome.FENCED:
            event = replace(event, outcome=WriteOutcome.DURABLE)
        return ORIGINAL[Coordinator, "handle"](self, event)

    return broken(Coordinator, "handle", handle)


@mutation(7)
def replay_at_the_step_after() -> Any:
    def after(self: History, holds: Any) -> list[Committed]:
        return [replace(one, step=one.step + 1) for one in ORIGINAL[History, "after"](self, holds)]

    return broken(History, "after", after)


@mutation(7)
def replay_what_the_checkpoint_holds() -> Any:
    return broken(History, "after", lambda self, holds: ORIGINAL[History, "after"](self, frozenset()))


@mutation(7)
def forget_the_last_replay() -> Any:
    return broken(History, "after", lambda self, holds: ORIGINAL[History, "after"](self, holds)[:-1])


@mutation(834)
def forget_what_is_scheduled_after_a_restart() -> Any:
    def take_up_journal(self: Coordinator) -> None:
        with mock.patch.object(self.history, "scheduled", {}):
            ORIGINAL[Coordinator, "take_up_journal"](self)

    return broken(Coordinator, "take_up_journal", take_up_journal)


@mutation(36)
def let_new_updates_overtake_replays() -> Any:
    return broken(Coordinator, "_is_next", lambda self, operation, step: True)


@mutation(157)
def decide_a_trial_again_after_a_restart() -> Any:
    def init(self: UpdateOperation, proposal: Any, record: Any = None, _: Any = None, **options: Any) -> None:
        ORIGINAL[UpdateOperation, "__init__"](self, proposal, record, None, **options)

    return broken(UpdateOperation, "__init__", init)


@mutation(14)
def revert_a_trial_on_all_workers_but_one() -> Any:
    def perform(self: EndTrial, replica: Any) -> Applied:
        if not self.kept and replica.rank != 1:
            replica.go_back()
        replica.drop_copy()
        return Applied(replica.digest())

    return broken(EndTrial, "perform", perform)


@mutation(59)
def save_during_a_trial() -> Any:
    return broken(
        TakeSnapshot,
        "perform",
        lambda self, replica: replica.snapshot(self.id, due=self.due, again=self.again),
    )


@mutation(36)
def forget_uncommitted_proposals_in_a_checkpoint() -> Any:
    return broken(Coordinator, "pending", lambda self: ())


@mutation(1742)
def keep_checkpoints_that_were_given_up() -> Any:
    def script(self: Begin, job: Any) -> Any:
        job.take_up_journal()
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)

    return broken(Begin, "script", script)


@mutation(207)
def save_a_state_that_differs_between_workers() -> Any:
    original = attempt_module.saved

    def saved(job: Any, snapshots: Any) -> Any:
        same = {rank: replace(one, digest="") for rank, one in snapshots.items() if one is not None}
        return original(job, same)

    return broken(attempt_module, "saved", saved)


@mutation(0)
def write_a_checkpoint_before_the_payloads() -> Any:
    return broken(Coordinator, "_is_stored", lambda self, operation: True)


@mutation(523)
def take_snapshots_on_both_sides_of_an_update_for_one_state() -> Any:
    def are_of_one_state(snapshots: Any) -> bool:
        return bool(snapshots) and None not in snapshots.values()

    return broken(attempt_module, "_are_of_one_state", are_of_one_state)


@mutation(0)
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


@mutation(820)
def forget_whose_proposals_a_checkpoint_holds() -> Any:
    def pending(self: Coordinator) -> tuple[Pending, ...]:
        return tuple(replace(one, tickets=()) for one in ORIGINAL[Coordinator, "pending"](self))

    return broken(Coordinator, "pending", pending)


@mutation(820)
def bring_back_what_has_ended() -> Any:
    return broken(History, "has_ended", lambda self, pending: pending.proposal.id in self.by_id)


@mutation(1)
def use_the_bytes_of_an_earlier_attempt() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        if isinstance(request, Ask) and isinstance(request.order, Load):
            self._run(operation, {0: operation.proposal.content})
        else:
            ORIGINAL[Coordinator, "_serve"](self, operation, request)

    return broken(Coordinator, "_serve", serve)


def is_caught(name: str, seed: int) -> bool:
    """Whether the story of this seed fails with this break."""
    with MUTATIONS[name]():
        try:
            World(random_plan(seed), most_events=5000).run()
        except StoryFailed:
            return True
    return False


# Prints which schedule is the first to notice each break; names of breaks restrict it to those.

MOST = 30_000


def main() -> None:
    print("| break | schedules |\n| --- | --- |")
    for name in sys.argv[1:] or MUTATIONS:
        caught = next((seed for seed in range(MOST) if is_caught(name, seed)), None)
        schedules = f"more than {MOST:,}" if caught is None else f"{caught + 1:,}"
        print(f"| {name} | {schedules} |", flush=True)


if __name__ == "__main__":
    main()
