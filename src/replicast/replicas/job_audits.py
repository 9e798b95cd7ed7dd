"""Audits of a running job: when they are made, which variables may differ, and where reports are written.

The training threads digest the state at the boundaries of the plan, and continue. Worker 0 compares. It
examines a difference at one of the next boundaries, where all workers stop (`core/operations/audit.py`).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from msgspec.structs import replace

from replicast.coordination import DirectExchange
from replicast.core.messages import Ended, Refusal
from replicast.errors import ClusterError, ReplicasDiverged, ReplicastError, logger
from replicast.files import RunDir
from replicast.replicas.replica import joined
from replicast.replicas.session import Session
from replicast.storage.checkpoints import CheckpointStore, saved_of
from replicast.storage.journal import committed_updates, load_update
from replicast.storage.run_files import append_audit
from replicast.training import TensorFlowState
from replicast.update.audit_report import AuditReport, Policy, agree, checked_policy, groups_of, seats_text
from replicast.update.digest import digest_array
from replicast.update.edits import FLOAT_DTYPES, apply_edit
from replicast.update.schema import Schema

MOST_REPORTS = 1000
MOST_BYTES = 2**30  # to read from the journal for one variable: all workers wait meanwhile
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class AuditPlan:
    every: int | None = None
    policy: Policy = "raise"
    ends: bool = False

    def __post_init__(self) -> None:
        wrong = isinstance(self.every, bool) or not isinstance(self.every, int | None)
        if wrong or (self.every is not None and self.every < 1):
            raise ValueError(f"audit_every is a number of steps, or None. Received: {self.every!r}")
        checked_policy(self.policy)


@dataclass(eq=False, repr=False)
class Audits:
    """One worker's audits. For its training thread, unless a method says otherwise."""

    session: Session
    run_dir: RunDir | None
    usual: AuditPlan
    answer: Callable[[AuditReport], None] = lambda report: None  # worker 0: tells those who have asked

    def __post_init__(self) -> None:
        self._audited_at = -1
        self._turns: itertools.count[int] | None = None
        self._warned = False
        self._reports: deque[AuditReport] = deque(maxlen=MOST_REPORTS)
        self._adding = threading.Lock()
        self.plan(self.usual)

    @property
    def reports(self) -> Sequence[AuditReport]:
        """The latest last. Any thread."""
        return tuple(self._reports)

    def plan(self, plan: AuditPlan) -> None:
        """Sets when to audit. All workers call it; blocks until they have."""
        may_differ = sorted(self.session.replica.may_differ)
        self.session.require_same_plan(
            "audits",
            json.dumps([plan.every, plan.policy, plan.ends, may_differ]),
            problem="Worker {} has different audit settings than",
            remedy="Pass the same audit_every, on_divergence and may_differ on all workers",
        )
        self.follow(plan)

    def follow(self, plan: AuditPlan) -> None:
        self._plan = plan
        self.session.set_audit_policy(plan.policy)

    def after_step(self, steps: int) -> None:
        every, step = self._plan.every, self.session.step
        if every is not None and step // every > (step - steps) // every:
            self._audit_in_passing()

    def after_epoch(self) -> None:
        if self._plan.ends and self._plan.every is not None:
            self._audit_in_passing()

    def after_training(self) -> None:
        """Compares everything, also where an audit was made: callbacks may have changed the state since."""
        self._audited_at = -1
        if self._plan.ends and self._plan.every is not None:
            self._audit_in_passing(whole=True)

    def audit(self, policy: Policy | None) -> AuditReport:
        policy = self.usual.policy if policy is None else checked_policy(policy)
        report = self.session.rest("audit", policy)
        if isinstance(report, Refusal):
            raise ClusterError(f"The audit could not be carried out: {report.problem}")
        return self._add(report)

    def on_ended(self, ended: Ended) -> None:
        """Worker 0, in the lane "release": an audit is over."""
        result = ended.outcome.result
        if isinstance(result, AuditReport):
            self._add(result)
        elif isinstance(result, Refusal):
            logger.warning("an audit could not be carried out: %s", result.problem)

    def _audit_in_passing(self, *, whole: bool = False) -> None:
        several = self.session.size > 1 or self.session.state.devices
        if several and self._audited_at != self.session.step:
            self._audited_at = self.session.step
            # The number of steps is the same on all workers, and goes on after a restart. From there audits
            # are counted: they may be several times `every` steps apart, or fewer.
            self._turns = self._turns or itertools.count(self.session.step // (self._plan.every or 1))
            seen = self.session.replica.examine_quietly(None if whole else next(self._turns))
            self.session.report(self.session.next_report("audit"), lambda: seen)

    def on_report(self, report: AuditReport, raises: bool) -> None:
        """Called for an audit for which all workers are stopped: records it before any worker raises."""
        added = self._add(report)
        if raises:
            self.session.raise_later(diverged(added, on_trial=self.session.replica.on_trial))

    def _add(self, found: AuditReport) -> AuditReport:
        """Once for each report, by the thread that has it first: on worker 0 a lane or training."""
        with self._adding:
            known = next((one for one in self._reports if one.number == found.number), None)
            if known is not None:
                return known
            schema, attempt = self.session.state.schema, self.session.attempt
            nbytes = sum(variable.nbytes for variable in schema)
            # The numbers of audits start over with each attempt.
            report = replace(found, variables=len(schema), nbytes=nbytes, attempt=attempt)
            self._reports.append(report)
            if self.session.rank == 0:
                log = logger.debug if report.equal else logger.warning
                log("%s", "\n".join(report.lines()))
                try:
                    if self.run_dir is not None:
                        append_audit(self.run_dir, report)
                except OSError as error:
                    if not self._warned:
                        self._warned = True
                        logger.warning("audit reports cannot be written: %s", error)
                self.answer(report)
            return report


def diverged(report: AuditReport, *, on_trial: bool = False) -> ReplicasDiverged:
    named = "; ".join(map(str, report.differences[:_MOST_NAMED]))
    more = len(report.differences) - _MOST_NAMED
    rest = f"; and {more} more" if more > 0 else ""
    also = f"; replicas.sync(source={report.differences[0].reference}) makes them equal"
    if on_trial:
        also += " after the current trial; until then it is refused"
    return ReplicasDiverged(
        f"At step {report.step} the replicas are not equal in {len(report.differences)} of "
        f"{report.variables} variables, since {report.since}: {named}{rest}. "
        f'on_divergence="heal" repairs this automatically, unless the log of worker 0 says why not{also}.',
        worker=report.differences[0].minority[0],
        step=report.step,
    )


def compare_at_start(
    exchange: DirectExchange, state: TensorFlowState, may_differ: AbstractSet[str], secs: float
) -> None:
    """All workers compare their state, before anything is decided. Worker 0 names what differs.

    It is no error: a script may load weights on one worker, and call `sync` or `restore` next.
    """
    strict = [one.name for one in state.schema if one.name not in may_differ]
    digests = state.digests(strict)
    if agree(exchange.agree("state", joined(digests), secs).values()):
        return
    by_rank = exchange.agree("digests", json.dumps([digests, state.devices]), secs)
    each = {rank: json.loads(one) for rank, one in by_rank.items()}
    groups = groups_of(
        {rank: found for rank, (found, _) in each.items()}, {rank: at for rank, (_, at) in each.items()}
    )
    named = [
        f"{name} ({', '.join(f'{digest} on {seats_text(seats)}' for digest, seats in of.items())})"
        for name, of in list(groups.items())[:_MOST_NAMED]
    ]
    if exchange.rank == 0:
        logger.warning(
            "The replicas are not equal at the start, in %d of %d variables: %s. Call "
            "replicas.sync(source=0) or replicas.restore() before training, or name what may differ: "
            "Replicas(may_differ=...)",
            len(groups),
            len(strict),
            "; ".join(named),
        )


def declared(schema: Schema, patterns: Sequence[str], *, local_statistics: bool) -> frozenset[str]:
    found = schema.matching(patterns, "may_differ")
    if local_statistics:
        floats = (variable for variable in schema if variable.dtype in FLOAT_DTYPES)
        found.update(variable.name for variable in floats if variable.kind == "non_trainable")
    return frozenset(found)


def expected_digests(
    run_dir: RunDir, holds: AbstractSet[int], names: Sequence[str], *, durable: bool
) -> dict[str, str]:
    """The values according to the last checkpoint and the journal: they decide an audit without a majority.

    On worker 0, while all workers are stopped. The result is right for a variable that training has not
    changed since the checkpoint: a frozen one, a learning rate, or any variable at the step of the
    checkpoint. For all others it matches no worker's value, and decides nothing.
    """
    found: dict[str, str] = {}
    try:
        store = CheckpointStore(run_dir)
        last = store.last()
        sequences = set() if last is None else holds - saved_of(last).holds
        if last is None or (sequences and not durable):
            return found
        recorded = enumerate(committed_updates(run_dir) if sequences else [], 1)
        since = {sequence: one for sequence, one in recorded if sequence in sequences}
        edited = {sequence: {edit["variable"] for edit in one.edits} for sequence, one in since.items()}
        with store.open(last.step) as reader:
            for name in names:
                # Edits that the journal has lost may be of any variable.
                touching = [one for one, touched in edited.items() if name in touched or not touched]
                # One on trial may have been reverted.
                on_trial = any(since[one].trial is not None for one in touching)
                nbytes = sum(since[one].nbytes or 0 for one in touching)
                if name not in last.schema or on_trial or nbytes > MOST_BYTES:
                    continue
                value = reader.read(name)
                for sequence in touching:
                    for edit in load_update(run_dir, sequence).edits:
                        value = apply_edit(edit, value) if edit.variable == name else value
                found[name] = digest_array(value)
    except (ReplicastError, OSError) as error:
        logger.warning("expected values cannot be read from checkpoint and journal: %s", error)
    return found
