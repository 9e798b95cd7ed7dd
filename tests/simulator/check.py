"""The invariants of every schedule, checked while it runs, and at its end against a sequential model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from replicast.core.entries import (
    Committed,
    Decided,
    Entry,
    History,
    Payload,
    Proposal,
    Saved,
    Scheduled,
    Stage,
)
from replicast.core.messages import Ended, Propose, Tell
from replicast.core.operations.audit import PulledRows
from replicast.update.audit_report import AuditReport
from tests.simulator.disk import Disk
from tests.simulator.model import check_before, check_reverts, model, needs_before
from tests.simulator.notes import Clock, Notes
from tests.simulator.plan import Plan
from tests.simulator.replica import SimulatedReplica, StoryFailed
from tests.simulator.words import described


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The end of a group of workers."""

    replicas: Sequence[SimulatedReplica]
    started_at: float
    closing_at: float


class Checks:
    """Checks one schedule."""

    def __init__(self, plan: Plan, disk: Disk, clock: Clock, notes: Notes) -> None:
        self._plan = plan
        self._disk = disk
        self._clock = clock
        self._notes = notes
        self._drifted: set[int] = set()
        self._unhealed: set[int] = set()
        self._last = GroupOutcome((), 0.0, 0.0)
        self._attempts = 0
        self._proposals: dict[str, Proposal] = {}
        self._times: dict[str, float] = {}
        self._from_script: set[str] = set()
        self._from_inbox: set[str] = set()
        self._ended: dict[tuple[str, int], float] = {}
        self._told: dict[str, Stage] = {}
        self._stages: dict[tuple[str, str], set[Stage]] = defaultdict(set)

    # While it happens.

    def proposed(
        self, ticket: str, proposal: Proposal, *, in_training: bool = False, in_inbox: bool = False
    ) -> None:
        """Called when an update or a function is proposed."""
        self._notes.count("operations")
        self._proposals[ticket] = proposal
        self._times[ticket] = self._clock.now
        if in_training:
            self._from_script.add(ticket)
        if in_inbox:
            self._from_inbox.add(ticket)
        if self._notes.recording:
            self._notes.say(None, "author", f"proposes {described(proposal)}  [ticket {ticket}]")

    def asked(self, ticket: str) -> None:
        self._times[ticket] = self._clock.now

    def announced(self, attempt: int, tell: Tell) -> None:
        if tell.ended:
            self._ended[tell.id, attempt] = self._clock.now

    def drifted(self, attempt: int) -> None:
        self._drifted.add(attempt)

    def saved(self, entry: Saved) -> None:
        for pending in entry.pending:
            proposal = pending.proposal
            if self._disk.find(Payload, proposal.id, proposal.digest) is None:
                raise StoryFailed(
                    f"the checkpoint of step {entry.step} needs {proposal.id}, which is not durable"
                )
        if not entry.holds or self._notes.faults["full disk"]:
            return
        history = self._disk.history()
        for sequence in entry.holds:
            record = history.committed.get(sequence)
            if record is not None and needs_before(history, record) and sequence not in history.before:
                raise StoryFailed(
                    f"the checkpoint of step {entry.step} holds update {sequence}, and the values before it "
                    "are not durable"
                )

    def ended(self, attempt: int, replicas: Sequence[SimulatedReplica], ended: Ended) -> None:
        kind, outcome = ended.kind, ended.outcome
        self._notes.count(f"{kind}: {getattr(outcome.result, 'outcome', outcome.stage)}")
        self._check_reports_came(outcome.result)
        if attempt not in self._drifted and outcome.stage is Stage.FAILED:
            raise StoryFailed(f"a false alarm: {kind} {outcome}")
        if kind == "audit" and outcome.stage is not Stage.VERIFIED:
            self._unhealed.add(attempt)
        if isinstance(outcome.result, AuditReport):
            self._check_report(replicas, outcome.result)
        if isinstance(outcome.result, PulledRows):
            self._check_pulled(replicas, ended.id, outcome.result)

    def _check_pulled(self, replicas: Sequence[SimulatedReplica], id_: str, pulled: PulledRows) -> None:
        """All workers have shown one moment, and the answer has the values of each of them."""
        moments = {replica.pulled[id_][:2] for replica in replicas}
        values = {replica.rank: str(replica.pulled[id_][2]) for replica in replicas}
        if len(moments) > 1 or pulled.step != moments.pop()[0] or pulled.digests != values:
            raise StoryFailed(f"a pull has mixed moments or values: {pulled}, {moments}, {values}")

    def _check_reports_came(self, result: Any) -> None:
        """Only a worker that has left out its report is said to have done so."""
        forgetful = None if self._plan.forgets is None else self._plan.forgets[0]
        problem = getattr(result, "problem", "")
        if "did not report" in problem and result.workers != (forgetful,):
            raise StoryFailed(f"no worker has left it out: {problem}")

    def _check_report(self, replicas: Sequence[SimulatedReplica], report: AuditReport) -> None:
        """Checks the report of an audit."""
        for one in report.differences:
            if len(replicas) < 2 * max(map(len, one.groups)) and 2 * len(one.groups[0]) < len(replicas):
                raise StoryFailed(f"the value of a minority counts: {one}")
        if report.outcome == "raised" and any(one.report_to_raise is None for one in replicas):
            raise StoryFailed(f"not every worker raises what an audit found: {report}")

    def raised(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._notes.count("raised by training threads")
        without = [replica.rank for replica in replicas if replica.report_to_raise is None]
        if without:
            raise StoryFailed(f"an audit is raised, and workers {without} do not have its report")

    def applied(self, replica: SimulatedReplica, id_: str, sequence: int) -> None:
        record = self._disk.find(Committed, id_)
        if not isinstance(record, Committed) or record.sequence != sequence:
            raise StoryFailed(
                f"worker {replica.rank} applies {id_} ({sequence}), which is not in the journal: {record}"
            )
        if record.step != replica.step:
            raise StoryFailed(
                f"worker {replica.rank} applies {id_} at step {replica.step}, not {record.step}"
            )
        if record.reverts is not None and record.reverts not in replica.holds:
            raise StoryFailed(f"worker {replica.rank} reverts update {record.reverts} before it has it")
        if sequence in replica.holds:
            raise StoryFailed(f"worker {replica.rank} applies {id_} twice")

    def settled(self, replicas: Sequence[SimulatedReplica], ticket: str, tell: Tell) -> None:
        stage, proposal = tell.stage, self._proposals.get(ticket)
        if proposal is None:  # a withdrawal's own ticket
            if stage is Stage.WITHDRAWN and self._disk.find(Committed, tell.id):
                raise StoryFailed(f"{tell.id} was withdrawn, and is in the journal")
            return
        before = self._told.get(ticket)
        if before is not None and before.is_final and stage is not before:
            raise StoryFailed(f"{ticket} was told {before}, then {stage}")
        self._told[ticket] = stage
        self._stages[proposal.id, proposal.digest].add(stage)
        if self._notes.recording:
            waits = f", waits for {tell.waits_for}" if tell.waits_for else ""
            self._notes.say(None, "author", f"is told: {proposal.id} is {stage}{waits}  [ticket {ticket}]")
        if stage is Stage.SCHEDULED and not self._is_durable(proposal):
            raise StoryFailed(f"{ticket} is told that {proposal.id} is scheduled, which is not durable")
        is_applied = stage in (Stage.VERIFIED, Stage.REVERTED, Stage.APPLIED, Stage.COMMITTED)
        if is_applied and not self._is_committed(proposal):
            raise StoryFailed(f"{ticket} is told that {proposal.id} is {stage}, which is not in the journal")
        if stage is Stage.FAILED and not self._notes.faults["drift"]:
            raise StoryFailed(f"{ticket}: {proposal.id} has failed: {tell.outcome}")
        if stage is Stage.REFUSED:
            self._notes.count("refused")
            if self._is_committed(proposal):
                for replica in replicas:
                    if any(id_ == proposal.id for _, _, id_ in replica.applied):
                        raise StoryFailed(
                            f"{ticket} is told that {proposal.id} is refused, which was applied"
                        )

    def _is_durable(self, proposal: Proposal) -> bool:
        disk = self._disk
        return bool(disk.find(Scheduled, proposal.id) or disk.find(Committed, proposal.id))

    def _is_committed(self, proposal: Proposal) -> bool:
        """Whether the journal has it, and not another proposal with its id."""
        record = self._disk.find(Committed, proposal.id)
        if record is None or record.reverts != proposal.reverts:
            return False
        return proposal.digest in ("", record.digest)

    # At the end.

    def finish(self, groups: Sequence[GroupOutcome]) -> None:
        """Checks at the end that all workers have the state of the sequential model."""
        entries = self._disk.entries()
        history = History(entries)
        self._notes.count("committed", len(history.committed))
        self._last, self._attempts = groups[-1], len(groups)
        for group in groups:
            self._check_order(group.replicas)
        self._check_end(groups[-1].replicas, entries, history)
        self._check_room(groups[-1], history.decided.values())
        self._check_model(groups[-1].replicas, entries)
        self._check_outcomes(history)
        forced = {one.id for one in self._proposals.values() if one.forced}
        self._notes.count("reverts", check_reverts(entries, forced))
        if not self._notes.faults["drift"]:
            check_before(entries, history, self._plan.steps)
        self._check_requests()

    def _check_order(self, replicas: Sequence[SimulatedReplica]) -> None:
        """All workers have applied the same updates in order; if a group died, as far as each came."""
        lists = sorted((replica.applied for replica in replicas), key=len)
        for one in lists:
            if one != lists[-1][: len(one)]:
                raise StoryFailed(f"the workers have applied different lists: {lists}")
        if lists and lists[-1] != sorted(lists[-1]):
            raise StoryFailed(f"applied out of order: {lists[-1]}")

    def _check_end(
        self, replicas: Sequence[SimulatedReplica], entries: list[Entry], history: History
    ) -> None:
        first = replicas[0]
        if any(replica.applied != first.applied for replica in replicas):
            raise StoryFailed(f"not all or none: {[replica.applied for replica in replicas]}")
        committed = history.committed
        if sorted(committed) != list(range(1, len(committed) + 1)):
            raise StoryFailed(f"the journal has gaps: {sorted(committed)}")
        decided = [one.sequence for one in entries if isinstance(one, Decided)]
        if len(set(decided)) != len(decided):
            raise StoryFailed(f"a trial was decided twice: {decided}")
        ids = [record.id for record in committed.values()]
        if len(set(ids)) != len(ids):
            raise StoryFailed(f"an update is in the journal twice: {ids}")
        left = set(committed) - first.holds
        if left:
            raise StoryFailed(f"committed, and not applied at the end: {[committed[one] for one in left]}")
        missed = [one for one in history.scheduled.values() if one.at_step <= self._plan.steps]
        if missed and not self._notes.faults["full disk"]:
            raise StoryFailed(f"scheduled, and not applied at their steps: {missed}")

    def _check_room(self, group: GroupOutcome, decided: Collection[Decided]) -> None:
        """No worker keeps the bytes of an operation that has ended."""
        last = {proposal.id: self._times[ticket] for ticket, proposal in self._proposals.items()}
        for replica in group.replicas:
            for id_, _ in replica.prepared:
                ended_at = self._ended.get((id_, self._attempts - 1), -1.0)
                if id_ not in last or last[id_] < ended_at < group.closing_at:
                    raise StoryFailed(f"worker {replica.rank} keeps the bytes of {id_}, which has ended")
            gone = [one.sequence for one in decided if not one.kept and one.sequence in replica.held()]
            if gone:
                raise StoryFailed(f"worker {replica.rank} holds the values before {gone}, which was reverted")

    def _check_model(self, replicas: Sequence[SimulatedReplica], entries: list[Entry]) -> None:
        values = model(entries, self._plan.steps)
        attempt = self._attempts - 1
        reverted = any(isinstance(one, Decided) and not one.kept for one in entries)
        # Reverting also restores a difference from before, which an audit may have reported as not healed.
        may_differ = attempt in self._drifted and (reverted or attempt in self._unhealed)
        for replica in replicas:
            found = dict(replica.values)
            if may_differ:
                found["d"] = values["d"]
            if found != values:
                raise StoryFailed(f"worker {replica.rank} has {replica.values}, and the model {values}")

    def _check_requests(self) -> None:
        """Every request has an answer."""
        for id_, request in self._disk.requests.items():
            if self._was_in_time(id_):
                raise StoryFailed(f"{id_} is not answered: {request}")

    def _check_outcomes(self, history: History) -> None:
        for ticket, proposal in self._proposals.items():
            told, record = self._told.get(ticket), history.by_id.get(proposal.id)
            if told is Stage.WITHDRAWN and record is not None:
                raise StoryFailed(
                    f"{ticket} was told that {proposal.id} is withdrawn, and it is in the journal"
                )
            has_outcome = (told is not None and told.is_final) or ticket in history.refused
            is_known = (
                record is not None or proposal.id in history.withdrawn or proposal.id in history.scheduled
            )
            never = proposal.content is None and (proposal.at_step or 0) > self._plan.steps
            if not has_outcome and not is_known and not never and self._was_in_time(ticket):
                self._lost(ticket, proposal)
            if self._is_early(proposal, record):
                raise StoryFailed(f"{proposal.id} is for step {proposal.at_step}: {record}")
        for (id_, digest), stages in self._stages.items():
            record = history.by_id.get(id_)
            all_told = all(
                ticket in self._told
                for ticket, one in self._proposals.items()
                if (one.id, one.digest) == (id_, digest)
            )
            is_there = record is not None and digest in ("", record.digest)
            if is_there and all_told and stages == {Stage.REFUSED}:
                raise StoryFailed(f"{id_} was refused, and is in the journal")
        for ticket, message in self._disk.inbox.items():
            waits = isinstance(message, Propose) and message.proposal.id in history.scheduled
            if self._was_in_time(ticket) and not waits:
                raise StoryFailed(f"left in the inbox: {message}")

    def _was_in_time(self, ticket: str) -> bool:
        """Whether the job had enough time and disk space to give a proposal its outcome."""
        if self._notes.faults["full disk"]:
            return False  # an outcome that a restart would undo is announced only once it can be written
        group = self._last
        seen = self._times[ticket] if ticket[0].isdigit() else max(self._times[ticket], group.started_at)
        return seen + 0.06 < group.closing_at

    def _is_early(self, proposal: Proposal, record: Committed | None) -> bool:
        """Whether it was applied before its step, and it was not also proposed for another step."""
        if record is None or record.step >= (proposal.at_step or 0):
            return False
        steps = {one.at_step for one in self._proposals.values() if one.id == proposal.id}
        return len(steps) == 1 and proposal.digest == record.digest

    def _lost(self, ticket: str, proposal: Proposal) -> None:
        """Checks a proposal without an outcome: it may only have been lost with a process that died."""
        group = int(ticket.split(".")[0]) if ticket[0].isdigit() else self._attempts - 1
        if group == self._attempts - 1:
            raise StoryFailed(f"{ticket} has no outcome: {proposal}")
        if ticket in self._from_script and proposal.content is not None:
            again = [
                other
                for other in self._proposals
                if other != ticket and self._proposals[other].id == proposal.id and other in self._from_script
            ]
            if not again and not any(id_ == proposal.id for id_, _ in self._ended):
                raise StoryFailed(f"{ticket} was proposed by a training thread and is lost: {proposal}")
        elif (proposal.id, proposal.digest) not in self._stages:
            self._notes.count("lost with their process, never acknowledged")
