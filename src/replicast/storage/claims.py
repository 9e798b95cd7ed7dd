"""A group's claim on a run directory, and its log of what later attempts must know.

See `groups.py` for the files, and for why a group that was presumed dead cannot do harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replicast.errors import FileDamaged, JobFailed
from replicast.files import (
    RunDir,
    RunPath,
    below,
    make_durably,
    read_bytes,
    read_sealed,
    sync_directory,
    write_durably,
)
from replicast.processes import this_process
from replicast.strictjson import described, parse_object, sealed

# The groups of workers of a run directory, and which of their files count. For readers.
#
#     groups/000003/claim.json              which files of earlier groups count
#     groups/000003/run.json                the description of this group's job
#     groups/000003/000017.payload.json     an entry of its log (`storage/entry_files.py`)
#     groups/000003/000017.safetensors      the bytes of that payload
#     checkpoints/00001200-3/               a checkpoint that the third group has written
#
# Each attempt of a job is a new group, which writes only under its own names. A group that was presumed
# dead may still be running: the claim of the next group lists how many entries, and which checkpoints,
# existed when it took over, and readers ignore anything written later. A writer checks nothing before a
# write, so there is no race between a check and a write.
#
# A group claims in two steps (`fence.py`): it creates its directory, and only then counts what exists. A
# writer checks for a later directory after each write, before it acts on what it has written. So either it
# sees the later group, or the later group counts its write.

GROUPS, CLAIM, RELEASED = "groups", "claim.json", "ended"
_CLAIM_REMEDY = (
    "It says which entries and checkpoints count. Restore it from a backup, or copy a checkpoint to "
    "NEW/checkpoints/ and start the job in the new run directory NEW"
)
_ENTRY = re.compile(r"([0-9]{6,})\.([a-z]+)\.json")
_CHECKPOINT = re.compile(r"([0-9]{8,})(?:-([0-9]+)(?:-([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one group found when it took over a run directory."""

    group: int
    counted: tuple[tuple[int, int], ...]
    checkpoints: tuple[str, ...]
    attempt: int
    process: Mapping[str, Any]
    claimed_at: float
    run: str = ""
    previous: str = ""

    def counts(self, checkpoint: str) -> bool:
        """Whether a checkpoint of this name counts while this is the last claim."""
        group = checkpoint_parts(checkpoint)[1]
        return group in (0, self.group) or checkpoint in self.checkpoints

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Claim:
        """Parses the output of `to_json`."""
        return described(cls, "claim", fields)


def group_directory(run_dir: RunDir, group: int) -> RunPath:
    """Where a group writes."""
    return below(run_dir) / GROUPS / f"{group:06d}"


