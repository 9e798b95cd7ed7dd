"""The inbox of a run directory: requests from outside to a job, and the job's answers.

    inbox/<id>.safetensors      push or revert: the update; its header also has its step and trial
    inbox/<id>.request.json     withdraw, audit, save, leave or pull: an `InboxRequest`
    inbox/<id>.answer.json      an `InboxAnswer`: how far the request is, and in the end what came of it
    inbox/<id>.answer.tensors   the values that were pulled, as safetensors; written before the answer
    refused/<id>.json           an `EndedUpdate`: who, what, why, when, of one refused or withdrawn;
                                the file of a refused one is next to it

**Life of a request.** It is renamed into place when it is complete, and stays until it has its outcome, so
that the next attempt answers what a job that died has left. First the answer is written, then the request is
removed: after a crash between the two, the next attempt finds the answer and only removes the request. An
update that is proposed again is applied once, since the journal knows its id. Answers are kept for an hour,
for authors that still wait.

**Anybody may write here.** A file that is not a request is refused; the others are served. All that a file's
header and size tell is checked before memory is allocated for its values. Names are escaped where shown.

**Taking and withdrawing an update may race.** The job reads the file, notes that it has taken the update, and
then looks whether the same file is still there; a withdrawal first removes the file and then reads the note.
So one of them always sees the other: a job that may have taken the update is asked to withdraw it, and a job
that finds the file gone answers that the update is withdrawn. Who withdrew it, and why, is written before the
file is removed. If the withdrawal is killed between the two, the update still waits: the file decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy.typing as npt
from msgspec.structs import replace

from replicast import files
from replicast.codec import described, json_line, parse_object
from replicast.core.entries import Receipt, Stage
from replicast.errors import FileDamaged, UpdateIdInUse, UpdateRefused, refusal_of
from replicast.files import RunDir, RunPath, below, write_durably
from replicast.processes import is_alive, is_on_this_host, this_process
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.journal import EditSummary, Updates, UpdateView, summary
from replicast.update.edits import Variable, refused
from replicast.update.tensorfiles import (
    TensorFile,
    outline_of,
    parse_tensors,
    read_tensor_bytes,
    tensor_chunks,
)
from replicast.update.trial import Trial
from replicast.update.update import Update, checked_step, checked_text

_UPDATE, _REQUEST = ".safetensors", ".request.json"
_ANSWER, _VALUES = ".answer.json", ".answer.tensors"  # not `.safetensors`: every such file is an update
_TENSOR = "values"
_CREATED, _MOVED_HERE = 0x100, 0x80  # of inotify
_KEEP_SECS = 3600.0
_MAX_REQUEST_BYTES = 2**20
_MAX_ANSWER_BYTES = 64 * 2**20
_SMALL_BYTES = 2**16  # Of an update that is shown with the numbers that it sets.
_MAX_SHOWN_BYTES = 2**20  # Of a header: a status reads those of many updates each time.
_MAX_AUTHOR = 200
_MOST_RANGES = 10_000

Kind: TypeAlias = Literal["withdraw", "audit", "save", "leave", "pull"]
WHAT: dict[Kind, str] = {
    "withdraw": "a withdrawal",
    "audit": "an audit",
    "save": "a checkpoint",
    "leave": "a stop",
    "pull": "the values",
}
Rows: TypeAlias = tuple[tuple[int, int], ...]  # ranges, each from its first row to the one behind its last


class WaitingUpdate(NamedTuple):
    submitted_at: float
    id: str
    path: RunPath
    nbytes: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """What somebody has pushed: an update, or the number of one to revert."""

    update: Update
    at_step: int | None = None
    trial: Trial | None = None
    reverts: int | None = None
    forced: bool = False


class InboxRequest(msgspec.Struct, frozen=True):
    kind: Kind
    author: str
    requested_at: float
    deadline: float
    name: str = ""  # the variable to pull, or the id of the update to withdraw
    rows: Annotated[Rows, msgspec.Meta(max_length=_MOST_RANGES)] = ()
    id: str = ""
    note: str = ""  # why


class InboxAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a request is, or what came of it: VERIFIED, WITHDRAWN or REFUSED; an update has more stages."""

    stage: Stage
    time: float
    step: int | None = None
    problem: str = ""  # why it was refused or has failed; of a stop: why the state is not saved
    kind: str = ""
    author: str = ""
    attempt: int = 0
    details: dict[str, Any] = {}
    # Of an update:
    taken_by: dict[str, Any] | None = None
    waits_for: str = ""
    trial_until: int | None = None
    receipt: Receipt | None = None  # without a journal on disk, its author finds it nowhere else

    @property
    def done_at(self) -> int:
        return 0 if self.step is None else self.step


class EndedUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """An update that is never applied."""

    stage: Stage = Stage.REFUSED
    at: float = 0.0
    reason: dict[str, Any] = {}  # The `UpdateRefused`.
    withdrawn_by: str = ""
    why: str = ""
    author: str = ""
    note: str = ""
    edits: tuple[EditSummary, ...] = ()
    nbytes: int | None = None
    trial: Trial | None = None


_KEPT = ("author", "note", "edits", "nbytes", "trial")
_TOLD = ("reason", "withdrawn_by", "why", *_KEPT)


# The author's side.


def submit(
    run_dir: RunDir,
    update: Update,
    at_step: int | None = None,
    trial: Trial | None = None,
    *,
    reverts: int | None = None,
    forced: bool = False,
) -> RunPath:
    """Puts an update into the inbox, atomically and durably. Submitting the same update again is a no-op."""
    submitted = Submitted(update, checked_step(at_step), trial, reverts, forced)
    path = _inbox(run_dir) / f"{update.id}{_UPDATE}"
    if path.exists():
        return _same(path, submitted)
    files.make_durably(path.parent)
    # Before the update is in place: after that, the job writes its stage. An old refusal no longer applies.
    (_refused(run_dir) / f"{update.id}.json").unlink(missing_ok=True)
    note_stage(run_dir, update.id, Stage.PROPOSED)
    extra: dict[str, Any] = {} if trial is None else {"trial": trial.to_json()}
    if reverts is not None:
        extra |= {"reverts": reverts, "forced": forced}
    try:
        write_durably(path, update.file_chunks({"at_step": submitted.at_step, **extra}), replace=False)
    except FileExistsError:  # somebody else has submitted this id in the meantime
        return _same(path, submitted)
    return path


def _same(path: RunPath, submitted: Submitted) -> RunPath:
    """Refuses an update whose id another one has that waits already."""
    is_other = UpdateIdInUse(
        "Another update with this id waits in the inbox",
        expected="a unique id, or the same content",
        received=submitted.update.id,
    )

    def check_size(other: Submitted) -> None:
        if other.update.nbytes != submitted.update.nbytes:
            raise is_other

    def content(one: Submitted) -> tuple[object, ...]:
        return one.update.content_digest(), one.at_step, one.trial, one.reverts

    if content(read(path, check=check_size)) != content(submitted):
        raise is_other
    return path


def ask(
    run_dir: RunDir,
    kind: Kind,
    *,
    author: str,
    timeout_secs: float,
    now: float | None = None,
    name: str = "",
    rows: Rows = (),
    note: str = "",
) -> InboxRequest:
    now = time.time() if now is None else now
    author, id_ = author[:_MAX_AUTHOR], uuid.uuid4().hex
    request = InboxRequest(kind, author, now, now + timeout_secs, name, rows, id_, note)
    _check(request)
    files.make_durably(_inbox(run_dir))
    files.write_quickly(_inbox(run_dir) / f"{request.id}{_REQUEST}", msgspec.json.encode(request).decode())
    return request


def forget(run_dir: RunDir, id_: str) -> None:
    for suffix in (_REQUEST, _ANSWER, _VALUES):
        with contextlib.suppress(OSError):
            (_inbox(run_dir) / f"{id_}{suffix}").unlink()


