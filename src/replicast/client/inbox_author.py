"""The author's side of the inbox: how somebody outside asks a job for something, and waits for its answer.

push, revert             checked first, and submitted only if a job will take it
withdraw                 removes an update that no job has taken, or asks the job that has
audit, pull,             a request; whoever asks polls for the answer until a deadline, and leaves nothing
checkpoint, stop         behind when it gives up
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import socket
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from replicast.client.examination import Examination, examine
from replicast.client.notes import (
    SeenJob,
    described_run,
    not_running_text,
    polls,
    running_beside,
    schema_of,
    see,
)
from replicast.client.run import Pulled, ranges_of
from replicast.client.update_views import damage_text, find, look
from replicast.core.records import Stage
from replicast.errors import (
    CheckpointError,
    FileDamaged,
    NoAnswer,
    NotFound,
    RequestFailed,
    RequestRefused,
    UpdateIdInUse,
    UpdateRefused,
)
from replicast.files import TEMPORARY, RunDir, RunPath, below
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.inbox import InboxAnswer, Kind, Rows
from replicast.storage.run_files import absent_secs, age, read_run_info, read_state
from replicast.storage.updates import Undo, Updates, UpdateView, undo
from replicast.tensorfiles import outline_of, parse_tensors
from replicast.update.audit_report import AuditReport, workers_text
from replicast.update.digest import digest_array
from replicast.update.edits import Array, EditKind
from replicast.update.inverse import meaning
from replicast.update.schema import Variable, planned
from replicast.update.trial import Trial
from replicast.update.update import MAX_TENSORS, Update, edits_of_tensors

_WITHDRAWAL_SECS = 30.0  # The job may be far from its next boundary, for example in an evaluation.
_WITHDRAWABLE = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
_LATE_SECS = 3.0  # A worker writes a note every second: below this, which note is the oldest is chance.
_WHAT = {
    "audit": "an audit",
    "save": "a checkpoint",
    "leave": "a stop",
    "pull": "the values",
    "withdraw": "a withdrawal",
}
_SOURCE = "The uploaded file"


def this_user() -> str:
    """Who runs this, as user@host: the author of what does not say by whom it is."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user without a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


# Push and revert.


def submit(
    run: RunDir, update: Update, at_step: int | None, trial: Trial | None, *, next_start: bool
) -> tuple[int | None, str]:
    """Puts an update into the inbox. Returns its number if it is in the journal already, and a warning."""
    info = described_run(run)  # While the first workers start, the job checks the update when it takes it.
    plan = update if info is None else planned(update, info.schema)
    journal = Updates(run)
    number = _number_in_journal(journal, update, plan)
    if number is not None:
        return number, ""
    seen = see(run)
    step = max((note.step for note in seen.notes), default=0)
    if at_step is not None and at_step <= step and seen.running:
        expected = f"a step after {step}, where the job is"
        raise UpdateRefused(f"Step {at_step} is past", expected=expected, received=f"step {at_step}")
    warning = _submit(run, update.signed(this_user()), seen, at_step, trial, next_start=next_start)
    damage = damage_text(journal)  # The job knows what it has: it decides.
    return None, f"{damage}\n{warning}".strip()


def submit_revert(
    run: RunDir, which: str | int, note: str, author: str, *, force: bool, next_start: bool
) -> tuple[str, str]:
    """Asks the job to undo an update. Returns the id of the update that does, and a warning."""
    plan = _undo(run, which, force=force)
    if not force:
        plan.check()
    revert = Update(note=note or plan.update.note, author=author or this_user())
    reverts = plan.record.sequence
    return revert.id, _submit(run, revert, see(run), reverts=reverts, forced=force, next_start=next_start)


def examine_revert(run: RunDir, which: str | int, *, force: bool) -> Examination:
    """What undoing an update would do. Nothing is sent to the job."""
    plan = _undo(run, which, force=force)
    found = examine(plan.update, schema_of(run))
    meanings = dict.fromkeys(f"{edit.variable}: {meaning(edit)}" for edit in plan.update.edits)
    unless = "" if force else ": it is refused unless it is forced (--force, force=True)"
    return replace(found, notes=(*meanings, *(f"{one}{unless}" for one in plan.since)))


