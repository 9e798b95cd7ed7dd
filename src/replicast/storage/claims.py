"""The groups of workers of a run directory, and the log of each: what it claims, decides and promises.

    groups/000003/log.jsonl           the claim, then what the group has decided; one checksummed line each
    groups/000003/000017.safetensors  the bytes of an update that line 17 names, with their digest
    groups/000003/run.json            the description of this group's job
    checkpoints/00001200-3/           a checkpoint that the third group has written

**Fencing.** Each attempt of a job is a new group, which writes only under its own names. A group that was
presumed dead may still be running. The claim of the next group, the first line of its log, lists how many
entries of every earlier group, and which checkpoints, existed when it took over; readers ignore anything
written later. A group claims in two steps: it creates its directory, and only then counts what exists. A
writer looks for a later directory after each write, before it acts on what it has written. So either it sees
the later group, or the later group counts its line. No writer checks anything before a write, so there is no
race between a check and a write.

**A line** is a JSON object: the entry, its number, when it was written, the checksum of the line before
(`previous`), what that line is and of which update (`after`), and its own checksum (`seal`), which is last.
In the claim, `previous` and `after` are of the last line of earlier groups that counts. The seal shows
damage; `previous` shows that a line was replaced together with its seal; `after` tells what a damaged line
was. It cannot tell that of two in a row, or of the very last line. A line is read only if writing it again
gives the same bytes: no name twice, nothing unknown. Readers skip a damaged line; `journal.py` says which
ones stop a start.

**What a crash leaves**, by the two steps of an append:

    killed or the disk full within the write      half a line, without its end: no reader counts it
    after the write, before the fsync             a complete line: readers show it, and the next group
                                                  syncs the log before it counts it. A power failure may
                                                  remove it or leave zeros in it. Nobody has acted on
                                                  it; only a receipt was told to its author
    after the fsync                               a complete line, which nothing takes away

Nobody waits for the fsync of a payload or a receipt (`FileJournal.write`). It follows at once.

A file that a line names is durable under its final name before the line is written. Without the line, the
file is void.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from replicast import faults
from replicast.codec import Record, json_line, sealed, unsealed
from replicast.core.entries import Logged
from replicast.errors import FileDamaged, JobFailed, printable
from replicast.files import RunDir, RunPath, below, make_durably, sync_directory, write_all, write_durably
from replicast.processes import this_process

GROUPS, LOG, RELEASED, CHECKPOINTS = "groups", "log.jsonl", "ended", "checkpoints"
MAX_LINE_BYTES = 64 * 2**20  # A summary of a hundred thousand edits takes about 10 MiB.
_RESTORE = (
    "Restore it from a backup, or copy a checkpoint to NEW/checkpoints/ and start the job in the new run "
    "directory NEW"
)
_CLAIM_REMEDY = f"Its first line says which entries and checkpoints count. {_RESTORE}"
_CHECKPOINT = re.compile(r"([0-9]{8,})(?:-([0-9]+)(?:-([0-9]+))?)?")


class Claim(Record, omit_defaults=True):
    """What one group found when it took over a run directory, and how its script was started."""

    group: int
    counted: tuple[tuple[int, int], ...]  # The earlier groups with entries that count, and how many.
    checkpoints: tuple[str, ...]
    attempt: int
    process: Mapping[str, Any]
    run: str
    claimed_at: float
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    commit: str = ""

    def counts(self, checkpoint: str) -> bool:
        group = checkpoint_parts(checkpoint)[1]
        return group in (0, self.group) or checkpoint in self.checkpoints


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an entry is, and of which update."""

    kind: str
    id: str = ""
    sequence: int = 0

    def __str__(self) -> str:
        update = f"{self.sequence} ({self.id})" if self.sequence and self.id else self.id or self.sequence
        return f"the {_NOUNS.get(self.kind, self.kind.lower())}" + (f" of update {update}" if update else "")


_NOUNS = {"Before": "values before", "Committed": "commit", "Decided": "decision", "Started": "start"}
_NOUNS |= {"Refused": "refusal", "Scheduled": "schedule", "Withdrawn": "withdrawal"}


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    number: int
    entry: Claim | Logged
    written_at: float
    previous: str
    after: Subject | None = None


_Follows: TypeAlias = tuple[str, Subject | None]  # `previous` and `after`
_WRITTEN = msgspec.json.Decoder(_Written)


class LogLine(_Written, frozen=True):
    """An entry and its place; the claim has number 0."""

    group: int = 0
    seal: str = ""
    offset: int = 0
    nbytes: int = 0

    @property
    def subject(self) -> Subject:
        id_, sequence = getattr(self.entry, "id", ""), getattr(self.entry, "sequence", 0)
        return Subject(type(self.entry).__name__, id_, sequence)


