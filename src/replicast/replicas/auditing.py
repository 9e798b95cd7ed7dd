"""When a job is audited, which variables may differ, and where reports are written.

The training threads digest the state at the boundaries of the plan, and continue. Worker 0 compares. It
examines a difference at one of the next boundaries, where all workers stop (`core/operations/audit.py`).
"""

from __future__ import annotations

import difflib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from replicast.audits.report import AuditReport, Declared, Difference, Policy, checked_policy
from replicast.core.commands import Ended
from replicast.core.operations.audit import AuditResult
from replicast.core.refusal import Refusal
from replicast.errors import ClusterError, ReplicasDiverged
from replicast.files import RunDir
from replicast.runtime import Session
from replicast.storage.auditfiles import append_audit
from replicast.update.edits import FLOAT_DTYPES
from replicast.update.schema import Schema

logger = logging.getLogger("replicast")

MOST_REPORTS = 1000
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """When replicas are compared, and what happens when they differ.

    Attributes:
        every: The number of steps between audits; None for never.
        policy: What happens when they differ.
        ends: Whether to audit also at the end of every epoch and of the training.
    """

    every: int | None = None
    policy: Policy = "raise"
    ends: bool = False

    def __post_init__(self) -> None:
        wrong = isinstance(self.every, bool) or not isinstance(self.every, int | None)
        if wrong or (self.every is not None and self.every < 1):
            raise ValueError(f"audit_every is a number of steps, or None. Received: {self.every!r}")
        checked_policy(self.policy)