def answer_of(run_dir: RunDir, id_: str, *, strict: bool = False) -> InboxAnswer | None:
    """The last answer to a request; None if there is none.

    Written without a sync: a power failure may have damaged it, which is told to who waits (`strict`).
    """
    path = _inbox(run_dir) / f"{id_}{_ANSWER}"
    try:
        if path.exists():
            return described(InboxAnswer, "answer", files.read_json(path, max_bytes=_MAX_ANSWER_BYTES))
    except (FileDamaged, ValueError) as error:
        if strict:
            raise error if isinstance(error, FileDamaged) else FileDamaged(path, str(error)) from error
    return None


def values_of(run_dir: RunDir, id_: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    path = _inbox(run_dir) / f"{id_}{_VALUES}"

    def check(outline: TensorFile) -> None:
        found = {name: (array.shape, array.dtype.name) for name, array in outline.tensors.items()}
        if found != {_TENSOR: (shape, dtype)}:
            expected = f"{_TENSOR} of shape {shape}, {dtype}"
            raise FileDamaged(path, "other values", expected=expected, received=str(found)[:200])

    content = read_tensor_bytes(path, max_tensors=1, check=check)
    return parse_tensors(content, path.name, max_tensors=1).tensors[_TENSOR]


def stopped_by(run_dir: RunDir, attempt: int) -> InboxAnswer | None:
    """The answer to the request because of which an attempt of the job has stopped; None if there is none."""
    for path in _inbox(run_dir).glob(f"*{_ANSWER}"):
        found = answer_of(run_dir, path.name.removesuffix(_ANSWER))
        left = ("leave", attempt, Stage.VERIFIED)
        if found is not None and (found.kind, found.attempt, found.stage) == left:
            return found
    return None


def ended(run_dir: RunDir) -> dict[str, UpdateView]:
    """The updates that were refused or withdrawn, by id. A damaged file says so, and hides no other."""
    paths = sorted(_refused(run_dir).glob("*.json"))
    return {path.name.removesuffix(".json"): _end(path) for path in paths if not path.name.startswith(".")}


def _end(path: RunPath) -> UpdateView:
    id_, one, refusal, stage = path.name.removesuffix(".json"), EndedUpdate(), None, Stage.WITHDRAWN
    try:
        one = _read_end(path)
        if one.stage is not Stage.WITHDRAWN:  # Anybody may write here.
            stage, refusal = Stage.REFUSED, UpdateRefused.from_json(one.reason)
    except (FileDamaged, ValueError) as error:
        stage, refusal = Stage.REFUSED, UpdateRefused(f"The reason cannot be read: {error}")
    fields = {name: getattr(one, name) for name in (*_KEPT, "at", "withdrawn_by")}
    view = UpdateView(id=id_, stage=stage, reason=one.why, refusal=refusal, **fields)
    with contextlib.suppress(OSError):
        view = replace(view, at=one.at or path.stat().st_mtime)
        update = path.with_name(f"{id_}{_UPDATE}")
        view = replace(view, nbytes=update.stat().st_size, path=update)
    return view


def _read_end(path: RunPath) -> EndedUpdate:
    return described(EndedUpdate, "record", files.read_json(path, max_bytes=_MAX_ANSWER_BYTES))


def note_end(run_dir: RunDir, path: RunPath, stage: Stage, *, durably: bool = True, **fields: Any) -> None:
    """Writes down who, what, why and when of an update that is never applied, which may be in this file.

    It may be told in two steps: by who has withdrawn it, and by the job.
    """
    record = _refused(run_dir) / f"{id_of(path)}.json"
    if (told := describe(path)) is not None:
        fields |= {name: getattr(told, name) for name in _KEPT}
    with contextlib.suppress(FileDamaged, ValueError):
        if (before := _read_end(record)).stage is stage:
            fields = {name: fields.get(name) or getattr(before, name) for name in _TOLD}
    files.make_durably(record.parent)
    write_durably(record, [json_line(EndedUpdate(stage, time.time(), **fields))], sync=durably)


# Withdrawing an update that no job has taken.


def withdraw(
    run_dir: RunDir, update_id: str, job_is_running: Callable[[], bool], *, by: str = "", why: str = ""
) -> bool:
    """Removes a waiting update, unless a job has taken it already. Who, what, why and when is kept."""
    if Path(update_id).name != update_id:
        return False
    path = _inbox(run_dir) / f"{update_id}{_UPDATE}"
    if not path.exists() or _is_taken(run_dir, update_id, job_is_running):
        return False
    note_end(run_dir, path, Stage.WITHDRAWN, withdrawn_by=by, why=why)
    path.unlink(missing_ok=True)
    files.sync_directory(path.parent)
    if _is_taken(run_dir, update_id, job_is_running):  # just now: that job decides
        (_refused(run_dir) / f"{update_id}.json").unlink(missing_ok=True)
        return False
    (_inbox(run_dir) / f"{update_id}{_ANSWER}").unlink(missing_ok=True)
    return True


def _is_taken(run_dir: RunDir, update_id: str, job_is_running: Callable[[], bool]) -> bool:
    noted = answer_of(run_dir, update_id)
    if noted is not None and noted.taken_by is not None:
        alive = is_alive(noted.taken_by) if is_on_this_host(noted.taken_by) else None
        if job_is_running() if alive is None else alive:
            return True
    # A job that died may have committed or scheduled it: the next attempt applies it in any case.
    journal = Updates(run_dir)
    if journal.has_promised(update_id):
        return True
    there = CheckpointStore(run_dir).manifests()
    pending = {one.proposal.id for manifest in there for one in manifest.pending}
    return update_id in pending and update_id not in journal.ended


# What waits.


def waiting(run_dir: RunDir) -> list[WaitingUpdate]:
    """The updates that wait in the inbox, oldest first, without those still being written."""
    found = []
    for path in _named(run_dir, _UPDATE):
        with contextlib.suppress(FileNotFoundError):  # It was removed in the meantime.
            status = path.stat()
            found.append(WaitingUpdate(status.st_mtime, id_of(path), path, status.st_size))
    return sorted(found)


class Arrivals:
    """Lets the job wait for requests, and an author for an answer, without looking all the time.

    The kernel tells (inotify) what a process of this host puts into the inbox. It does not tell what comes
    from another host on a shared file system, so the inbox has to be looked at all the same.
    """

    def __init__(self, run_dir: RunDir, answer_to: str | None = None) -> None:
        self._inbox = _inbox(run_dir)
        wanted = (_UPDATE, _REQUEST) if answer_to is None else (f"{answer_to}{_ANSWER}",)
        self._wanted = tuple(name.encode() for name in wanted)
        self._libc = ctypes.CDLL(None)
        start = getattr(self._libc, "inotify_init1", None)  # Linux has it
        self._queue: int = -1 if start is None else start(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched = -1
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._lock = threading.Lock()
        self._watch()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # no inbox yet, or no right to read it
            if self._queue >= 0 and self._watched < 0:
                with self._inbox.entered() as directory:
                    # Each is linked or renamed into place.
                    path = f"/proc/self/fd/{directory}".encode()
                    self._watched = self._libc.inotify_add_watch(self._queue, path, _CREATED | _MOVED_HERE)

    def wait(self, timeout_secs: float) -> bool:
        """Blocks until one arrives or somebody calls `wake`, at most so long; says whether one did."""
        self._watch()
        poll = select.poll()
        for descriptor in (self._woken, *([self._queue] if self._watched >= 0 else [])):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * timeout_secs)}
        woken = self._woken in ready and bool(os.read(self._woken, 4096))
        events, names = os.read(self._queue, 65_536) if self._queue in ready else b"", []
        while events:
            length = int.from_bytes(events[12:16], sys.byteorder)
            names.append(events[16 : 16 + length].rstrip(b"\0"))
            events = events[16 + length :]
        return woken or any(name.endswith(self._wanted) for name in names)

    def wake(self) -> None:
        """Ends the wait of the reader. Any thread, also after `close`."""
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes too
            if self._wakes >= 0:
                os.write(self._wakes, b"x")

    def close(self) -> None:
        with self._lock:
            for descriptor in (self._queue, self._woken, self._wakes):
                if descriptor >= 0:
                    os.close(descriptor)
            self._wakes = -1