def _submit(
    run: RunDir,
    update: Update,
    seen: SeenJob,
    at_step: int | None = None,
    trial: Trial | None = None,
    *,
    next_start: bool,
    reverts: int | None = None,
    forced: bool = False,
) -> str:
    """Refuses what nobody would take, unless that is wanted or it waits there already. Returns a warning."""
    now, warning = read_state(run, seen.notes, seen.now), ""
    if not now.state.is_running:
        beside = running_beside(run, seen.now)
        if not next_start and all(one.id != update.id for one in inbox.waiting(run)):
            again = "Try again when the job runs, or leave it for the next start: next_start=True"
            problem = f"The job is not running: {now.sentence}"
            raise UpdateRefused(problem, expected="a running job", remedy=beside or again)
        warning = f"{now.sentence}. It will take the update when it is started again. {beside}".rstrip()
    try:
        inbox.submit(run, update, at_step, trial, reverts=reverts, forced=forced)
    except OSError as error:
        raise UpdateRefused(
            f"The update cannot be written to {below(run) / 'inbox'} ({error.strerror})",
            received=f"{update.nbytes} bytes",
            remedy="Free some space there, or let this user write there, and try again",
        ) from error
    return warning


def _number_in_journal(journal: Updates, update: Update, plan: Update) -> int | None:
    """The place that the same update has in the journal already; another one with its id is refused."""
    if update.id in journal.history.withdrawn:
        raise UpdateRefused("An update with this id was withdrawn", expected="a new id", received=update.id)
    record = journal.history.by_id.get(update.id)
    if record is None:
        return None
    if record.digest not in (update.content_digest(), plan.content_digest()):
        raise UpdateIdInUse(
            f"Another update with this id is in the journal, as number {record.sequence}",
            expected="a new id, or the same content",
            received=update.id,
        )
    return record.sequence


def _undo(run: RunDir, which: str | int, *, force: bool) -> Undo:
    view = find(run, str(which), Updates(run))
    if view.sequence is None:
        raise UpdateRefused(
            f"Update {view.id} is {view.stage}: it was not applied, so there is nothing to revert",
            remedy="replicast withdraw takes back what is not committed",
        )
    return undo(run, view.sequence, forced=force)


# Withdraw.


def withdraw(run: RunDir, update_id: str) -> UpdateView:
    """Takes back an update that is not committed. Blocks until the job has answered, if one has taken it."""
    with contextlib.suppress(OSError):  # Then the update is not found, or cannot be removed: that is told.
        inbox.put_back(run)  # Of a withdrawal that was killed.
    view = find(run, update_id, Updates(run))
    if view.stage in (Stage.REFUSED, Stage.WITHDRAWN):
        raise UpdateRefused(f"Update {view.id} was {view.stage}: there is nothing to withdraw")
    withdrawn = UpdateView(id=view.id, stage=Stage.WITHDRAWN)
    try:
        if inbox.withdraw(run, view.id, job_is_running=lambda: see(run).running):
            return withdrawn
    except OSError as error:
        raise UpdateRefused(f"It cannot be removed from {below(run) / 'inbox'} ({error.strerror})") from error
    problem = "It was taken by a job"
    if find(run, view.id, Updates(run)).stage in _WITHDRAWABLE:
        try:
            ask(run, "withdraw", _WITHDRAWAL_SECS, name=view.id)
            return withdrawn
        except (NoAnswer, RequestRefused) as error:
            problem = str(error)
    view = look(run, view.id, thoroughly=True)
    if view.stage is Stage.REFUSED:
        raise UpdateRefused(f"Update {view.id} was refused: there is nothing to withdraw")
    if view.stage not in (*_WITHDRAWABLE, Stage.WITHDRAWN):
        step = "" if view.step is None else f", step {view.step}"
        raise UpdateRefused(f"Too late: update {view.id} is {view.stage}{step}")
    if view.stage in _WITHDRAWABLE:
        raise NoAnswer(
            f"{problem}\nUpdate {view.id} is still {view.stage}: withdraw it again when the job trains."
        )
    return view


# Requests.