class Auditing:
    """One worker's audits. For its training thread, unless a method says otherwise.

    Args:
        session: This worker's part in the job.
        schema: The variables.
        run_dir: Where worker 0 writes reports, if there is a run directory.
        plan: When to audit, unless a training has its own plan. The same on all workers.

    Raises:
        ClusterError: The workers have different plans or different `may_differ`.
    """

    def __init__(self, session: Session, schema: Schema, run_dir: RunDir | None, plan: AuditPlan) -> None:
        self._session = session
        self._schema = schema
        self._run_dir = run_dir
        self._usual = plan
        self._plan = plan
        self._plans = 0
        self._audited_at = -1
        self._warned = False
        self._reports: deque[AuditReport] = deque(maxlen=MOST_REPORTS)
        self._adding = threading.Lock()
        self.answer: Callable[[AuditReport], None] = lambda report: None
        """Worker 0: answers those outside the job who have asked for it."""
        session.replica.on_report = self._on_report
        self.plan(plan)

    @property
    def reports(self) -> Sequence[AuditReport]:
        """The reports of all audits so far, the latest last. Any thread."""
        return tuple(self._reports)

    @property
    def policy(self) -> Policy:
        """What happens when replicas differ. Any thread."""
        return self._plan.policy

    def plan(self, plan: AuditPlan) -> None:
        """Sets when to audit. All workers call it; blocks until they have."""
        exchange, may_differ = self._session.exchange, sorted(self._session.replica.may_differ)
        self._plans += 1
        mine = json.dumps([plan.every, plan.policy, plan.ends, may_differ])
        said = exchange.agree(f"audits/{self._plans}", mine, self._session.timeouts.join_secs)
        for worker, theirs in said.items():
            if theirs != said[0]:
                raise ClusterError(
                    f"Worker {worker} has other audit settings than worker 0",
                    remedy="Pass the same audit_every, on_divergence and may_differ on all workers",
                    received=f"{theirs[:200]}, worker 0: {said[0][:200]}",
                )
        exchange.forget_agreed(f"audits/{self._plans - 1}")  # all workers here have read the previous one
        self._follow(plan)

    def after_step(self, steps: int) -> None:
        """Called at a boundary: audits if one is due."""
        every, step = self._plan.every, self._session.step
        if every is not None and step // every > (step - steps) // every:
            self._audit_in_passing()

    def after_epoch(self) -> None:
        """Called at the end of an epoch: audits if the plan says so."""
        if self._plan.ends and self._plan.every is not None:
            self._audit_in_passing()

    def after_training(self) -> None:
        """Called at the end of the training: audits once more if the plan says so.

        It does so even at a boundary that was already audited: callbacks may have changed the state since.
        """
        if self._plan.ends and self._plan.every is not None:
            self._audited_at = -1
            self._audit_in_passing()

    def training_ended(self) -> None:
        """Returns to the usual plan. Called on all workers."""
        self._follow(self._usual)

    def audit(self, policy: Policy | None) -> AuditReport:
        """Compares all replicas at this boundary. All workers call it.

        Raises:
            ReplicasDiverged: They differ, and the policy is to raise, or they could not be healed.
        """
        policy = self._usual.policy if policy is None else checked_policy(policy)
        report = self._session.rest("audit", policy)
        if isinstance(report, Refusal):
            raise ClusterError(f"The audit could not be carried out: {report.problem}")
        return self._add(report)

    def ended(self, ended: Ended) -> None:
        """Worker 0, in the lane "release": an audit is over."""
        result = ended.outcome.result
        if isinstance(result, AuditResult):
            self._add(result)
        elif isinstance(result, Refusal):
            logger.warning("an audit could not be carried out: %s", result.problem)

    def _follow(self, plan: AuditPlan) -> None:
        self._plan = plan
        self._session.set_audit_policy(plan.policy)

    def _audit_in_passing(self) -> None:
        alone = self._session.size == 1
        if not alone and self._audited_at != self._session.step:
            self._audited_at = self._session.step
            seen = self._session.replica.examine_quietly()
            self._session.report(self._session.next_report("audit"), lambda: seen)

    def _on_report(self, report: AuditResult, raises: bool) -> None:
        """Called for an audit for which all workers are stopped: records it before any worker raises."""
        added = self._add(report)
        if raises:
            self._session.raise_later(diverged(added, on_trial=self._session.replica.on_trial))

    def _add(self, found: AuditResult) -> AuditReport:
        """Once for each report, by the thread that has it first: on worker 0 a lane or training."""
        with self._adding:
            known = next((one for one in self._reports if one.number == found.number), None)
            if known is not None:
                return known
            report = self._public(found)
            self._reports.append(report)
            if self._session.rank == 0:
                log = logger.debug if report.equal else logger.warning
                log("%s", "\n".join(report.lines()))
                self._write(report)
                self.answer(report)
            return report

    def _public(self, found: AuditResult) -> AuditReport:
        return AuditReport(
            number=found.number,
            step=found.step,
            time=found.time,
            workers=self._session.size,
            variables=len(self._schema),
            nbytes=sum(variable.nbytes for variable in self._schema),
            found_at=found.found_at,
            last_equal=found.last_equal,
            differences=tuple(
                Difference(one.variable, one.groups, one.reference, one.rule, one.deviations)
                for one in found.differences
            ),
            declared=tuple(Declared(name, differs) for name, differs in found.free.items()),
            outcome=found.outcome,  # type: ignore[arg-type]
            healed=found.healed,
            digest_secs=found.digest_secs,
            requests=found.asked_by,
        )

    def _write(self, report: AuditReport) -> None:
        """Writes a report. A full disk does not stop the training."""
        try:
            if self._run_dir is not None:
                append_audit(self._run_dir, report)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("audit reports cannot be written: %s", error)


def diverged(report: AuditReport, *, on_trial: bool = False) -> ReplicasDiverged:
    """The error for an audit that found a difference.

    Args:
        report: The report.
        on_trial: Whether an update is on trial.
    """
    named = "; ".join(str(difference) for difference in report.differences[:_MOST_NAMED])
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


def declared(schema: Schema, patterns: Sequence[str], *, local_statistics: bool) -> frozenset[str]:
    """The variables that may differ between workers.

    Args:
        schema: All variables.
        patterns: Full names; "*" matches anything.
        local_statistics: Whether each worker keeps its own moving statistics.

    Raises:
        ValueError: A pattern matches no variable.
    """
    names = [variable.name for variable in schema]
    found = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"may_differ must match variables by their full names, such as {', '.join(near)}. "
                f"Received: {pattern!r}, which matches none"
            )
        found.update(matching)
    if local_statistics:
        floats = (variable for variable in schema if variable.dtype in FLOAT_DTYPES)
        found.update(variable.name for variable in floats if variable.kind == "non_trainable")
    return frozenset(found)
