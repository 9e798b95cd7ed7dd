"""Audits: which replicas differ, in which variables, by how much, since when, and whose value counts. Pure.

An audit compares the digests of every variable of the state between all workers, at one boundary. Planned
audits must cost next to nothing, whatever the size of the model. Between two of them, training makes hundreds
of passes over a variable that it reads and writes as a whole, so one more does not count. A table of which
training touches a few rows has no such passes: each planned audit compares one slice of the tables, in turns
(`rows_in_turn`). A bit that flips in a row that nobody touches is found after `ComparedRows.audits` audits at
most. An audit that somebody asks for compares everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from msgspec import field

from replicast.codec import Record, described, fields_of

# Which workers agree on a variable, and which worker's value is the reference.
#
# A worker may have several replicas, each on its device. It reports one digest of a variable as long as they
# agree. If they differ, its digest is a list of theirs, in the order of its devices, with commas.

Rule: TypeAlias = Literal["majority", "checkpoint and journal", "coordinator"]  # why it is the reference
Seat: TypeAlias = tuple[int, str]  # a replica: its worker, and its device if the worker has several
Groups: TypeAlias = dict[str, tuple[Seat, ...]]  # of one variable: the replicas that have each digest


def agree(digests: Iterable[str]) -> bool:
    """Whether all replicas of all workers have the same bits, by the digest of each worker."""
    found = set(digests)
    return len(found) == 1 and "," not in found.pop()


def groups_of(
    digests: Mapping[int, Mapping[str, str]], devices: Mapping[int, Sequence[str]] | None = None
) -> dict[str, Groups]:
    """Groups the replicas by digest, for each variable on which not all agree."""
    found: dict[str, Groups] = {}
    for name in digests[0]:
        if agree(each[name] for each in digests.values()):
            continue
        groups: Groups = {}
        for rank in sorted(digests):
            own, parts = (devices or {}).get(rank) or ("",), digests[rank][name].split(",")
            for device, digest in zip(own, parts if len(parts) > 1 else parts * len(own), strict=True):
                groups[digest] = (*groups.get(digest, ()), (rank, device))
        found[name] = dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])))
    return found


def reference_of(groups: Groups, expected: str | None) -> tuple[Seat, Rule]:
    """Chooses the replica whose value of a variable is the reference, and says why.

    The value of the strict majority. Without a majority, the value with the expected digest; otherwise that
    of the coordinator, worker 0, which is always among the workers.
    """
    replicas = sum(len(seats) for seats in groups.values())
    for seats in groups.values():
        if 2 * len(seats) > replicas:
            return seats[0], "majority"
    if expected is not None and expected in groups:
        return groups[expected][0], "checkpoint and journal"
    return min(seats[0] for seats in groups.values()), "coordinator"


def difference_of(variable: str, of: Groups, expected: str | None) -> Difference:
    """The difference between the replicas in one variable. A worker with one that differs does."""
    reference, rule = reference_of(of, expected)
    ours = next(seats for seats in of.values() if reference in seats)
    rest = {digest: seats for digest, seats in of.items() if seats is not ours}
    wrong = {rank for seats in rest.values() for rank, _ in seats}
    right = tuple(dict.fromkeys(rank for rank, _ in ours if rank not in wrong)) or (reference[0],)
    devices: dict[int, tuple[str, ...]] = {}
    for rank, device in sorted(seat for seats in rest.values() for seat in seats):
        if device:
            devices[rank] = (*devices.get(rank, ()), device)
    others = tuple(tuple(dict.fromkeys(rank for rank, _ in seats)) for seats in rest.values())
    return Difference(variable, (right, *others), reference[0], rule, devices=devices, device=reference[1])


# The report.


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

    def __str__(self) -> str:
        elements = f"{self.share} elements" if self.of != 1 else "its only element"
        where = f", first at {list(self.first_index)}" if self.first_index else ""
        if self.largest_absolute == 0 and not self.one_is_nan:  # zeros of opposite sign, NaNs with other bits
            return f"{elements}{where}; the values are equal, the bits differ"
        said = []
        if self.largest_absolute:
            said.append(f"by at most {self.largest_absolute:.4g} ({self.largest_relative:.4g} relative)")
        if self.one_is_nan:
            said.append(f"{self.one_is_nan} NaN on one side only")
        return f"{elements}{where}, {', '.join(said)}"


Policy: TypeAlias = Literal["raise", "heal", "warn"]  # what to do when replicas differ
AuditOutcome: TypeAlias = Literal["equal", "warned", "raised", "healed"]


def checked_policy(policy: str) -> Policy:
    if policy not in get_args(Policy):
        raise ValueError(f'on_divergence must be "raise", "heal" or "warn". Received: {policy!r}')
    return cast("Policy", policy)


class Difference(Record):
    """A variable that is not the same on all workers."""

    variable: str
    groups: tuple[tuple[int, ...], ...]  # the reference's first
    reference: int
    rule: str
    differing: Mapping[int, Deviation] = field(default_factory=dict)
    # If workers have several replicas: the devices that differ, by worker, and the device of the reference.
    devices: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    device: str = ""

    @property
    def minority(self) -> tuple[int, ...]:
        """The workers outside the reference's group."""
        return tuple(sorted({rank for group in self.groups[1:] for rank in group}))

    def named(self, rank: int) -> str:
        """A worker outside the reference's group, with its devices that differ if it has several."""
        return f"{rank} ({', '.join(self.devices[rank])})" if rank in self.devices else str(rank)

    @property
    def why(self) -> str:
        """Why the reference was chosen, in words. Without a majority no worker is known to be wrong."""
        if self.rule == "coordinator":
            return f"no majority: worker {self.reference}'s value counts"
        return self.rule

    def __str__(self) -> str:
        rest = workers_text(self.groups[0]) if self.groups else workers_text([self.reference])
        differ = "differs" if len(self.minority) == 1 else "differ"
        who = workers_text(map(self.named, self.minority))
        return f"{self.variable}: {who} {differ} from {rest} ({self.why})"