def ask(
    run: RunDir,
    kind: Kind,
    timeout_secs: float,
    author: str = "",
    *,
    name: str = "",
    variable: Variable | None = None,
    rows: Rows = (),
) -> tuple[InboxAnswer, Array | None]:
    """Asks the job for something and waits for its answer, at most `timeout_secs`; a pull has values."""
    seen = see(run)
    if not seen.running:
        raise NoAnswer(f"{not_running_text(seen)}: only a running job can be asked for {_WHAT[kind]}.")
    try:
        asked = inbox.ask(
            run,
            kind,
            author=author or this_user(),
            timeout_secs=timeout_secs,
            now=seen.now,
            name=name if variable is None else variable.name,
            rows=rows,
        )
    except OSError as error:
        raise RequestFailed(
            f"The request cannot be written to {below(run) / 'inbox'} ({error.strerror})."
        ) from error
    answer = None
    try:
        for seen, _, _ in polls(run, timeout_secs):
            answer = inbox.read_answer(run, asked.id)  # After the notes: a job may write it as it ends.
            if answer is not None and answer.stage is Stage.REFUSED:
                raise RequestRefused(f"The job refused it, at step {answer.step}: {answer.problem}")
            if answer is not None and variable is not None:
                count = sum(stop - start for start, stop in rows)
                shape = (count, *variable.shape[1:]) if rows else variable.shape
                return answer, inbox.values_of(run, asked.id, shape, variable.dtype)
            if answer is not None:
                return answer, None
            if not seen.running:
                raise NoAnswer(f"{not_running_text(seen)}: it ended without {_WHAT[kind]}.")
        waited_for = _waited_for(see(run), read_run_info(run).workers)
        raise NoAnswer(f"{timeout_secs:g} s have passed without {_WHAT[kind]}. {waited_for}")
    finally:
        if kind != "leave" or answer is None:  # otherwise the launcher reads who has stopped the job
            inbox.forget(run, asked.id)


# These have the parameters of the methods of `Run`, by name.


def audit(run: RunDir, timeout: float, author: str) -> AuditReport:
    answer, _ = ask(run, "audit", timeout, author)
    with _answer_is_read():
        return AuditReport.from_json(answer.details)


def checkpoint(run: RunDir, timeout: float, author: str) -> int:
    return ask(run, "save", timeout, author)[0].done_at


def stop(run: RunDir, timeout: float, author: str) -> int:
    answer, _ = ask(run, "leave", timeout, author)
    if answer.problem:
        raise RequestRefused(
            f"The job has stopped at step {answer.done_at}, without a checkpoint: {answer.problem}"
        )
    return answer.done_at


def pull(
    run: RunDir, name: str, rows: Sequence[int] | None, timeout: float, max_bytes: int | None = None
) -> Pulled:
    try:
        variable = schema_of(run).resolve(name)
        ranges = () if rows is None else ranges_of(rows)
        _check_size(variable, ranges, max_bytes)
    except UpdateRefused as error:
        raise NotFound(str(error)) from error
    wanted = None if rows is None else tuple(rows)
    if rows is not None and not wanted:
        raise NotFound("Rows are wanted, and none is named.")
    if not (seen := see(run)).running:
        return _from_checkpoint(run, seen, variable, wanted, ranges, max_bytes)
    answer, values = ask(run, "pull", timeout, variable=variable, rows=ranges)
    if values is None:
        raise NoAnswer("The job has answered without values.")
    with _answer_is_read():
        digests = {int(rank): str(digest) for rank, digest in answer.details["digests"].items()}
        return Pulled(variable.name, answer.done_at, digests[0], "job", values, wanted, digests)