class DamagedLines(msgspec.Struct, frozen=True):
    """Entries that count and cannot be read: those from `first` to `number`. Of a single one, what it was."""

    group: int
    first: int
    number: int
    error: FileDamaged
    subject: Subject | None = None


Log: TypeAlias = list[LogLine | DamagedLines]  # in order; the claim comes first


def log_path(run_dir: RunDir, group: int) -> RunPath:
    return group_directory(run_dir, group) / LOG


def read_log(
    run_dir: RunDir, group: int, most: int = sys.maxsize, end: Subject | None = None, *, sync: bool = False
) -> Log:
    """Reads the log of a group up to line `most`. With `sync`, all that was read is on disk afterwards.

    `end` is what that line was, if the next claim has told it.

    A line that cannot be read hides no other: the number of the next one says how many are lost.
    """
    path = log_path(run_dir, group)
    log: Log = []
    expected, problem, invalid, torn = 0, "", 0, False

    def lose(last: int, subject: Subject | None = None) -> None:
        subject = subject if expected == last else None
        which = f"entry {last}" if expected == last else f"entries {expected} to {last}"
        which += "" if subject is None else f", {printable(subject)}"
        error = FileDamaged(path, f"{which}: {problem or 'missing'}")
        log.append(DamagedLines(group, expected, last, error, subject))

    try:
        with os.fdopen(path.open(os.O_RDONLY), "rb") as file:
            while piece := file.readline(MAX_LINE_BYTES):
                if not piece.endswith(b"\n"):
                    problem = "the line is too long" if len(piece) == MAX_LINE_BYTES else problem
                    break  # Otherwise: somebody is writing it, or was killed while writing it.
                try:
                    line = _parsed(piece, group, file.tell() - len(piece))
                except ValueError as error:
                    problem, invalid, torn = problem or str(error), invalid + 1, b"\0" in piece
                    continue
                if line.number > most:
                    break
                if line.number < expected:
                    problem = f"it is followed by entry {line.number}"
                    continue
                if line.number > expected:
                    lose(line.number - 1, line.after)
                log.append(line)
                expected, problem, invalid = line.number + 1, "", 0
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        if most == sys.maxsize:
            raise FileDamaged(path, problem) from error
    # JSON has no zeros: they are blocks that did not reach the disk before a power failure.
    is_torn_tail = torn and invalid == 1
    if expected <= most < sys.maxsize:
        lose(most, end)
    elif problem and most == sys.maxsize and not is_torn_tail:
        lose(expected)
    return log


def line_again(run_dir: RunDir, line: LogLine) -> LogLine:
    with os.fdopen(log_path(run_dir, line.group).open(os.O_RDONLY), "rb") as file:
        return _parsed(os.pread(file.fileno(), line.nbytes, line.offset), line.group, line.offset)


def _parsed(piece: bytes, group: int, offset: int) -> LogLine:
    body, seal = unsealed(piece)
    try:
        line = _WRITTEN.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"it is not an entry ({error})") from error
    if msgspec.json.encode(line) != body:
        raise ValueError("it is not an entry as replicast writes it")
    if (line.number == 0) != isinstance(line.entry, Claim):
        raise ValueError(f"entry {line.number} cannot be a {type(line.entry).__name__}")
    place = group, seal, offset, len(piece)
    return LogLine(line.number, line.entry, line.written_at, line.previous, line.after, *place)


def group_directory(run_dir: RunDir, group: int) -> RunPath:
    return below(run_dir) / GROUPS / f"{group:06d}"