def group_numbers(run_dir: RunDir) -> list[int]:
    """The groups that have a directory, not a link, with or without a claim; the last one first."""
    try:
        names = [path.name for path in (below(run_dir) / GROUPS).iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    found = {int(name) for name in names if name.isascii() and name.isdigit() and f"{int(name):06d}" == name}
    return sorted(found, reverse=True)


def last_claim(run_dir: RunDir, before: int | None = None) -> Claim | None:
    """The last claim, which says what counts; with `before`, the last claim of an earlier group."""
    for group in group_numbers(run_dir):
        if before is not None and group >= before:
            continue
        path = group_directory(run_dir, group) / CLAIM
        if path.exists():
            return _read_claim(path, group)
        # A group without a claim died before it took over, or is about to take over: it has no entries.
        if entry_kinds(path.parent) and not path.exists():
            problem = "its group has written entries"
            raise FileDamaged(path, problem, verdict="is missing", remedy=_CLAIM_REMEDY)
    return None


def _read_claim(path: RunPath, group: int) -> Claim:
    try:
        claim = Claim.from_json(read_sealed(path))
        if claim.group != group:
            raise ValueError(f"it is the claim of another group. Received: {claim.group}")
    except (FileDamaged, ValueError) as error:
        problem = error.problem if isinstance(error, FileDamaged) else str(error)
        raise FileDamaged(path, problem, remedy=_CLAIM_REMEDY) from error
    return claim


def sees_group(run_dir: RunDir, identity: str) -> bool:
    """Whether this path leads to the directory in which a group has its claim.

    On another host it may lead to another directory, or nowhere. A shared file system may show a new file
    some seconds late.
    """
    number, _, run = identity.partition(" ")
    if not run:
        return False
    path = group_directory(run_dir, int(number)) / CLAIM
    try:
        return path.exists() and _read_claim(path, int(number)).run == run
    except (FileDamaged, OSError):
        return False


def entry_kinds(directory: RunPath) -> dict[int, str]:
    """The kind of each entry of a group's log, by number."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    matches = (_ENTRY.fullmatch(name) for name in names)
    return {int(match[1]): match[2] for match in matches if match is not None}


def entry_path(directory: RunPath, number: int, kind: str) -> RunPath:
    """The file of an entry."""
    return directory / f"{number:06d}.{kind}.json"


def checkpoint_name(step: int, group: int, count: int) -> str:
    """The name of a checkpoint: the step, the group, and how often the group has written this step."""
    if count > 1:
        return f"{step:08d}-{group}-{count}"
    return f"{step:08d}-{group}" if group else f"{step:08d}"  # Group 0: a copy or a patched checkpoint.


def checkpoint_parts(name: str) -> tuple[int, int, int]:
    """Step, group and count in the name of a checkpoint."""
    match = _CHECKPOINT.fullmatch(name)
    parts = (0, 0, 0) if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 1))
    if match is None or checkpoint_name(*parts) != name:
        raise ValueError(f"Not the name of a checkpoint. Received: {name}")
    return parts


# The chain of the journal: every entry contains the hash of the one before, so that a changed one shows.
#
#     claim of group 1 ◄── entry 1 ◄── entry 2 ◄── claim of group 2 ◄── entry 1 ◄── …
#
# A claim contains the hash of the last entry before it that counts; the first entry of a group contains the
# hash of its claim. The seal of an entry shows damage; the chain shows that an entry was replaced together
# with its seal.

_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Chain:
    """What the chain of a run shows."""

    length: int
    last: str
    problems: tuple[str, ...]


def read_chain(run_dir: RunDir) -> Chain:
    """Follows the chain through every record of the journal that counts. Reads all of them."""
    try:
        claim = last_claim(run_dir)
    except FileDamaged as error:
        return Chain(0, "", (str(error),))
    length, before, problems = 0, "", list[str]()
    for path, missing in [] if claim is None else _records(run_dir, claim):
        length += 1
        if missing:
            problems.append(missing)
            before = ""
            continue
        try:
            content = read_bytes(path, max_bytes=_MAX_BYTES, follow=False)
            previous = parse_object(bytes(content)).get("previous")
        except (FileDamaged, ValueError, OSError) as error:
            problems.append(f"{path}: {error}")
            before = ""
            continue
        if before and previous != before:
            problems.append(f"{path} does not follow the record before it: one of the two was changed")
        before = digest(content)
    return Chain(length, before, tuple(problems))


def last_digest(run_dir: RunDir, counted: Sequence[tuple[int, int]]) -> str:
    """The hash of the last of the entries that count; empty if there is none, or it cannot be read."""
    if not counted:
        return ""
    group, last = counted[-1]
    directory = group_directory(run_dir, group)
    try:
        path = entry_path(directory, last, entry_kinds(directory)[last])
        return digest(read_bytes(path, max_bytes=_MAX_BYTES, follow=False))
    except (FileDamaged, KeyError):
        return ""


def _records(run_dir: RunDir, claim: Claim) -> Iterator[tuple[RunPath, str]]:
    """The claims and entries that count, in order, each with what to say if it is missing, else nothing.

    A group without entries counts only if it is the last.
    """
    for group, most in [*claim.counted, (claim.group, sys.maxsize)]:
        directory = group_directory(run_dir, group)
        yield directory / CLAIM, ""
        kinds = entry_kinds(directory)
        for number in range(1, min(most, max(kinds, default=0)) + 1):
            if number in kinds:
                yield entry_path(directory, number, kinds[number]), ""
            else:
                yield directory, f"entry {number} of {directory.parent.name}/{directory.name} is missing"


def digest(content: bytes | memoryview) -> str:
    """The hash of a record's file."""
    return hashlib.sha256(content).hexdigest()


class Fence:
    """One group's claim on a run directory. Created by its worker 0, before it writes anything else.

    A job that runs there is ended by it: call `liveness.check_free` before.
    """

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = below(run_dir)
        self._entries = 0
        groups = self._run_dir / GROUPS
        make_durably(groups)
        with contextlib.suppress(PermissionError):  # Then this user did not create the run in it.
            # A launcher or a user may have created the run directory without syncing its parent.
            sync_directory(self._run_dir.as_path().resolve().parent)
        self.number = _next_number(self._run_dir)
        self.directory = group_directory(self._run_dir, self.number)
        sync_directory(groups)
        # Only now: an earlier group will not act on anything that it writes from here on.
        claim = _taken_over(self._run_dir, self.number, attempt)
        self.run = claim.run
        content = sealed(claim.to_json())
        self._previous = digest(content)
        try:
            write_durably(self.directory / CLAIM, [content])
        except OSError:
            self.check_not_taken_over()  # A later group removes unfinished files of earlier ones.
            raise
        self.check()

    def check(self) -> None:
        """Raises if another group has taken over the run. Call it after a write, before acting on it."""
        self.check_not_taken_over()
        if not (self.directory / CLAIM).exists():
            raise FileDamaged(self.directory / CLAIM, "it is missing")

    def check_not_taken_over(self) -> None:
        """Raises if another group has taken over the run, even after a write has failed."""
        if self.is_taken_over():
            raise JobFailed(
                f"Another group of workers{self._later()} has taken over {self._run_dir}; this one was "
                "presumed dead, and what it writes no longer counts"
            )

    def is_taken_over(self) -> bool:
        """Whether another group has taken over the run."""
        return group_directory(self._run_dir, self.number + 1).exists()

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Writes the next entry of this group's log, atomically and durably. Only for one thread."""
        number = self._entries + 1
        path = entry_path(self.directory, number, kind)
        place = {"group": self.number, "entry": number, "previous": self._previous}
        content = sealed({**fields, **place})
        try:
            write_durably(path, [content])
        except BaseException:
            if not path.exists():
                raise
            self._entries, self._previous = number, digest(content)
            raise
        self._entries, self._previous = number, digest(content)
        self.check()

    @property
    def entries(self) -> int:
        """The number of entries that this group has written."""
        return self._entries

    @property
    def identity(self) -> str:
        """What `sees_group` compares: equal only for this group of this run."""
        return f"{self.number} {self.run}"

    def release(self) -> None:
        """Marks that the job has ended normally: another group may take over the run at once."""
        with contextlib.suppress(OSError):
            os.close((self.directory / RELEASED).open(os.O_WRONLY | os.O_CREAT))

    def _later(self) -> str:
        with contextlib.suppress(FileDamaged):
            claim = last_claim(self._run_dir)
            if claim is not None and claim.group > self.number:
                return f" (attempt {claim.attempt}, process {claim.process.get('pid')})"
        return ""


def _next_number(run_dir: RunDir) -> int:
    """Creates the directory of a new group. `mkdir` fails if it exists, so each number has one owner."""
    number = max(group_numbers(run_dir), default=0) + 1
    while True:
        try:
            group_directory(run_dir, number).mkdir()
        except FileExistsError:
            number += 1
        else:
            return number


def _taken_over(run_dir: RunDir, number: int, attempt: int) -> Claim:
    before = last_claim(run_dir, before=number)
    counted: tuple[tuple[int, int], ...] = ()
    if before is not None:
        entries = max(entry_kinds(group_directory(run_dir, before.group)), default=0)
        counted = (*before.counted, *([(before.group, entries)] if entries else []))
    own = set(group_numbers(run_dir))  # A checkpoint of any other group was copied here by a user.
    checkpoints = tuple(
        name
        for name in _checkpoints(run_dir)
        if before is None or before.counts(name) or checkpoint_parts(name)[1] not in own
    )
    run = uuid.uuid4().hex if before is None else before.run
    previous = last_digest(run_dir, counted)
    return Claim(number, counted, checkpoints, attempt, this_process(), time.time(), run, previous)


def _checkpoints(run_dir: RunDir) -> list[str]:
    """The names of the checkpoints that jobs wrote."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in (below(run_dir) / "checkpoints").iterdir():
            with contextlib.suppress(ValueError):
                if checkpoint_parts(path.name)[1]:
                    found.append(path.name)
    return sorted(found)