@contextlib.contextmanager
def _answer_is_read() -> Iterator[None]:
    """Anybody may write an answer into the inbox."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestFailed(f"The answer to the request is not valid ({error!r}).") from error


def _check_size(variable: Variable, ranges: Rows, max_bytes: int | None) -> None:
    nbytes = inbox.checked_rows(variable, ranges)
    if max_bytes is not None and nbytes > max_bytes:
        raise RequestRefused(
            f"These are too many values of {variable.name}. Expected: at most {max_bytes} bytes. "
            f"Received: {nbytes}. Ask for some rows at a time"
        )


def _from_checkpoint(
    run: RunDir,
    seen: SeenJob,
    variable: Variable,
    wanted: tuple[int, ...] | None,
    ranges: Rows,
    max_bytes: int | None,
) -> Pulled:
    store = CheckpointStore(run)
    last = store.last()
    if last is None:
        raise NotFound(f"{not_running_text(seen)}, and it has no checkpoint.")
    with store.open(last.step) as reader:
        try:  # The variable may have another shape there.
            _check_size(reader.manifest.schema.resolve(variable.name), ranges, max_bytes)
            array = reader.read(variable.name) if wanted is None else reader.read_rows(variable.name, ranges)
        except (CheckpointError, UpdateRefused) as error:
            raise NotFound(str(error)) from error
    return Pulled(variable.name, last.step, digest_array(array), f"checkpoint {last.step}", array, wanted)


def _waited_for(seen: SeenJob, workers: int) -> str:
    """What keeps a job from answering, as far as the workers' notes tell."""
    now = seen.now
    limit = absent_secs(workers)
    heard = {note.rank: note for note in seen.notes if now - note.time <= limit}
    silent = [rank for rank in range(workers) if rank not in heard]
    if silent:
        return f"Waited for {workers_text(silent)}, not heard of for {age(limit)} or more."
    if not any(note.training for note in heard.values()):
        return "Waited for the training to begin: no worker is inside a training loop."
    steps = sorted({note.step for note in heard.values()})
    if len(steps) > 1:
        behind = workers_text(sorted(note.rank for note in heard.values() if note.step == steps[0]))
        verb = "are" if " and " in behind else "is"
        return f"Waited for the next step: {behind} {verb} behind, at step {steps[0]}, others at {steps[-1]}."
    oldest = min(heard.values(), key=lambda note: note.time)
    told = f"; worker {oldest.rank} was not heard of for the longest, {age(now - oldest.time)}"
    return (
        f"Waited for the next step: every worker is at step {steps[0]}, and one that hangs keeps the "
        f"others there{told if now - oldest.time > _LATE_SECS else ''}. Look into the logs of all."
    )


# A file that somebody else sent.


def new_upload(run_dir: RunDir) -> RunPath:
    """A name beside the inbox for a file on its way in. If it is left behind, the job removes it."""
    return below(run_dir) / "inbox" / f"{TEMPORARY}upload-{secrets.token_hex(8)}"


def update_in(
    path: RunPath,
    *,
    operation: EditKind | None = None,
    weight: float | None = None,
    id: str | None = None,  # noqa: A002 - the name of the thing
    note: str | None = None,
    author: str = "",
    reset_slots: bool = False,
    allow_nonfinite: bool = False,
) -> Update:
    """The update in a file that nobody else changes. Its arrays are views of the mapped file."""
    try:
        update = _read(path, operation, weight)
    except FileDamaged as error:
        verdict = f": {error.problem}" if error.problem else ""
        raise UpdateRefused(
            f"{_SOURCE} {error.verdict}{verdict}",
            expected=error.expected,
            received=error.received,
            remedy=error.remedy,
        ) from error
    blank = Update(
        id=id if id is not None else update.id if update.id_was_given or operation is None else None,
        note=update.note if note is None else note,
        author=update.author if update.author else author,
        reset_slots=reset_slots or update.reset_slots,
        allow_nonfinite=allow_nonfinite or update.allow_nonfinite,
    )
    return Update.from_parts(blank.describe() | {"edits": update.describe()["edits"]}, update.arrays())


def _read(path: RunPath, operation: EditKind | None, weight: float | None) -> Update:
    outline_of(path, max_tensors=MAX_TENSORS)
    with os.fdopen(path.open(os.O_RDONLY), "rb") as opened:
        content = np.memmap(opened, np.uint8, "r").data
    if operation is None:
        return Update.parse(content, _SOURCE, remedy="Say what to do with them: choose an operation")[0]
    file = parse_tensors(content, _SOURCE, max_tensors=MAX_TENSORS)
    if "replicast" in file.metadata:
        raise UpdateRefused(
            f"{_SOURCE} says itself what to do with its tensors",
            expected="a plain file of tensors",
            received="a saved update",
            remedy="Send it without an operation",
        )
    return Update().replaced(edits_of_tensors(file.tensors, operation, weight))