def requests(run_dir: RunDir) -> list[RunPath]:
    """The files of the other requests that wait for an answer. Their order is that of random ids."""
    return sorted(_named(run_dir, _REQUEST))


def id_of(path: RunPath) -> str:
    return path.name.removesuffix(_UPDATE).removesuffix(_REQUEST)


def read(
    path: RunPath, max_bytes: int | None = None, check: Callable[[Submitted], None] = lambda _found: None
) -> Submitted:
    """Reads an update from the inbox, with its step and trial; `check` sees its header before its values."""
    content = read_tensor_bytes(
        path, max_bytes=max_bytes, holes=False, check=lambda outline: check(_submitted(path, outline))
    )
    return _submitted(path, parse_tensors(content, path.name))


def _submitted(path: RunPath, file: TensorFile) -> Submitted:
    """The update in a file of the inbox, or its outline in the outline of a file."""
    run_dir = path.parent.parent
    later = _refused(run_dir) / path.name
    command = f"replicast push {shlex.quote(str(run_dir))} --add {shlex.quote(str(later))}"
    update, extra = Update.of_file(file, path.name, f"Say what to do with them, for example: {command}")
    if path.name != f"{update.id}{_UPDATE}":
        problem = "The file in the inbox must be named like the update in it"
        raise UpdateRefused(problem, expected=f"{update.id}{_UPDATE}", received=path.name)
    step, trial = checked_step(extra.get("at_step")), extra.get("trial")
    try:
        trial = None if trial is None else Trial.from_json(trial)
    except (AttributeError, TypeError, ValueError) as error:
        raise UpdateRefused(f"The trial is not valid: {error}", received=repr(trial)[:200]) from error
    reverts = checked_step(extra.get("reverts"), "A revert needs the number of an update")
    if reverts is not None and (update.edits or step is not None or trial is not None):
        raise UpdateRefused("A revert has no edits, step or trial of its own", received=repr(update)[:200])
    return Submitted(update, step, trial, reverts, extra.get("forced") is True)