def group_numbers(run_dir: RunDir) -> list[int]:
    """The groups that have a directory, not a link, with or without a claim; the last one first."""
    try:
        names = [path.name for path in (below(run_dir) / GROUPS).iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    numbers = (
        int(name) for name in names if name.isascii() and name.isdigit() and f"{int(name):06d}" == name
    )
    return sorted(numbers, reverse=True)


def last_claim(run_dir: RunDir, before: int | None = None) -> Claim | None:
    """The last claim, which says what counts; with `before`, the last claim of an earlier group."""
    for group in group_numbers(run_dir):
        if before is not None and group >= before:
            continue
        path = log_path(run_dir, group)
        if path.exists():
            return read_claim(run_dir, group)
        # A group without a log died before it took over, or is about to take over: it has written nothing.
        if any(not one.name.startswith(".") for one in path.parent.iterdir()) and not path.exists():
            problem = "its group has written files"
            raise FileDamaged(path, problem, verdict="is missing", remedy=_CLAIM_REMEDY)
    return None


def read_claim(run_dir: RunDir, group: int) -> Claim:
    path = log_path(run_dir, group)
    try:
        with os.fdopen(path.open(os.O_RDONLY), "rb") as file:
            claim = _parsed(file.readline(MAX_LINE_BYTES), group, 0).entry
        if not isinstance(claim, Claim):
            raise ValueError("its first line is not a claim")
        if claim.group != group:
            raise ValueError(f"it is the log of another group. Received: {claim.group}")
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise FileDamaged(path, f"its claim: {problem}", remedy=_CLAIM_REMEDY) from error
    return claim


def sees_group(run_dir: RunDir, identity: str) -> bool:
    """Whether this path leads to the directory of a group's claim: on another host it may lead elsewhere."""
    number, _, run = identity.partition(" ")
    try:
        return bool(run) and read_claim(run_dir, int(number)).run == run
    except FileDamaged:
        return False


def checkpoint_name(step: int, group: int, count: int) -> str:
    """The name of a checkpoint: the step, the group, and how often the group has written this step."""
    if count > 1:
        return f"{step:08d}-{group}-{count}"
    return f"{step:08d}-{group}" if group else f"{step:08d}"  # Group 0: a copy or a patched checkpoint.


def checkpoint_parts(name: str) -> tuple[int, int, int]:
    match = _CHECKPOINT.fullmatch(name)
    parts = (0, 0, 0) if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 1))
    if match is None or checkpoint_name(*parts) != name:
        raise ValueError(f"Not the name of a checkpoint. Received: {name}")
    return parts


def named_checkpoints(run_dir: RunDir) -> list[tuple[tuple[int, int, int], RunPath]]:
    found = []
    for path in (below(run_dir) / CHECKPOINTS).glob("*"):
        with contextlib.suppress(ValueError):
            found.append((checkpoint_parts(path.name), path))
    return sorted(found)


def counted_log(run_dir: RunDir, claim: Claim | None) -> Log:
    """The logs of all groups with entries, and of the last, up to the lines that count, as one."""
    logs, end = list[Log](), None
    for group, most in [] if claim is None else [(claim.group, sys.maxsize), *reversed(claim.counted)]:
        logs.append(read_log(run_dir, group, most, end))
        end = next((line.after for line in logs[-1][:1] if isinstance(line, LogLine)), None)
    return [line for log in reversed(logs) for line in log]


class Chain(msgspec.Struct, frozen=True):
    length: int
    last: str
    problems: tuple[str, ...]


def read_chain(run_dir: RunDir) -> Chain:
    try:
        log = counted_log(run_dir, last_claim(run_dir))
    except FileDamaged as error:
        return Chain(0, "", (str(error),))
    length, before, problems = 0, "", list[str]()
    for one in log:
        if isinstance(one, DamagedLines):
            problems.append(str(one.error))
            length += one.number - one.first
        elif before and one.previous != before:
            where = f"Entry {one.number} of {log_path(run_dir, one.group)}"
            problems.append(f"{where} does not follow the record before it: one of the two was changed")
        length, before = length + 1, one.seal if isinstance(one, LogLine) else ""
    return Chain(length, before, tuple(problems))


