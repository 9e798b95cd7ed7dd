"""Deliberate breaks of the core, each of which the simulation must notice.

`python -m tests.simulation.mutations` prints which schedule is the first to notice each: for `CAUGHT_BY`, and
for docs/faults.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from replicast.core import coordinator as coordinator_module
from replicast.core.boundaries import Boundaries
from replicast.core.commands import CloseInbox, Write
from replicast.core.coordinator import Coordinator
from replicast.core.engine import UNDECIDED
from replicast.core.entries import Committed, Scheduled
from replicast.core.events import WriteOutcome
from replicast.core.gather import Gather
from replicast.core.history import History
from replicast.core.meeting import Meeting
from replicast.core.messages import Do, Tell
from replicast.core.operation import Ask, Boundary, EarlierSettled, Go, Outcome, Record
from replicast.core.operations import audit as audit_module
from replicast.core.operations import leave as leave_module
from replicast.core.operations import save as save_module
from replicast.core.operations.audit import Audit, Report
from replicast.core.operations.save import TakeSnapshot
from replicast.core.operations.trial import Begin, End
from replicast.core.operations.update import Apply, Discard, Load, Prepare
from replicast.core.proposal import Pending
from replicast.core.reports import Applied
from replicast.core.stage import Stage
from replicast.core.worker import Worker
from replicast.testing.simulation import StoryFailed, World, random_plan
from replicast.testing.simulation import disk as disk_module

Mutation = Callable[[], contextlib.AbstractContextManager[Any]]
MUTATIONS: dict[str, Mutation] = {}
_original = {
    (owner, name): getattr(owner, name)
    for owner, name in [
        (Boundaries, "want"),
        (Coordinator, "_answered"),
        (Coordinator, "pending"),
        (Coordinator, "_propose"),
        (Coordinator, "_serve"),
        (Coordinator, "_withdraw"),
        (Coordinator, "_written"),
        (History, "after"),
        (Meeting, "step"),
        (Worker, "_do"),
        (Worker, "_go_on"),
        (coordinator_module, "replayed"),
    ]
}


def mutation(make: Mutation) -> Mutation:
    MUTATIONS[make.__name__.replace("_", " ")] = make
    return make


def broken(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(owner, name, value)


@mutation
def skip_the_stop() -> Any:
    """The workers have said where they are: that is taken for standing there."""
    return broken(Meeting, "step", lambda self: self.latest if self.answered else None)


@mutation
def pass_a_boundary_in_spite_of_a_stop() -> Any:
    def go_on(self: Worker) -> None:
        stops, self._stops = self._stops, {}
        _original[Worker, "_go_on"](self)
        self._stops = stops

    return broken(Worker, "_go_on", go_on)


@mutation
def choose_the_earliest_boundary_instead_of_the_latest() -> Any:
    return broken(Meeting, "latest", property(lambda self: min(self.steps.values())))


@mutation
def apply_twice() -> Any:
    def twice(self: Worker, do: Do) -> None:
        _original[Worker, "_do"](self, do)
        if not do.order.in_background:
            _original[Worker, "_do"](self, do)

    return broken(Worker, "_do", twice)


@mutation
def acknowledge_before_the_journal_is_durable() -> Any:
    def write(self: Coordinator, entry: Any, then: Callable[[Any], None]) -> None:
        number = next(self._numbers)
        self._writes[number] = entry, lambda refusal: None
        self._commands.append(Write(number, entry))
        self.history.add(entry)
        then(None)

    return broken(Coordinator, "_write", write)


@mutation
def let_a_stale_groups_records_count() -> Any:
    return broken(disk_module, "valid", lambda groups: [entry for group in groups for entry in group.entries])


@mutation
def do_not_look_for_a_later_claim_after_a_write() -> Any:
    def written(self: Coordinator, number: int, outcome: WriteOutcome) -> None:
        fenced = outcome is WriteOutcome.FENCED
        _original[Coordinator, "_written"](self, number, WriteOutcome.DURABLE if fenced else outcome)

    return broken(Coordinator, "_written", written)


@mutation
def commit_after_a_refusal() -> Any:
    return broken(Gather, "refusal", lambda self: None)


@mutation
def forget_the_id_check() -> Any:
    def propose(self: Coordinator, rank: int, message: Any) -> None:
        self._known.pop(message.proposal.id, None)
        self.history.by_id.pop(message.proposal.id, None)
        _original[Coordinator, "_propose"](self, rank, message)

    return broken(Coordinator, "_propose", propose)


@mutation
def keep_what_was_prepared_by_id_alone() -> Any:
    def prepare(self: Prepare, replica: Any) -> None:
        replica.prepare(self.id, "", self.content)

    def apply(self: Apply, replica: Any) -> Any:
        return replica.apply(self.id, "", self.sequence)

    stack = contextlib.ExitStack()
    stack.enter_context(broken(Prepare, "perform", prepare))
    stack.enter_context(broken(Apply, "perform", apply))
    stack.enter_context(
        broken(Begin, "perform", lambda self, replica: (replica.keep_copy(), apply(self, replica))[1])
    )
    return stack


@mutation
def leave_a_stop_up_when_a_rest_ends() -> Any:
    def rests_end(self: Boundaries) -> None:
        self._here = None
        _original_rests_end(self)

    _original_rests_end = Boundaries.rests_end
    return broken(Boundaries, "rests_end", rests_end)


@mutation
def end_a_rest_while_another_operation_has_the_turn() -> Any:
    def resume_rests(self: Coordinator) -> bool:
        resume, self._resuming = self._resuming, None
        if resume is None:
            return False
        self.boundaries.rests_end()
        self._say(resume)
        return True

    return broken(Coordinator, "_resume_rests", resume_rests)


@mutation
def refuse_what_is_committed() -> Any:
    def refused(self: Coordinator, operation: Any, refusal: Any) -> None:
        self._finish(operation, Outcome(Stage.REFUSED, refusal))

    return broken(Coordinator, "_refused", refused)


@mutation
def accept_other_content_under_the_same_id() -> Any:
    return broken(coordinator_module, "digest_of", lambda known, record: mock.ANY)


@mutation
def apply_in_another_order_on_one_worker() -> Any:
    def go_on(self: Worker) -> None:
        if self.rank == 1:
            self._orders.reverse()
        _original[Worker, "_go_on"](self)

    return broken(Worker, "_go_on", go_on)


@mutation
def lose_a_withdrawal() -> Any:
    def withdraw(self: Coordinator, ticket: str, id_: str) -> None:
        self._tell(Tell(id_, (ticket,), Stage.WITHDRAWN))

    return broken(Coordinator, "_withdraw", withdraw)


@mutation
def tell_a_withdrawal_before_it_is_written() -> Any:
    def withdraw(self: Coordinator, ticket: str, id_: str) -> None:
        if id_ in self._known:
            self._tell(Tell(id_, (ticket,), Stage.WITHDRAWN))
        _original[Coordinator, "_withdraw"](self, ticket, id_)

    return broken(Coordinator, "_withdraw", withdraw)


@mutation
def replay_at_the_step_after() -> Any:
    def replayed(proposal: Any, record: Committed, decided: Any) -> Any:
        return _original[coordinator_module, "replayed"](
            proposal, replace(record, step=record.step + 1), decided
        )

    return broken(coordinator_module, "replayed", replayed)


@mutation
def replay_what_the_checkpoint_holds() -> Any:
    return broken(History, "after", lambda self, holds: _original[History, "after"](self, frozenset()))


@mutation
def forget_the_last_replay() -> Any:
    return broken(History, "after", lambda self, holds: _original[History, "after"](self, holds)[:-1])


@mutation
def let_new_updates_overtake_replays() -> Any:
    return broken(Boundaries, "_is_next", lambda self, operation, step: True)


@mutation
def decide_a_trial_again_after_a_restart() -> Any:
    def replayed(proposal: Any, record: Committed, decided: Any) -> Any:
        return _original[coordinator_module, "replayed"](proposal, record, None)

    return broken(coordinator_module, "replayed", replayed)


@mutation
def revert_a_trial_on_all_workers_but_one() -> Any:
    def perform(self: End, replica: Any) -> Applied:
        if not self.kept and replica.rank != 1:
            replica.go_back()
        replica.drop_copy()
        return Applied(replica.digest())

    return broken(End, "perform", perform)


@mutation
def commit_others_during_a_trial() -> Any:
    return broken(Coordinator, "_deferred", lambda self, operation: None)


@mutation
def save_during_a_trial() -> Any:
    return broken(TakeSnapshot, "perform", lambda self, replica: replica.snapshot(due=self.due))


@mutation
def forget_uncommitted_proposals_in_a_checkpoint() -> Any:
    return broken(Coordinator, "pending", lambda self: ())


@mutation
def promise_a_step_without_writing_it_down() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        if isinstance(request, Record) and isinstance(request.entry, Scheduled):
            self._run(operation, None)
        else:
            _original[Coordinator, "_serve"](self, operation, request)

    return broken(Coordinator, "_serve", serve)


@mutation
def ignore_at_step() -> Any:
    def want(self: Boundaries, operation: Any, at_step: int | None) -> None:
        if operation.replays is None and operation is not None and operation.meeting is not None:
            self._release(operation.meeting)
            operation.meeting = None
        _original[Boundaries, "want"](self, operation, None if operation.replays is None else at_step)

    return broken(Boundaries, "want", want)


@mutation
def remove_from_the_inbox_when_it_is_read() -> Any:
    def propose(self: Coordinator, rank: int, message: Any) -> None:
        _original[Coordinator, "_propose"](self, rank, message)
        if message.ticket in self._inbox:
            self._inbox.discard(message.ticket)
            self._commands.append(CloseInbox(message.ticket, Tell(message.proposal.id, (), Stage.PROPOSED)))

    return broken(Coordinator, "_propose", propose)


@mutation
def tell_a_refusal_that_a_restart_would_undo() -> Any:
    def write_refusal(self: Coordinator, tell: Tell, operation: Any, whole: bool) -> None:
        self._forget(operation)
        self._tell(tell)

    return broken(Coordinator, "_write_refusal", write_refusal)


@mutation
def wait_without_a_deadline() -> Any:
    return broken(Coordinator, "_set_timer", lambda self, secs, then: None)


@mutation
def do_not_ask_again_when_a_worker_rests_early() -> Any:
    def at(self: Boundaries, rank: int, number: int, step: int, standing: bool) -> None:
        meeting = self._meetings.get(number)
        if meeting is not None and meeting.at_step is None and meeting.answered and step < meeting.target:
            return
        _original_at(self, rank, number, step, standing)

    _original_at = Boundaries.at
    return broken(Boundaries, "at", at)


@mutation
def keep_checkpoints_that_were_given_up() -> Any:
    from replicast.core.operations.begin import Begin

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
    stack.enter_context(broken(leave_module, "saved", saved))
    return stack


@mutation
def heal_nothing() -> Any:
    def differences(self: Audit, job: Any, seen: Any) -> Any:
        return ()
        yield

    return broken(Audit, "_differences", differences)


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
        return tuple(replace(one, tickets=()) for one in _original[Coordinator, "pending"](self))

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
            _original[Coordinator, "_serve"](self, operation, request)

    return broken(Coordinator, "_serve", serve)


@mutation
def raise_an_audit_before_all_have_its_report() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        report = isinstance(request, Ask) and isinstance(request.order, Report)
        _original[Coordinator, "_serve"](self, operation, Go(request.order) if report else request)

    return broken(Coordinator, "_serve", serve)


@mutation
def keep_the_threads_that_rest_when_an_audit_raises() -> Any:
    return broken(Coordinator, "end_rest", lambda self, operation, refusal: None)


@mutation
def do_not_raise_what_an_audit_found() -> Any:
    return broken(Report, "perform", lambda self, replica: replica.report(self.report, raises=False))


@mutation
def heal_with_the_value_of_the_minority() -> Any:
    def reference_of(groups: Any, expected: Any) -> Any:
        return min(list(groups.values())[-1]), "minority"

    return broken(audit_module, "reference_of", reference_of)


@mutation
def do_not_say_until_when_an_update_waits() -> Any:
    def tell_progress(self: Coordinator, operation: Any, tickets: Any) -> None:
        self._say(Tell(operation.id, tickets, operation.stage, operation.step))

    return broken(Coordinator, "_tell_progress", tell_progress)


@mutation
def keep_the_bytes_of_what_was_refused() -> Any:
    return broken(Discard, "perform", lambda self, replica: None)


@mutation
def take_the_reports_of_different_boundaries_for_one() -> Any:
    def answered(self: Coordinator, rank: int, number: Any, value: Any) -> None:
        if isinstance(number, tuple) and rank == 1:
            number = number[0], max(1, number[1] - 1)
        _original[Coordinator, "_answered"](self, rank, number, value)

    return broken(Coordinator, "_answered", answered)


CAUGHT_BY = {
    "end a rest while another operation has the turn": 58088,
    "refuse what is committed": 52089,
    "keep what was prepared by id alone": 15171,
    "leave a stop up when a rest ends": 12281,
    "skip the stop": 0,
    "pass a boundary in spite of a stop": 0,
    "choose the earliest boundary instead of the latest": 25,
    "apply twice": 0,
    "acknowledge before the journal is durable": 0,
    "let a stale groups records count": 250,
    "do not look for a later claim after a write": 10,
    "commit after a refusal": 2,
    "forget the id check": 0,
    "accept other content under the same id": 77,
    "apply in another order on one worker": 6807,
    "lose a withdrawal": 6,
    "tell a withdrawal before it is written": 6,
    "replay at the step after": 0,
    "replay what the checkpoint holds": 11,
    "forget the last replay": 0,
    "let new updates overtake replays": 704,
    "decide a trial again after a restart": 7,
    "revert a trial on all workers but one": 0,
    "commit others during a trial": 1083,
    "save during a trial": 893,
    "forget uncommitted proposals in a checkpoint": 68,
    "promise a step without writing it down": 3,
    "ignore at step": 10,
    "remove from the inbox when it is read": 4,
    "tell a refusal that a restart would undo": 814,
    "wait without a deadline": 42,
    "do not ask again when a worker rests early": 1813,
    "keep checkpoints that were given up": 1096,
    "save a state that differs between workers": 174,
    "heal nothing": 14,
}
"""The first schedule, from 0 on, that notices each break."""


def is_caught(name: str, seed: int) -> bool:
    """Whether the story of this seed fails with this break."""
    with MUTATIONS[name]():
        try:
            World(random_plan(seed), most_events=5000).run()
        except StoryFailed:
            return True
    return False


def main() -> None:
    print("| break | caught by schedule number |\n| --- | --- |")
    for name in MUTATIONS:
        caught = next((seed for seed in range(30_000) if is_caught(name, seed)), None)
        print(f"| {name} | {caught} |", flush=True)


if __name__ == "__main__":
    main()
