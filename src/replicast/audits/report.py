"""Audit reports: which replicas differ, in which variables, by how much, and since when.

An audit compares the digests of every variable of the state between all workers, at one boundary. This module
holds the data and its text form; `replicast.audits.agreement` and `replicast.audits.distances` compute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from replicast.audits.agreement import Groups, Rule, groups_of, reference_first, reference_of
from replicast.audits.distances import Deviation, deviation
from replicast.strictjson import reading

__all__ = [
    "OUTCOMES",
    "AuditReport",
    "Declared",
    "Deviation",
    "Difference",
    "Groups",
    "Outcome",
    "Policy",
    "Rule",
    "checked_policy",
    "deviation",
    "groups_of",
    "reference_first",
    "reference_of",
    "what_follows",
    "workers_text",
]

Policy: TypeAlias = Literal["raise", "heal", "warn"]
"""What to do when replicas differ."""
Outcome: TypeAlias = Literal["equal", "warned", "raised", "healed"]
"""How an audit ended."""
OUTCOMES: Mapping[Policy, Outcome] = MappingProxyType({"raise": "raised", "heal": "healed", "warn": "warned"})
"""The outcome of an audit that found a difference, by its policy."""


def checked_policy(policy: str) -> Policy:
    """Returns the policy after checking it.

    Raises:
        ValueError: There is no such policy.
    """
    if policy not in get_args(Policy):
        raise ValueError(f'on_divergence must be "raise", "heal" or "warn". Received: {policy!r}')
    return cast("Policy", policy)


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable that is not the same on all workers.

    Attributes:
        variable: Its full name.
        groups: The workers with equal bits, the reference's group first.
        reference: The worker whose value is the reference.
        rule: Why it is.
        differing: How far each worker outside the reference's group is from it, by rank.
    """

    variable: str
    groups: tuple[tuple[int, ...], ...]
    reference: int
    rule: str
    differing: Mapping[int, Deviation]

    @property
    def minority(self) -> tuple[int, ...]:
        """The workers outside the reference's group."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    @property
    def why(self) -> str:
        """Why the reference was chosen, in words. Without a majority no worker is known to be wrong."""
        if self.rule == "coordinator":
            return f"no majority: worker {self.reference}'s value counts"
        return self.rule

    def __str__(self) -> str:
        rest = workers_text(self.groups[0]) if self.groups else workers_text([self.reference])
        differ = "differs" if len(self.minority) == 1 else "differ"
        return f"{self.variable}: {workers_text(self.minority)} {differ} from {rest} ({self.why})"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ranks that are keys become strings, as JSON requires."""
        return {
            "variable": self.variable,
            "groups": [list(group) for group in self.groups],
            "reference": self.reference,
            "rule": self.rule,
            "differing": {str(rank): found.to_json() for rank, found in self.differing.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Difference:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a difference.
        """
        with reading("difference", fields):
            return cls(
                variable=str(fields["variable"]),
                groups=tuple(tuple(int(rank) for rank in group) for group in fields["groups"]),
                reference=int(fields["reference"]),
                rule=str(fields["rule"]),
                differing={
                    int(rank): Deviation.from_json(found) for rank, found in fields["differing"].items()
                },
            )


@dataclass(frozen=True, slots=True)
class Declared:
    """A variable that is declared as allowed to differ between workers.

    Attributes:
        variable: Its full name.
        differs: Whether it does.
    """

    variable: str
    differs: bool


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What one audit found and did. The same on every worker.

    Attributes:
        number: The number of the audit in this attempt, from 1.
        step: The boundary at which the replicas were compared.
        time: When, in seconds since 1970.
        workers: The number of workers.
        variables: The number of variables compared.
        nbytes: Their size on one worker.
        found_at: The step at which the replicas were first seen to differ; `step` if they are equal.
        last_equal: The step of the last earlier audit that found them equal, if any.
        differences: The variables that differ and must not.
        declared: The variables that may differ, and whether they do.
        outcome: What was done.
        healed: The sequence numbers of the updates that made the replicas equal again.
        digest_secs: How long the slowest worker took to digest its state.
        requests: The ids of the requests for this audit from outside of the job.
        attempt: The attempt in which it ran; numbers start again with each. Set for reports from a run
            directory.
    """

    number: int
    step: int
    time: float
    workers: int
    variables: int
    nbytes: int
    found_at: int
    last_equal: int | None
    differences: tuple[Difference, ...]
    declared: tuple[Declared, ...]
    outcome: Outcome
    healed: tuple[int, ...]
    digest_secs: float
    requests: tuple[str, ...]
    attempt: int | None = field(default=None, compare=False)

    @property
    def equal(self) -> bool:
        """Whether every variable was the same on all workers, to the last bit."""
        return not self.differences

    @property
    def alike(self) -> int:
        """The number of variables that were equal on all workers, without those that may differ and do."""
        return self.variables - len(self.differences) - sum(one.differs for one in self.declared)

    @property
    def diverged(self) -> bool:
        """Whether the replicas still differ: they were not equal and were not healed."""
        return not self.equal and self.outcome != "healed"

    @property
    def since(self) -> str:
        """Since when the replicas differ, in words; empty if they do not."""
        if self.equal:
            return ""
        if self.last_equal is None:
            return f"step {self.found_at} or before"
        if self.last_equal >= self.found_at:  # two audits at one boundary, and a change between them
            return f"step {self.found_at}, after the previous audit"
        first = self.last_equal + 1
        return f"step {first}" if first == self.found_at else f"some step from {first} to {self.found_at}"

    @property
    def done(self) -> str:
        """What was done, in words."""
        if self.outcome != "healed" or not self.healed:
            return self.outcome
        numbers = ", ".join(map(str, self.healed))
        return f"healed by {'update' if len(self.healed) == 1 else 'updates'} {numbers}"

    def __str__(self) -> str:
        head = f"audit {self.number} at step {self.step}"
        on = "on the only worker" if self.workers == 1 else f"on {self.workers} workers"
        if self.equal:
            free = self.variables - self.alike
            note = f"; {free} may differ and {'does' if free == 1 else 'do'}" if free else ""
            are = "variable is" if self.alike == 1 else "variables are"
            return f"{head}: {self.alike} {are} equal {on}{note}"
        first = self.differences[0]
        more = f" and {len(self.differences) - 1} more" if len(self.differences) > 1 else ""
        verb = "differs" if len(self.differences) == 1 else "differ"
        count = f"{len(self.differences)} of {self.variables} variables {verb} {on}"
        return f"{head}: {count} since {self.since} ({first}{more}); {self.done}"

    def lines(self) -> list[str]:
        """The report as text: one summary line, then one for every variable and worker that differs."""
        lines = [str(self)]
        for difference in self.differences:
            lines.append(f"  {difference}")
            for rank, found in sorted(difference.differing.items()):
                lines.append(f"    worker {rank}: {found}")
        for one in self.declared:
            lines.append(f"  {one.variable}: may differ, and {'does' if one.differs else 'is equal'}")
        return lines

    def table(self) -> str:
        """The differences as a table in plain text; the summary line if there are none."""
        if self.equal:
            return str(self)
        rows = [("variable", "worker", "elements", "first", "largest difference", "whose value counts")]
        for one in self.differences:
            counts = f"{workers_text(one.groups[0])} ({one.why.partition(':')[0]})"
            for rank in one.minority:
                found = one.differing.get(rank)
                cells = ("", "", "") if found is None else (found.share, found.place, found.largest)
                rows.append((one.variable, str(rank), *cells, counts))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ("  ".join(map(str.ljust, row, widths)) for row in rows)
        return "\n".join(line.rstrip() for line in padded)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, and whether the replicas were equal."""
        return {
            "number": self.number,
            "step": self.step,
            "time": self.time,
            "equal": self.equal,
            "outcome": self.outcome,
            "workers": self.workers,
            "variables": self.variables,
            "nbytes": self.nbytes,
            "found_at": self.found_at,
            "last_equal": self.last_equal,
            "differences": [one.to_json() for one in self.differences],
            "declared": [{"variable": one.variable, "differs": one.differs} for one in self.declared],
            "healed": list(self.healed),
            "digest_secs": self.digest_secs,
            "requests": list(self.requests),
            "attempt": self.attempt,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AuditReport:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a report.
        """
        with reading("audit", fields):
            if fields["outcome"] not in get_args(Outcome):
                raise ValueError(f"unknown outcome: {fields['outcome']!r}")
            last_equal, attempt = fields["last_equal"], fields.get("attempt")
            return cls(
                number=int(fields["number"]),
                step=int(fields["step"]),
                time=float(fields["time"]),
                workers=int(fields["workers"]),
                variables=int(fields["variables"]),
                nbytes=int(fields["nbytes"]),
                found_at=int(fields["found_at"]),
                last_equal=None if last_equal is None else int(last_equal),
                differences=tuple(Difference.from_json(one) for one in fields["differences"]),
                declared=tuple(
                    Declared(str(one["variable"]), bool(one["differs"])) for one in fields["declared"]
                ),
                outcome=fields["outcome"],
                healed=tuple(int(sequence) for sequence in fields["healed"]),
                digest_secs=float(fields["digest_secs"]),
                requests=tuple(str(request) for request in fields["requests"]),
                attempt=None if attempt is None else int(attempt),
            )


def what_follows(policy: Policy) -> str:
    """What happens next, or what to do, after a difference that was found outside of an audit."""
    if policy == "heal":
        return "An audit follows, which reports what differs and makes them equal"
    if policy == "warn":
        return "An audit follows, which reports what differs; replicas.sync(source=0) makes them equal"
    return "replicas.sync(source=0) makes them equal"


def workers_text(ranks: Iterable[int]) -> str:
    """Workers in words: "worker 1", "workers 0 and 2"."""
    named = [str(rank) for rank in ranks]
    if len(named) == 1:
        return f"worker {named[0]}"
    return f"workers {', '.join(named[:-1])} and {named[-1]}"
