"""When a job is audited, what may differ, and where it is written down.

The training threads digest the state at boundaries that the plan names, and go on. Worker 0 compares in the
background; a difference is looked into at one of the next boundaries, where all stand still
(`replicast.protocol.audits`).
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from replicast.audit import AuditReport, Policy, checked_policy
from replicast.auditfiles import append_audit, audit_requests
from replicast.edits import FLOAT_DTYPES
from replicast.errors import ClusterError
from replicast.protocol import Member
from replicast.protocol.examining import diverged
from replicast.schema import Schema

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """When replicas are compared, and what becomes of a difference.

    Attributes:
        every: After so many steps; None for never.
        policy: What becomes of a difference.
        ends: Whether also at the end of every epoch and of the training.
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
    """One worker's audits. For its training thread.

    Args:
        member: Its part in the protocol.
        run_dir: Where worker 0 writes what was found, if anywhere.
        plan: When audits are made, unless a training has a plan of its own. The same on all workers.

    Raises:
        ClusterError: The workers have different plans, or different variables may differ.
    """

    def __init__(self, member: Member, run_dir: Path | None, plan: AuditPlan) -> None:
        self._member = member
        self._run_dir = run_dir
        self._usual = plan
        self._plan = plan
        self._plans = 0
        self._looked_at = -1
        self._complained = False
        if member.channel.rank == 0 and run_dir is not None:
            member.examiner.on_report = self._write
            member.examiner.requests = self._requests
        self.plan(plan)

    @property
    def reports(self) -> Sequence[AuditReport]:
        """What audits have found so far, the latest last."""
        return tuple(self._member.examiner.reports)

    def plan(self, plan: AuditPlan) -> None:
        """Sets when audits are made. All workers call it; blocks until they have."""
        channel = self._member.channel
        mine = json.dumps([plan.every, plan.policy, plan.ends, sorted(self._member.examiner.declared)])
        self._plans += 1
        said = channel.agree(f"audits/{self._plans}", mine, self._member.patience.begin_secs)
        for worker, theirs in said.items():
            if theirs != said[0]:
                raise ClusterError(
                    f"Worker {worker} is to be audited otherwise than worker 0",
                    remedy="Give audit_every, on_divergence and may_differ alike on all workers",
                    received=f"{theirs[:200]}, worker 0: {said[0][:200]}",
                )
        channel.forget_agreed(f"audits/{self._plans - 1}")  # all have heard it who have come to this one
        self._follow(plan)

    def after_step(self, steps: int) -> None:
        """A boundary: looks if one is due."""
        every, step = self._plan.every, self._member.gate.step
        if every is not None and step // every > (step - steps) // every:
            self._look()

    def after_epoch(self) -> None:
        """The end of an epoch: looks if the plan says so."""
        if self._plan.ends and self._plan.every is not None:
            self._look()

    def after_training(self) -> None:
        """The end of the training: looks once more if the plan says so.

        Also at a boundary that was looked at: callbacks may have changed something since.
        """
        if self._plan.ends and self._plan.every is not None:
            self._looked_at = -1
            self._look()

    def training_ended(self) -> None:
        """The plan is the usual one again. All workers come here."""
        self._follow(self._usual)

    def audit(self, policy: Policy | None) -> AuditReport:
        """Compares all replicas where they are; all workers call it.

        Raises:
            ReplicasDiverged: They differ, and the policy is to raise, or they could not be healed.
        """
        policy = self._usual.policy if policy is None else checked_policy(policy)
        self._member.pause(f"audit\n{policy}")
        report = self._member.examiner.reports[-1]
        if report.outcome == "raised":
            raise diverged(report, self._member.gate.trial_ends)
        return report

    def _follow(self, plan: AuditPlan) -> None:
        self._plan = plan
        self._member.examiner.policy = plan.policy

    def _look(self) -> None:
        alone = self._member.channel.size == 1
        if not alone and self._looked_at != self._member.gate.step:
            self._looked_at = self._member.gate.step
            self._member.examiner.look()

    def _write(self, report: AuditReport) -> None:
        """In a background thread of worker 0. A disk that is full does not stop the training."""
        try:
            if self._run_dir is not None:
                append_audit(self._run_dir, report)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("what audits find cannot be written down: %s", error)

    def _requests(self) -> tuple[str, ...]:
        try:
            return () if self._run_dir is None else audit_requests(self._run_dir)
        except OSError:
            return ()


def declared(schema: Schema, patterns: Sequence[str], *, local_statistics: bool) -> frozenset[str]:
    """The variables that may differ between workers.

    Args:
        schema: All variables.
        patterns: Full names, in which "*" stands for anything.
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
