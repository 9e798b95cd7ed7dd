"""An audit's round: all workers stand at one boundary while it is found out who differs, where, by how much.

    hold, examine   all workers stop at one boundary and digest every variable of the state
    lend, stage     if digests differ: whose value counts makes it available, and all take it; nothing is
                    written, and nobody has changed
    weigh           all compare their values with it
    examine         with the verdict, if all have to raise it: each says that it has it, and raises only then
    audited         the report, the same on all workers; they go on, or raise
    hold, go, examine, audited      to heal: what was lent is committed like any update, applied at this very
                    boundary, and the digests are compared once more

Nothing else is decided between the first look and the last word: what is proposed meanwhile waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from replicast.audit import (
    OUTCOMES,
    AuditReport,
    Declared,
    Deviation,
    Difference,
    Policy,
    checked_policy,
    groups_of,
    reference_first,
    reference_of,
    workers_text,
)
from replicast.errors import JobFailed, UpdateRefused
from replicast.protocol.audit_messages import Audited, Examine, Examined, Lend, Weigh
from replicast.protocol.channel import LOOK_SECS
from replicast.protocol.examining import round_key
from replicast.protocol.findings import Findings
from replicast.protocol.looks import Looks
from replicast.protocol.member import Member
from replicast.protocol.messages import Drop, Free, Proposal
from replicast.protocol.rounds import Rounds
from replicast.protocol.stopping import OpenRound

logger = logging.getLogger("replicast")

_MOST_NAMED = 5


@dataclass(slots=True)
class Audit:
    """One audit under way.

    Attributes:
        round: The round that keeps all workers at the boundary now.
        policy: What becomes of a difference.
        requests: The ids of those outside of the job who asked for it.
        lent: What was lent and is not committed.
        said: The keys of what workers have said, to be removed.
    """

    round: int
    policy: Policy
    requests: tuple[str, ...] = ()
    lent: list[Proposal] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Audits:
    """Holds the rounds of audits, and looks into what quiet ones find. For the coordinator's thread only.

    Args:
        member: Worker 0's own part.
        rounds: Says the words of rounds.
        meanwhile: Called while workers are waited for: others may have to go on before they can answer.
        on_raise: Called before the training threads raise, with the token of the pause that each of them
            leaves so, by rank; None for one that is in none.
    """

    def __init__(
        self,
        member: Member,
        rounds: Rounds,
        meanwhile: Callable[[], None],
        on_raise: Callable[[dict[int, int | None]], None],
    ) -> None:
        self._member = member
        self._channel = member.channel
        self._examiner = member.examiner
        self._rounds = rounds
        self._meanwhile = meanwhile
        self._on_raise = on_raise
        self._findings = Findings()
        self._looks: Looks | None = None
        self._raised = False
        self._waiting: Audit | None = None
        self._names = [variable.name for variable in member.state.schema]

    def start(self, on_difference: Callable[[], None]) -> None:
        """Starts the thread that compares what is seen without a round; it calls when that differs."""
        self._looks = Looks(self._member, self._findings, on_difference)
        self._looks.start()

    def is_open(self) -> bool:
        """Whether an audit's round waits for its boundary."""
        return any(one.act is not None for one in self._rounds.opened)

    def look_into_suspicion(self) -> None:
        """Opens a round if a quiet audit has found a difference."""
        if self._findings.take_suspicion():
            self.open()

    def open(self) -> None:
        """Has all workers audited at the next boundary they can agree on."""
        if self.is_open():
            return
        try:
            audit, step = self._begin(self._examiner.policy)
        except UpdateRefused as error:
            logger.warning("the workers could not agree on a step to be audited at: %s", error)
            return

        def act() -> None:
            self._waiting = None
            error = self._carry_out(audit)
            if error is not None:
                logger.warning("the audit could not be carried out: %s", error)

        self._waiting = audit
        id_ = f"audit-{audit.round}"
        stand_in = Proposal(id_, id_, 0, id_, time.time(), source=0)
        self._rounds.opened.append(OpenRound(audit.round, step, stand_in, act))

    def settle(self, *, may_raise: bool = True) -> bool:
        """All workers have paused: what quiet audits saw is compared and looked into before they go on.

        Args:
            may_raise: Whether what is to raise does; else it only warns.

        Returns:
            Whether their training threads raise what was found.
        """
        if self._looks is not None and not self._looks.settle(self._member.patience.answer_secs):
            logger.warning("not everything that was seen is compared at this pause")
        if not self._findings.take_suspicion():
            return False
        error = self.at_once(self._examiner.policy if may_raise else _without_raising(self._examiner.policy))
        if error is not None:
            logger.warning("the audit could not be carried out: %s", error)
        return self._raised

    def only_warn(self) -> None:
        """All workers ask to be made equal: an audit that waits for its boundary must not raise instead."""
        if self._waiting is not None:
            self._waiting.policy = _without_raising(self._waiting.policy)

    def made_equal(self, step: int) -> None:
        """All workers' whole states were made equal at this step, and proven so."""
        self._findings.equal_at(step, self._examiner.looks)

    def at_once(self, policy: str) -> UpdateRefused | None:
        """Audits where all workers stand; gives the reason when it could not be done.

        Should the outcome be to raise, their training threads do, out of the pause in which they stand.
        """
        try:
            audit, _ = self._begin(checked_policy(policy))
        except UpdateRefused as error:
            return error
        return self._carry_out(audit)

    def _begin(self, policy: Policy) -> tuple[Audit, int]:
        self._raised = False
        round_, step = self._rounds.stop_all()
        self._channel.append(Examine(round_, step))
        return Audit(round_, policy), step

    def _carry_out(self, audit: Audit) -> UpdateRefused | None:
        """All that happens at the boundary. Whatever becomes of it, the workers go on."""
        # Not before: who asks while an audit waits for its boundary is answered by that one.
        audit.requests = self._examiner.requests()
        try:
            self._conclude(audit, self._find_out(audit))
        except UpdateRefused as error:
            self._channel.append(Free(audit.round))
            return error
        finally:
            self._drop(audit.lent)
            for key in audit.said:
                self._channel.forget_said(key)
        return None

    def _find_out(self, audit: Audit) -> AuditReport:
        step, schema = self._member.gate.step, self._member.state.schema
        seen = self._collect(audit, "examined")
        if all(one.to_be_equal for one in seen.values()):  # before the coordinator has heard that they do
            audit.policy = _without_raising(audit.policy)
        differences, declared = self._compare(seen)
        report = replace(self._findings.report(schema, step, seen, declared), requests=audit.requests)
        if not differences:
            self._findings.equal_at(step, self._examiner.looks)
            return report
        report = replace(report, found_at=self._findings.found(step), outcome=OUTCOMES[audit.policy])
        try:
            self._borrow(audit, differences)
        except UpdateRefused as error:
            logger.warning("how far the replicas are apart cannot be found out: %s", error)
            return replace(report, differences=tuple(differences), outcome=_without_healing(audit.policy))
        report = replace(report, differences=self._weigh(audit, differences))
        if audit.policy != "heal":
            return report
        if len({one.trained for one in seen.values()}) > 1:
            counted = ", ".join(f"worker {rank}: {one.trained}" for rank, one in seen.items())
            logger.error("the workers have not trained equally far (transfers so far: %s)", counted)
            return replace(report, outcome="raised")
        return self._heal(audit, report)

    def _compare(self, seen: dict[int, Examined]) -> tuple[list[Difference], tuple[Declared, ...]]:
        groups = groups_of({rank: one.digests for rank, one in seen.items()}, self._names)
        may_differ = self._examiner.declared
        declared = tuple(Declared(name, name in groups) for name in self._names if name in may_differ)
        differences = []
        for name, of in groups.items():
            if name not in may_differ:
                reference, rule = reference_of(of, partial(self._examiner.expected, name))
                differences.append(Difference(name, reference_first(of, reference), reference, rule, {}))
        return differences, declared

    def _borrow(self, audit: Audit, differences: list[Difference]) -> None:
        """Has all workers stage the values that count, one update for each worker that lends."""
        for source in sorted({one.reference for one in differences}):
            mine = [one for one in differences if one.reference == source]
            id_ = f"heal-{self._rounds.sequence + 1}-from-worker-{source}"
            variables = [one.variable for one in mine]
            self._channel.append(Lend(audit.round, source, id_, variables, _note(mine)))
            lent = self._collect(audit, "lent", [source])[source]
            if lent.error is not None:
                raise UpdateRefused.from_json(lent.error)
            proposal = Proposal(id_, id_, 0, "", time.time(), parcel=lent.parcel, source=source)
            audit.lent.append(proposal)
            self._rounds.fetch(proposal)

    def _weigh(self, audit: Audit, differences: list[Difference]) -> tuple[Difference, ...]:
        ids = [proposal.id for proposal in audit.lent]
        differing = {one.variable: list(one.minority) for one in differences}
        self._channel.append(Weigh(audit.round, ids, differing))
        weighed = self._collect(audit, "weighed")
        return tuple(
            replace(
                one,
                differing={
                    rank: Deviation.from_json(weighed[rank].found[one.variable]) for rank in one.minority
                },
            )
            for one in differences
        )

    def _heal(self, audit: Audit, report: AuditReport) -> AuditReport:
        """Commits what was lent, where all stand, and looks once more."""
        ready = []
        try:
            for proposal in audit.lent:
                ready.append(self._rounds.keep(proposal))
            again = self._rounds.hold_here()
        except UpdateRefused as error:
            self._rounds.discard(ready, error)
            logger.error("the replicas cannot be healed: %s", error)
            return replace(report, outcome="raised")
        before = self._rounds.sequence
        refused = self._rounds.commit_here(audit.round, ready)
        audit.lent = [proposal for proposal, _ in refused]
        audit.round = again
        self._channel.append(Examine(again, report.step))
        differences, _ = self._compare(self._collect(audit, "examined"))
        healed = tuple(range(before + 1, self._rounds.sequence + 1))
        for _, reason in refused:
            logger.error("the replicas cannot be healed: %s", reason)
        if refused or differences:
            return replace(report, outcome="raised", healed=healed)
        self._findings.equal_at(report.step, self._examiner.looks)
        return replace(report, healed=healed)

    def _conclude(self, audit: Audit, report: AuditReport) -> None:
        """Writes the report down, then tells it: a training thread that raises may end the process."""
        log = logger.debug if report.equal else logger.warning
        log("%s", "\n".join(report.lines()))
        self._examiner.on_report(report)
        self._raised = report.outcome == "raised"
        if self._raised:
            self._condemn(audit, report)
        self._channel.append(Audited(audit.round, report.to_json(), self._raised))

    def _condemn(self, audit: Audit, report: AuditReport) -> None:
        """Lets nobody raise before all training threads have what they are to raise."""
        self._channel.append(Examine(audit.round, report.step, report.to_json()))
        try:
            said = self._collect(audit, "condemned", timeout_secs=self._member.patience.answer_secs)
        except UpdateRefused as error:
            logger.warning("not every worker may raise what the audit found: %s", error)
        else:
            self._on_raise({rank: one.pause for rank, one in said.items()})

    def _drop(self, lent: Iterable[Proposal]) -> None:
        nobody = UpdateRefused("It was lent for an audit").to_json()
        for proposal in lent:
            self._channel.append(Drop(proposal.id, proposal.content_digest, [], nobody))

    def _collect(
        self,
        audit: Audit,
        what: str,
        workers: Iterable[int] | None = None,
        timeout_secs: float | None = None,
    ) -> dict[int, Any]:
        """What these workers say in the round. Blocks at most as long as a function may take, if not told.

        Raises:
            UpdateRefused: One did not in time, and is named.
        """
        timeout_secs = self._member.patience.compute_secs if timeout_secs is None else timeout_secs
        ends = time.monotonic() + timeout_secs
        collected = {}
        for worker in range(self._channel.size) if workers is None else workers:
            key = round_key(audit.round, what, worker)
            audit.said.append(key)
            while (said := self._channel.said(key, LOOK_SECS / 10)) is None:
                if self._member.threads.stopping.is_set():
                    raise JobFailed("The job ended during an audit")
                if time.monotonic() > ends:
                    raise UpdateRefused(
                        f"Worker {worker} took no part in the audit within {timeout_secs:.0f} s",
                        worker=worker,
                        remedy="Look for the reason in its log",
                    )
                self._meanwhile()
            collected[worker] = said
        return collected


def _without_raising(policy: Policy) -> Policy:
    return "warn" if policy == "raise" else policy


def _without_healing(policy: Policy) -> Any:
    return OUTCOMES["raise" if policy == "heal" else policy]


def _note(differences: list[Difference]) -> str:
    """What is healed, in a line for the journal."""
    workers = sorted({rank for one in differences for rank in one.minority})
    names = ", ".join(one.variable for one in differences[:_MOST_NAMED])
    more = len(differences) - _MOST_NAMED
    unsure = "" if any(one.rule != "coordinator" for one in differences) else f" ({differences[0].why})"
    rest = f" and {more} more" if more > 0 else ""
    return f"heal: {workers_text(workers)} differed in {names}{rest}{unsure}"
