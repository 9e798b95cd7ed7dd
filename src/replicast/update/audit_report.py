"""Audit reports: which replicas differ, in which variables, by how much, and since when.

An audit compares the digests of every variable of the state between all workers, at one boundary. This module
holds the data, its text form and the distances; `reference_value.py` chooses whose value is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from replicast.codec import Record
from replicast.strictjson import reading
from replicast.update.edits import FLOAT_DTYPES, Array
from replicast.update.update import factor_to_json

# The distance between two arrays: in bits, and in numbers.

_PIECE_BYTES = 2**20  # In float64 and with temporary arrays, a piece takes up to forty times its size.


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two arrays of the same shape and dtype."""

    differing: int = 0
    first: int | None = None
    one_is_nan: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def then(self, other: Distance, start: int) -> Distance:
        """Combines the distance so far with that of the next piece, which starts at index `start`."""
        if other.first is None:
            return self
        return Distance(
            self.differing + other.differing,
            start + other.first if self.first is None else self.first,
            self.one_is_nan + other.one_is_nan,
            max(self.absolute, other.absolute),
            max(self.relative, other.relative),
        )


class Deviation(Record):
    """How far one worker's value of a variable is from the reference worker's."""

    count: int
    of: int
    largest_absolute: float
    largest_relative: float
    first_index: tuple[int, ...] | None
    one_is_nan: int = 0

    @property
    def share(self) -> str:
        """How many elements differ, in words."""
        return f"{self.count} of {self.of}"

    @property
    def place(self) -> str:
        """The index of the first differing element; empty for a scalar."""
        return str(list(self.first_index)) if self.first_index else ""

    @property
    def largest(self) -> str:
        """The largest difference, in words."""
        nans = f"{self.one_is_nan} NaN on one side only" if self.one_is_nan else ""
        if self.largest_absolute == 0:  # zeros of opposite sign, NaNs with different payloads
            return nans or "equal values, different bits"
        numbers = f"{self.largest_absolute:.4g} ({self.largest_relative:.4g} relative)"
        return f"{numbers}, {nans}" if nans else numbers

    def __str__(self) -> str:
        elements = f"{self.share} elements" if self.of != 1 else "its only element"
        where = f", first at {self.place}" if self.place else ""
        if self.largest_absolute == 0 and not self.one_is_nan and self.count:
            return f"{elements}{where}; the values are equal, the bits differ"
        return f"{elements}{where}, {'by at most ' if self.largest_absolute else ''}{self.largest}"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "count": self.count,
            "of": self.of,
            "largest_absolute": factor_to_json(self.largest_absolute),
            "largest_relative": factor_to_json(self.largest_relative),
            "first_index": None if self.first_index is None else list(self.first_index),
            "one_is_nan": self.one_is_nan,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Deviation:
        """Reads what `to_json` wrote."""
        with reading("deviation", fields):
            index = fields["first_index"]
            return cls(
                count=int(fields["count"]),
                of=int(fields["of"]),
                largest_absolute=float(fields["largest_absolute"]),
                largest_relative=float(fields["largest_relative"]),
                first_index=None if index is None else tuple(int(place) for place in index),
                one_is_nan=int(fields["one_is_nan"]),
            )


def distance(left: Array, right: Array) -> Distance:
    """Compares two arrays of the same shape and dtype, piece by piece."""
    left, right = (np.ascontiguousarray(side).reshape(-1) for side in (left, right))
    length = _PIECE_BYTES // left.dtype.itemsize
    found = Distance()
    for start in range(0, left.size, length):
        found = found.then(_of_piece(left[start : start + length], right[start : start + length]), start)
    return found


def deviation(mine: Array, reference: Array) -> Deviation:
    """Compares a value of any dtype with the reference, in bits and in numbers."""
    if (mine.shape, mine.dtype) != (reference.shape, reference.dtype):
        raise ValueError(
            f"Only values of the same shape and dtype can be compared, here {reference.dtype} "
            f"{reference.shape}. Received: {mine.dtype} {mine.shape}"
        )
    found = distance(mine, reference)
    index = None
    if found.first is not None:
        index = tuple(int(place) for place in np.unravel_index(found.first, mine.shape))
    return Deviation(found.differing, mine.size, found.absolute, found.relative, index, found.one_is_nan)


def _of_piece(left: Array, right: Array) -> Distance:
    bits = np.dtype(f"u{left.dtype.itemsize}")
    where = left.view(bits) != right.view(bits)
    if not where.any():
        return Distance()
    numbers = _largest(left[where], right[where])
    return Distance(int(np.count_nonzero(where)), int(np.argmax(where)), *numbers)


def _largest(left: Array, right: Array) -> tuple[int, float, float]:
    """The number of elements that are NaN on one side only; the largest absolute and relative difference."""
    one_is_nan = 0
    with np.errstate(all="ignore"):
        if left.dtype.name in FLOAT_DTYPES:
            left, right = left.astype(np.float64), right.astype(np.float64)
            one_is_nan = int(np.count_nonzero(np.isnan(left) != np.isnan(right)))
            numbers = ~(np.isnan(left) | np.isnan(right))
            left, right = left[numbers], right[numbers]
            absolute = np.abs(left - right)
        else:
            # The difference of integers may wrap around; as an unsigned integer it is right.
            unsigned = np.dtype(f"u{left.dtype.itemsize}")
            forth, back = (
                pair[0].view(unsigned) - pair[1].view(unsigned) for pair in ((left, right), (right, left))
            )
            absolute = np.where(left > right, forth, back).astype(np.float64)
        if not absolute.size:
            return one_is_nan, 0.0, 0.0
        larger = np.maximum(np.abs(left.astype(np.float64)), np.abs(right.astype(np.float64)))
        relative = np.where(np.isinf(absolute), np.inf, absolute / np.where(larger == 0, 1.0, larger))
    return one_is_nan, float(absolute.max()), float(relative.max())


Policy: TypeAlias = Literal["raise", "heal", "warn"]
"""What to do when replicas differ."""
Outcome: TypeAlias = Literal["equal", "warned", "raised", "healed"]
"""How an audit ended."""
OUTCOMES: Mapping[Policy, Outcome] = MappingProxyType({"raise": "raised", "heal": "healed", "warn": "warned"})
"""The outcome of an audit that found a difference, by its policy."""


def checked_policy(policy: str) -> Policy:
    """Returns the policy after checking it."""
    if policy not in get_args(Policy):
        raise ValueError(f'on_divergence must be "raise", "heal" or "warn". Received: {policy!r}')
    return cast("Policy", policy)


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable that is not the same on all workers."""

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
        """Reads what `to_json` wrote."""
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
    """A variable that is declared as allowed to differ between workers."""

    variable: str
    differs: bool


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What one audit found and did. The same on every worker."""

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
        """Reads what `to_json` wrote."""
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