class Fence:
    """One group's claim on a run directory, and the end of its log. Created by its worker 0.

    A job that runs there is ended by it: call `run_files.check_free` before. `start`: `processes.this_start`.
    """

    def __init__(self, run_dir: RunDir, attempt: int, start: Mapping[str, Any] | None = None) -> None:
        self._run_dir = below(run_dir)
        self.is_synced = True
        groups = self._run_dir / GROUPS
        make_durably(groups)
        with contextlib.suppress(PermissionError):  # Then this user did not create the run in it.
            # A launcher or a user may have created the run directory without syncing its parent.
            sync_directory(self._run_dir.as_path().resolve().parent)
        self.number = max(group_numbers(self._run_dir), default=0) + 1
        while True:  # `mkdir` fails if it exists, so each number has one owner.
            self.directory = group_directory(self._run_dir, self.number)
            try:
                self.directory.mkdir()
                break
            except FileExistsError:
                self.number += 1
        self._log = self.directory / LOG
        sync_directory(groups)
        # Only now: an earlier group will not act on anything that it writes from here on.
        claim, follows = _taken_over(self._run_dir, self.number, attempt)
        claim = msgspec.structs.replace(claim, **(start or {}))
        self.run = claim.run
        content, self.last = self._sealed(0, claim, claim.claimed_at, follows, 0)
        try:
            write_durably(self._log, [content])
        except OSError:
            self.check_not_taken_over()  # A later group removes unfinished files of earlier ones.
            raise
        self.check()

    def check(self) -> None:
        """Raises if another group has taken over the run. Call it after a write, before acting on it."""
        self.check_not_taken_over()
        if not self._log.exists():
            raise FileDamaged(self._log, "it is missing")

    def check_not_taken_over(self) -> None:
        """Raises if another group has taken over the run, even after a write has failed."""
        if not self.is_taken_over():
            return
        later = ""
        with contextlib.suppress(FileDamaged):
            claim = last_claim(self._run_dir)
            if claim is not None and claim.group > self.number:
                later = f" (attempt {claim.attempt}, process {claim.process.get('pid')})"
        raise JobFailed(
            f"Another group of workers{later} has taken over {self._run_dir}; this one was "
            "presumed dead, and what it writes no longer counts"
        )

    def is_taken_over(self) -> bool:
        return group_directory(self._run_dir, self.number + 1).exists()

    def append(self, entry: Claim | Logged, *, sync: bool = True) -> LogLine:
        """Writes the next line of the log. Only for one thread. With `sync`, all lines are on disk then.

        After an OSError, look at `last`: if it is the new line, that may be on disk; otherwise it is not.
        """
        follows, offset = (self.last.seal, self.last.subject), self.last.offset + self.last.nbytes
        content, line = self._sealed(self.last.number + 1, entry, time.time(), follows, offset)
        if len(content) >= MAX_LINE_BYTES:
            raise OSError(None, f"an entry of {len(content)} bytes is too large")
        descriptor = self._log.open(os.O_WRONLY | os.O_APPEND)
        try:
            if (found := os.fstat(descriptor).st_size) != offset:
                raise FileDamaged(self._log, "wrong size", expected=f"{offset}", received=f"{found}")
            try:
                write_all(descriptor, content)
            except OSError:
                # Half a line may be there. Nobody has counted it, since its end is missing.
                with contextlib.suppress(OSError):  # If it stays, the next call finds another size.
                    os.ftruncate(descriptor, offset)
                raise
            # From here on others can read it. It is never cut off again: the next group may have counted it.
            self.last = line
            faults.point("write")
            self.is_synced = False
            if sync:
                os.fsync(descriptor)
                self.is_synced = True
        finally:
            os.close(descriptor)
        self.check()
        return line

    def sync(self) -> None:
        if not self.is_synced:
            with os.fdopen(self._log.open(os.O_WRONLY), "wb") as file:
                os.fsync(file.fileno())
            self.is_synced = True

    def _sealed(
        self, number: int, entry: Claim | Logged, written_at: float, follows: _Follows, offset: int
    ) -> tuple[bytes, LogLine]:
        # Written as it is read again: where a record has a float, its author may have given the integer 1.
        line = _WRITTEN.decode(json_line(_Written(number, entry, written_at, *follows)))
        content = sealed(msgspec.json.encode(line))[0]
        return content, _parsed(content, self.number, offset)

    @property
    def identity(self) -> str:
        """What `sees_group` compares: equal only for this group of this run."""
        return f"{self.number} {self.run}"

    def release(self) -> None:
        """Marks that the job has ended normally: another group may take over the run at once."""
        with contextlib.suppress(OSError):
            os.close((self.directory / RELEASED).open(os.O_WRONLY | os.O_CREAT))


def _taken_over(run_dir: RunDir, number: int, attempt: int) -> tuple[Claim, _Follows]:
    """The claim of a new group, and which line before it that counts is the last, if it can be read."""
    before = last_claim(run_dir, before=number)
    counted: tuple[tuple[int, int], ...] = ()
    follows: _Follows = "", None
    if before is not None:
        # What this group counts must not get lost in a power failure, so it is synced, whoever wrote it.
        end = read_log(run_dir, before.group, sync=True)[-1]  # Without entries, it is the claim.
        if isinstance(end, DamagedLines):  # How many lines are lost is not known, so they cannot be counted.
            why = "The job cannot start without it: it may say what became of an update"
            raise FileDamaged(end.error.path, f"{end.error.problem}. {why}", remedy=_RESTORE)
        counted = (*before.counted, *([(before.group, end.number)] if end.number else []))
        follows = (end.seal, end.subject) if end.number else (end.previous, end.after)
    own = set(group_numbers(run_dir))  # A checkpoint of any other group was copied here by a user.
    checkpoints = tuple(
        name
        for name in sorted(path.name for (_, group, _), path in named_checkpoints(run_dir) if group)
        if before is None or before.counts(name) or checkpoint_parts(name)[1] not in own
    )
    run = uuid.uuid4().hex if before is None else before.run
    return Claim(number, counted, checkpoints, attempt, this_process(), run, time.time()), follows
