"""Audits of a running job: when they are made, which variables may differ, and where reports are written.

The training threads digest the state at the boundaries of the plan, and continue. Worker 0 compares. It
examines a difference at one of the next boundaries, where all workers stop (`core/operations/audit.py`).
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec.structs import replace

from replicast.core.events import Ended
from replicast.core.records import Refusal
from replicast.errors import ClusterError, ReplicasDiverged, ReplicastError
from replicast.files import RunDir
from replicast.replicas.session import Session
from replicast.storage.checkpoint_files import Manifest, saved_of
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.run_files import append_audit
from replicast.storage.updates import UpdateView, committed_updates, load_update
from replicast.update.audit_report import AuditReport, Policy, checked_policy
from replicast.update.edits import FLOAT_DTYPES, Array, apply_edit
from replicast.update.schema import Schema
from replicast.update.state import State

logger = logging.getLogger("replicast")

MOST_REPORTS = 1000
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """When replicas are compared, and what happens when they differ."""

    every: int | None = None
    policy: Policy = "raise"
    ends: bool = False

    def __post_init__(self) -> None:
        wrong = isinstance(self.every, bool) or not isinstance(self.every, int | None)
        if wrong or (self.every is not None and self.every < 1):
            raise ValueError(f"audit_every is a number of steps, or None. Received: {self.every!r}")
        checked_policy(self.policy)


class Audits:
    """One worker's audits. For its training thread, unless a method says otherwise."""

    def __init__(
        self,
        session: Session,
        schema: Schema,
        run_dir: RunDir | None,
        plan: AuditPlan,
        answer: Callable[[AuditReport], None] = lambda report: None,
    ) -> None:
        """`answer` tells those outside the job who have asked for an audit. On worker 0."""
        self._session = session
        self._schema = schema
        self._run_dir = run_dir
        self._usual = plan
        self._plan = plan
        self._audited_at = -1
        self._warned = False
        self._reports: deque[AuditReport] = deque(maxlen=MOST_REPORTS)
        self._adding = threading.Lock()
        self._answer = answer
        self.plan(plan)

    @property
    def reports(self) -> Sequence[AuditReport]:
        """The latest last. Any thread."""
        return tuple(self._reports)

    def plan(self, plan: AuditPlan) -> None:
        """Sets when to audit. All workers call it; blocks until they have."""
        may_differ = sorted(self._session.replica.may_differ)
        self._session.require_same_plan(
            "audits",
            json.dumps([plan.every, plan.policy, plan.ends, may_differ]),
            problem="Worker {} has other audit settings than",
            remedy="Pass the same audit_every, on_divergence and may_differ on all workers",
        )
        self._follow(plan)

    def after_step(self, steps: int) -> None:
        every, step = self._plan.every, self._session.step
        if every is not None and step // every > (step - steps) // every:
            self._audit_in_passing()

    def after_epoch(self) -> None:
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
        """Compares all replicas at this boundary. All workers call it."""
        policy = self._usual.policy if policy is None else checked_policy(policy)
        report = self._session.rest("audit", policy)
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

    def _follow(self, plan: AuditPlan) -> None:
        self._plan = plan
        self._session.set_audit_policy(plan.policy)

    def _audit_in_passing(self) -> None:
        if self._session.size > 1 and self._audited_at != self._session.step:
            self._audited_at = self._session.step
            seen = self._session.replica.examine_quietly()
            self._session.report(self._session.next_report("audit"), lambda: seen)

    def on_report(self, report: AuditReport, raises: bool) -> None:
        """Called for an audit for which all workers are stopped: records it before any worker raises."""
        added = self._add(report)
        if raises:
            self._session.raise_later(diverged(added, on_trial=self._session.replica.on_trial))

    def _add(self, found: AuditReport) -> AuditReport:
        """Once for each report, by the thread that has it first: on worker 0 a lane or training."""
        with self._adding:
            known = next((one for one in self._reports if one.number == found.number), None)
            if known is not None:
                return known
            nbytes = sum(variable.nbytes for variable in self._schema)
            report = replace(found, variables=len(self._schema), nbytes=nbytes)
            self._reports.append(report)
            if self._session.rank == 0:
                log = logger.debug if report.equal else logger.warning
                log("%s", "\n".join(report.lines()))
                self._write(report)
                self._answer(report)
            return report

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
    """The error for an audit that found a difference."""
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
    """The variables that may differ between workers."""
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


# The value of a variable according to checkpoint and journal: decides an audit without a majority.

MOST_BYTES = 2**30  # to read from the journal for one variable: all workers wait meanwhile


class _Basis(NamedTuple):
    """The last checkpoint, and the updates applied since then, in the journal's order."""

    last: Manifest
    since: Mapping[int, UpdateView]


class Expectation:
    """Computes values from the last checkpoint and the journal. On worker 0, while all workers are stopped.

    The result is right for a variable that training has not changed since the checkpoint: a frozen one, a
    learning rate, or any variable at the step of the checkpoint. For all others it matches no worker's
    value, and decides nothing.
    """

    def __init__(self, session: Session, state: State, run_dir: RunDir, *, durable: bool) -> None:
        self._session = session
        self._state = state
        self._run_dir = run_dir
        self._durable = durable
        self._store = CheckpointStore(run_dir)
        self._found_at: tuple[int, frozenset[int], int | None] | None = None
        self._found: _Basis | None = None

    def fingerprint(self, name: str) -> str | None:
        """The expected fingerprint of a variable; None if it is not known."""
        basis = self._basis()
        try:
            value = None if basis is None else self._value(name, basis)
        except (ReplicastError, OSError) as error:
            logger.warning("%s: no expected value can be read from checkpoint and journal: %s", name, error)
            return None
        return None if value is None else self._state.fingerprint_of(value)

    def _basis(self) -> _Basis | None:
        """Reads checkpoint and journal, once for all variables of an audit."""
        holds, checkpoints_changed_at = frozenset(self._session.replica.holds), None
        with contextlib.suppress(OSError):
            # Adding or removing a checkpoint is a rename in this directory.
            checkpoints_changed_at = self._store.directory.stat().st_mtime_ns
        # While these are the same, what was read before stays valid.
        place = self._session.step, holds, checkpoints_changed_at
        if place != self._found_at:
            self._found_at, self._found = place, None
            try:
                self._found = self._read(holds)
            except (ReplicastError, OSError) as error:
                logger.warning("expected values cannot be read from checkpoint and journal: %s", error)
        return self._found

    def _read(self, holds: frozenset[int]) -> _Basis | None:
        last = self._store.last()
        if last is None:
            return None
        sequences = holds - saved_of(last).holds
        if sequences and not self._durable:
            return None
        recorded = enumerate(committed_updates(self._run_dir) if sequences else [], 1)
        return _Basis(last, {sequence: one for sequence, one in recorded if sequence in sequences})

    def _value(self, name: str, basis: _Basis) -> Array | None:
        if name not in basis.last.schema:
            return None
        since = {
            sequence: one
            for sequence, one in basis.since.items()
            if any(edit["variable"] == name for edit in one.edits)
        }
        on_trial = any(one.trial is not None for one in since.values())  # it may have been reverted
        if on_trial or sum(one.nbytes or 0 for one in since.values()) > MOST_BYTES:
            return None
        with self._store.open(basis.last.step) as reader:
            value = reader.read(name)
            for sequence in since:
                for edit in load_update(self._run_dir, sequence).edits:
                    if edit.variable == name:
                        value = apply_edit(edit, value)
            return value