SLICE_BYTES = 2**21  # of tables, in one audit: reading and hashing them takes less than 1 ms


class ComparedRows(Record):
    """Which rows of a table one audit has compared, from `start` to before `stop`."""

    variable: str
    start: int
    stop: int
    rows: int
    audits: int  # that it takes until every row of all tables was compared

    def __str__(self) -> str:
        compared = f"rows {self.start:,}:{self.stop:,} of {self.rows:,}" if self.stop else "no row this time"
        return f"{self.variable}: {compared}; all rows are compared every {self.audits:,} audits"


def rows_in_turn(tables: Mapping[str, tuple[int, int]], turn: int) -> tuple[ComparedRows, ...]:
    """Of tables with so many rows and bytes, the rows that this audit compares: one slice of one of them."""
    in_slice = {name: max(1, SLICE_BYTES * rows // nbytes) for name, (rows, nbytes) in tables.items()}
    slices = {name: -(-rows // in_slice[name]) for name, (rows, _) in tables.items()}
    audits = sum(slices.values())
    place = turn % audits if audits else 0
    found = []
    for name, (rows, _) in tables.items():
        start, stop = place * in_slice[name], (place + 1) * in_slice[name]
        ours = 0 <= place < slices[name]
        found.append(ComparedRows(name, start if ours else 0, min(stop, rows) if ours else 0, rows, audits))
        place -= slices[name]
    return tuple(found)


class Declared(Record):
    """A variable that is declared as allowed to differ between workers."""

    variable: str
    differs: bool


class AuditReport(Record):
    """What one audit found and did. The same on every worker.

    Attributes:
        number: Its number in this attempt.
        step: The boundary at which the replicas were compared.
        time: When, in seconds since 1970.
        found_at: The step of the first audit that found this difference.
        last_equal: The step of the last audit in which all replicas were equal.
        outcome: "equal", or what was done about a difference.
        differences: The variables that differ: on which workers, whose value counts and why, and by how much.
        declared: The variables that may differ.
        healed: The numbers of the updates that have healed them.
        digest_secs: How long the slowest worker took to compute its digests.
        requests: The requests that it answers; empty for a planned one.
        workers: How many workers were compared.
        variables: How many variables.
        nbytes: Their size on each worker.
        attempt: The attempt of the job.
        partly: The rows that were compared of tables that were not compared as a whole.
    """

    number: int
    step: int
    time: float
    found_at: int
    last_equal: int | None = None
    outcome: AuditOutcome = "equal"
    differences: tuple[Difference, ...] = ()
    declared: tuple[Declared, ...] = ()
    healed: tuple[int, ...] = ()
    digest_secs: float = 0.0
    requests: tuple[str, ...] = ()
    workers: int = 0
    variables: int = 0
    nbytes: int = 0
    attempt: int | None = None
    partly: tuple[ComparedRows, ...] = ()

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
            if self.partly:
                note += f"; of {len(self.partly)} some rows were compared"
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
                lines.append(f"    worker {difference.named(rank)}: {found}")
        for one in self.declared:
            lines.append(f"  {one.variable}: may differ, and {'does' if one.differs else 'is equal'}")
        lines += [f"  {one}" for one in self.partly]
        return lines

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, and whether the replicas were equal. An infinite difference is text."""
        return fields_of(self) | {"equal": self.equal}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AuditReport:
        return described(cls, "audit", fields, strict=False)


def what_follows(policy: Policy) -> str:
    """What happens next, or what to do, after a difference that was found outside of an audit."""
    if policy == "heal":
        return "An audit follows, which reports what differs and makes them equal"
    if policy == "warn":
        return "An audit follows, which reports what differs; replicas.sync(source=0) makes them equal"
    return "replicas.sync(source=0) makes them equal"


def seats_text(seats: Sequence[Seat]) -> str:
    """Replicas in words: "worker 1", "workers 0 (GPU:1) and 2 (GPU:0)"."""
    return workers_text(f"{rank} ({device})" if device else rank for rank, device in seats)


def workers_text(ranks: Iterable[int | str]) -> str:
    """Workers in words: "worker 1", "workers 0 and 2"."""
    named = [str(rank) for rank in ranks]
    if len(named) == 1:
        return f"worker {named[0]}"
    return f"workers {', '.join(named[:-1])} and {named[-1]}"
