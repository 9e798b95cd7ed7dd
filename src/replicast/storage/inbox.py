"""The inbox of a run directory: how updates from outside enter a job, and how their authors get answers.

inbox/<id>.safetensors      a waiting update; renamed into place once it is complete
inbox/<id>.stage.json       its stage; kept for an hour after the end, for authors that still wait
inbox/<id>.withdraw.json    asks the job that has taken the update to withdraw it
inbox/<id>.<random>.aside   the update while somebody withdraws it
refused/<id>.json           why it was refused; the update's file is next to it

Taking and withdrawing an update may race. The job first notes that it has taken the update and then opens the
file; a withdrawal first renames the file and then reads the note. So the second of the two sees the first.

A withdrawal may be killed while the update is aside. So anybody may put it back at any time, and the job does
before it looks for updates. The one operation on the file that is aside decides: the update is withdrawn if
the withdrawal removes it, and waits if it is put back first. Each withdrawal uses a name of its own: it must
not remove what was put back, taken and set aside again by another.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicast.core.records import Stage
from replicast.errors import FileDamaged, UpdateIdInUse, UpdateRefused, refusal_of
from replicast.files import (
    RunDir,
    RunPath,
    TensorFile,
    below,
    json_bytes,
    make_durably,
    outline_of,
    parse_tensors,
    read_json,
    read_tensor_bytes,
    remove_leftovers,
    sync_directory,
    write_durably,
    write_quickly,
)
from replicast.processes import is_alive, is_on_this_host, this_process
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.updates import has_promised, refused
from replicast.update.trial import Trial
from replicast.update.update import MAX_STEP, MAX_TENSORS, Update, checked_id

_UPDATE, _STAGE, _WITHDRAW, _ASIDE = ".safetensors", ".stage.json", ".withdraw.json", ".aside"
_KEEP_SECS = 3600.0
_MAX_NOTE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Waiting:
    """An update that waits in the inbox."""

    id: str
    path: RunPath
    nbytes: int
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """An update submitted from outside the job."""

    update: Update
    at_step: int | None = None
    trial: Trial | None = None
    reverts: int | None = None
    forced: bool = False


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
    path = _inbox(run_dir) / f"{update.id}{_UPDATE}"
    step = _checked_step(at_step)
    if path.exists():
        is_other = UpdateIdInUse(
            "Another update with this id waits in the inbox",
            expected="a unique id, or the same content",
            received=update.id,
        )

        def check_size(other: Update) -> None:
            if other.nbytes != update.nbytes:
                raise is_other

        other = read(path, check=check_size)
        wanted = (update.content_digest(), step, trial, reverts)
        if (other.update.content_digest(), other.at_step, other.trial, other.reverts) != wanted:
            raise is_other
        return path
    make_durably(path.parent)
    # Before the update is in place: after that, the job writes its stage. An old refusal no longer applies.
    (_refused(run_dir) / f"{update.id}.json").unlink(missing_ok=True)
    note_stage(run_dir, update.id, Stage.PROPOSED)
    extra: dict[str, Any] = {} if trial is None else {"trial": trial.to_json()}
    if reverts is not None:
        extra |= {"reverts": reverts, "forced": forced}
    write_durably(path, update.file_chunks({"at_step": step, **extra}))
    return path


def waiting(run_dir: RunDir) -> list[Waiting]:
    """The updates that wait in the inbox, oldest first, without those still being written."""
    found = []
    for path in _inbox(run_dir).glob(f"*{_UPDATE}"):
        if path.name.startswith("."):
            continue
        with contextlib.suppress(FileNotFoundError):  # It was removed in the meantime.
            status = path.stat()
            name = path.name.removesuffix(_UPDATE)
            found.append(Waiting(name, path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: (entry.submitted_at, entry.id))


def read(
    path: RunPath, max_bytes: int | None = None, check: Callable[[Update], None] = lambda _update: None
) -> Submitted:
    """Reads an update from the inbox, with its step and trial.

    Anybody may have put it there: before memory is allocated for its values, all that its header and its size
    say is checked, and that it is on disk.
    """
    content = read_tensor_bytes(
        path,
        max_tensors=MAX_TENSORS,
        max_bytes=max_bytes,
        follow=False,
        holes=False,
        check=lambda outline: check(_submitted(path, outline).update),
    )
    return _submitted(path, parse_tensors(content, path.name, max_tensors=MAX_TENSORS))


def _submitted(path: RunPath, file: TensorFile) -> Submitted:
    """The update in a file of the inbox, or its outline in the outline of a file."""
    run_dir = path.parent.parent
    later = _refused(run_dir) / path.name
    command = f"replicast push {shlex.quote(str(run_dir))} --add {shlex.quote(str(later))}"
    remedy = f"Say what to do with them, for example: {command}"
    update, description = Update.of_file(file, path.name, remedy)
    if path.name != f"{update.id}{_UPDATE}":
        raise UpdateRefused(
            "The file in the inbox must be named like the update in it",
            expected=f"{update.id}{_UPDATE}",
            received=path.name,
        )
    step, trial = _checked_step(description.get("at_step")), _checked_trial(description.get("trial"))
    reverts, forced = _checked_step(description.get("reverts")), description.get("forced", False)
    if reverts is not None and (update.edits or step is not None or trial is not None):
        raise UpdateRefused("A revert has no edits, step or trial of its own", received=repr(update)[:200])
    return Submitted(update, step, trial, reverts, forced is True)


def take(
    run_dir: RunDir,
    path: RunPath,
    max_bytes: int | None = None,
    check: Callable[[Update], None] = lambda _update: None,
) -> Submitted | None:
    """Reads an update that the job will propose: `withdraw` cannot remove it any more. Only worker 0.

    The header is checked first: of what is not an update, or not one for this job, nothing is noted.
    """
    try:
        check(_submitted(path, outline_of(path, max_tensors=MAX_TENSORS)).update)
        note_stage(run_dir, path.name.removesuffix(_UPDATE), Stage.PROPOSED, taken_by=this_process())
        return read(path, max_bytes, check)  # Checks again: it may be another file by now.
    except FileDamaged as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def withdraw(run_dir: RunDir, update_id: str, *, job_is_running: Callable[[], bool]) -> bool:
    """Removes a waiting update, unless a job has taken it already."""
    if Path(update_id).name != update_id:
        return False
    path = _inbox(run_dir) / f"{update_id}{_UPDATE}"
    aside = path.with_name(f"{update_id}.{secrets.token_hex(8)}{_ASIDE}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    taken = True
    try:
        taken = _is_taken(run_dir, update_id, job_is_running=job_is_running)
    finally:
        if taken:
            _put_back(aside)
    if taken:
        return False
    try:
        aside.unlink()
    except FileNotFoundError:  # It was put back, and may be taken by now.
        return False
    (_inbox(run_dir) / f"{update_id}{_STAGE}").unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def put_back(run_dir: RunDir) -> None:
    """Puts back what withdrawals have set aside: one that was killed has had no effect.

    What cannot be put back stays: a name that is too long, or another user's file. It stops no other update.
    """
    for aside in _inbox(run_dir).glob(f"*{_ASIDE}"):
        with contextlib.suppress(OSError):
            _put_back(aside)


def _put_back(aside: RunPath) -> None:
    path = aside.with_name(f"{aside.name.rsplit('.', 2)[0]}{_UPDATE}")
    with contextlib.suppress(
        FileNotFoundError
    ):  # Its withdrawal has just ended, or somebody else puts it back.
        if path.exists():  # Submitted again since: that one counts.
            aside.unlink()
        else:
            aside.rename(path)


def request_withdrawal(run_dir: RunDir, update_id: str) -> RunPath:
    """Asks a running job to withdraw an update that it has taken and not yet applied."""
    path = _inbox(run_dir) / f"{checked_id(update_id)}{_WITHDRAW}"
    make_durably(path.parent)
    write_quickly(path, json.dumps({"requested_at": time.time()}))
    return path


def take_withdrawals(run_dir: RunDir) -> list[str]:
    """Reads and removes all withdrawal requests; returns the ids of their updates. Only worker 0."""
    found = []
    for path in _inbox(run_dir).glob(f"*{_WITHDRAW}"):
        update_id = path.name.removesuffix(_WITHDRAW)
        with contextlib.suppress(OSError):  # Gone, or something that is not a request: others are read.
            path.unlink()
            found.append(update_id)
    return found


def clean(run_dir: RunDir) -> None:
    """Removes the notes of updates that left the inbox long ago, and half-written files."""
    inbox = _inbox(run_dir)
    remove_leftovers(inbox)
    for path in list(inbox.glob(f"*{_STAGE}")):
        update = path.with_name(f"{path.name.removesuffix(_STAGE)}{_UPDATE}")
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= _KEEP_SECS and not update.exists():
                path.unlink()


def refuse(run_dir: RunDir, path: RunPath, error: Exception, *, durably: bool = True) -> None:
    """Writes why an update is refused, then moves its file out of the inbox."""
    refused = _refused(run_dir)
    make_durably(refused)
    reason = json_bytes({"reason": refusal_of(error).to_json(), "refused_at": time.time()})
    update_id = path.name.removesuffix(_UPDATE)
    if durably:
        write_durably(refused / f"{update_id}.json", [reason])
    else:
        write_quickly(refused / f"{update_id}.json", reason.decode())
    with contextlib.suppress(FileNotFoundError):
        path.rename(refused / path.name)
        if durably:
            sync_directory(refused)
    if durably or (_inbox(run_dir) / f"{update_id}{_STAGE}").exists():
        note_stage(run_dir, update_id, Stage.REFUSED)


def done(path: RunPath) -> None:
    """Removes an update that the job has taken. No-op if it is gone already."""
    path.unlink(missing_ok=True)


def refusals(run_dir: RunDir) -> dict[str, UpdateRefused]:
    """Why updates were refused, by id. A damaged file yields an error that says so, and hides no other."""
    found = {}
    for path in sorted(_refused(run_dir).glob("*.json")):
        if not path.name.startswith("."):
            found[path.name.removesuffix(".json")] = _reason_in(path)
    return found


def note_stage(run_dir: RunDir, update_id: str, stage: Stage, **fields: Any) -> None:
    """Writes the stage of an update, for its author outside the job."""
    path = _inbox(run_dir) / f"{update_id}{_STAGE}"
    make_durably(path.parent)
    write_quickly(path, json.dumps({**fields, "stage": str(stage), "time": time.time()}))


def stage_of(run_dir: RunDir, update_id: str) -> dict[str, Any] | None:
    """The last note about an update; None if there is none, or it cannot be read."""
    if Path(update_id).name != update_id:
        return None
    try:
        return read_json(_inbox(run_dir) / f"{update_id}{_STAGE}", max_bytes=_MAX_NOTE_BYTES)
    except FileDamaged:  # Written without a sync: a power failure may have damaged it.
        return None


def _is_taken(run_dir: RunDir, update_id: str, *, job_is_running: Callable[[], bool]) -> bool:
    taker = (stage_of(run_dir, update_id) or {}).get("taken_by")
    if isinstance(taker, dict):
        alive = is_alive(taker) if is_on_this_host(taker) else None
        if job_is_running() if alive is None else alive:
            return True
    # A job that died may have committed or scheduled it: the next attempt applies it in any case.
    if has_promised(run_dir, update_id):
        return True
    pending = {one.id for manifest in CheckpointStore(run_dir).list() for one in manifest.pending}
    return update_id in pending and update_id not in refused(run_dir)


def _reason_in(path: RunPath) -> UpdateRefused:
    try:
        reason = read_json(path, max_bytes=_MAX_NOTE_BYTES).get("reason")
    except FileDamaged as error:
        return UpdateRefused(f"The reason cannot be read: {error}")
    if not isinstance(reason, dict):
        return UpdateRefused(f"The reason cannot be read: {path} has none")
    return UpdateRefused.from_json(reason)


def _inbox(run_dir: RunDir) -> RunPath:
    return below(run_dir) / "inbox"


def _refused(run_dir: RunDir) -> RunPath:
    return below(run_dir) / "refused"


def _checked_step(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < MAX_STEP):
        raise UpdateRefused(
            "The step is not valid", expected="an integer of at least 0", received=repr(value)[:200]
        )
    return value


def _checked_trial(value: Any) -> Trial | None:
    if value is None:
        return None
    try:
        return Trial.from_json(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise UpdateRefused(f"The trial is not valid: {error}", received=repr(value)[:200]) from error