def describe(path: RunPath) -> UpdateView | None:
    """An update in the inbox, by the header of its file; None if it is gone, too long or no update."""
    with contextlib.suppress(Exception):  # Of any kind: one that somebody made up hides no other.
        nbytes = path.stat().st_size
        if is_small := nbytes <= _SMALL_BYTES:
            found = read(path, _SMALL_BYTES)  # Its values can be told too.
        else:
            found = _submitted(path, outline_of(path, max_bytes=_MAX_SHOWN_BYTES))
        return UpdateView(
            id=found.update.id,
            stage=Stage.PROPOSED,
            step=found.at_step,
            nbytes=nbytes,
            author=found.update.author,
            note=found.update.note,
            edits=tuple(summary(edit, outline=not is_small) for edit in found.update.edits),
            scheduled=found.at_step is not None,
            reverts=found.reverts,
            trial=found.trial,
            path=path,
        )
    return None


def read_request(path: RunPath) -> InboxRequest:
    """Reads a request. Raises `UpdateRefused` for anything else, and FileNotFoundError if it is gone."""
    try:
        request = described(
            InboxRequest, "request", parse_object(files.read_small(path, max_bytes=_MAX_REQUEST_BYTES))
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UpdateRefused(f"Not a valid request: {error}") from error
    request = replace(request, id=id_of(path))
    _check(request)
    return request


# The job's side: only worker 0.


def take(
    run_dir: RunDir,
    path: RunPath,
    max_bytes: int | None = None,
    check: Callable[[Submitted], None] = lambda _found: None,
) -> Submitted | None:
    """Reads an update that the job will propose: `withdraw` cannot remove it any more.

    Of what is not an update, or not one for this job, nothing is noted. None if it was withdrawn, or replaced
    by another one with its id, before it was noted.
    """
    try:
        before = _file_at(path)
        found = read(path, max_bytes, check)
    except (FileDamaged, FileNotFoundError) as error:
        if isinstance(error, FileDamaged) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        return None
    note_stage(run_dir, id_of(path), Stage.PROPOSED, taken_by=this_process())
    with contextlib.suppress(FileNotFoundError):
        if _file_at(path) == before:
            return found
    (_inbox(run_dir) / f"{id_of(path)}{_ANSWER}").unlink(missing_ok=True)  # it is not taken
    return None


def _file_at(path: RunPath) -> tuple[int, int]:
    """Identifies the file: another one may get the same name."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def note_stage(run_dir: RunDir, update_id: str, stage: Stage, **fields: Any) -> None:
    """Writes how far an update is, for its author outside the job. Without a sync: it is noted often."""
    files.make_durably(_inbox(run_dir))
    answer = InboxAnswer(stage, time.time(), **fields)
    files.write_quickly(_inbox(run_dir) / f"{update_id}{_ANSWER}", json_line(answer).decode())


def refuse(run_dir: RunDir, path: RunPath, error: Exception, *, durably: bool = True) -> None:
    directory = _refused(run_dir)
    note_end(run_dir, path, Stage.REFUSED, durably=durably, reason=refusal_of(error).to_json())
    with contextlib.suppress(FileNotFoundError):
        path.rename(directory / path.name)
        if durably:
            files.sync_directory(directory)
    (_inbox(run_dir) / f"{id_of(path)}{_ANSWER}").unlink(missing_ok=True)


def answer(run_dir: RunDir, id_: str, given: InboxAnswer, values: npt.NDArray[Any] | None = None) -> None:
    """Answers a request, durably, then removes it. No-op if its author has given up."""
    path = _inbox(run_dir) / f"{id_}{_REQUEST}"
    if not path.exists():
        return
    if values is not None:
        write_durably(path.with_name(f"{id_}{_VALUES}"), tensor_chunks({_TENSOR: values}, {}))
    write_durably(path.with_name(f"{id_}{_ANSWER}"), [json_line(given)])
    path.unlink(missing_ok=True)


def clean(run_dir: RunDir) -> None:
    inbox = _inbox(run_dir)
    files.remove_leftovers(inbox)
    for suffix in (_ANSWER, _VALUES):
        for path in inbox.glob(f"*{suffix}"):
            update = path.with_name(f"{path.name.removesuffix(suffix)}{_UPDATE}")
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= _KEEP_SECS and not update.exists():
                    path.unlink()


def checked_rows(variable: Variable, rows: Rows) -> int:
    """Checks that a variable has these rows; returns their size in bytes, or that of the variable."""
    if not rows:
        return variable.nbytes
    if not variable.shape:
        raise refused(variable.name, "A scalar variable has no rows")
    count = variable.shape[0]
    beyond = [stop - 1 for _, stop in rows if stop > count]
    if beyond:
        expected = f"0 to {count - 1}" if count else "none: the variable has no rows"
        raise refused(variable.name, "There is no such row", expected, str(beyond[0]))
    return variable.nbytes // count * sum(stop - start for start, stop in rows)


def _check(request: InboxRequest) -> None:
    if (request.kind in ("pull", "withdraw")) != bool(request.name):
        raise UpdateRefused("A pull names a variable, a withdrawal an update; other requests name neither")
    if any(not 0 <= start < stop for start, stop in request.rows):
        problem = "Rows are ranges, each from a row to a later one"
        raise UpdateRefused(problem, received=str(request.rows)[:200])
    checked_text("name of the file", request.id)  # It is part of messages and answers.
    checked_text("author", request.author, _MAX_AUTHOR)
    checked_text("name", request.name, 1000)
    checked_text("note", request.note)


def _named(run_dir: RunDir, suffix: str) -> list[RunPath]:
    return [path for path in _inbox(run_dir).glob(f"*{suffix}") if not path.name.startswith(".")]


def _inbox(run_dir: RunDir) -> RunPath:
    return below(run_dir) / "inbox"


def _refused(run_dir: RunDir) -> RunPath:
    return below(run_dir) / "refused"
