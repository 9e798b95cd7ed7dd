"""The inbox of a run directory: how updates from outside a job come in, and how their authors hear back.

inbox/<id>.safetensors      waits; renamed in when it is complete
inbox/<id>.stage.json       how far it has come; kept for an hour after the end, for whoever waits for it
inbox/<id>.withdraw.json    asks the job that has taken it to take it back
refused/<id>.json           why it was refused; the file itself lies beside it

Who takes an update and who withdraws it may meet. The job first notes that it has taken it and then opens the
file; who withdraws first renames the file and then looks at the note. Whoever is second sees the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicast.core.stage import Stage
from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import (
    TEMPORARY,
    check_tensor_file,
    json_bytes,
    make_durably,
    read_json,
    read_tensor_bytes,
    remove_leftovers,
    sync_directory,
    write_durably,
    write_quickly,
)
from replicast.processes import is_alive, is_on_this_host, this_process
from replicast.storage.checkpoint import CheckpointStore
from replicast.storage.updates import has_promised, refused
from replicast.update.parts import MAX_STEP, MAX_TENSORS, checked_id
from replicast.update.trial import Trial
from replicast.update.update import Update

_UPDATE, _STAGE, _WITHDRAW = ".safetensors", ".stage.json", ".withdraw.json"
_KEEP_SECS = 3600.0
_MAX_NOTE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Waiting:
    """An update that waits in the inbox.

    Attributes:
        id: Its id, as its file's name says.
        path: Its file.
        nbytes: The size of the file.
        submitted_at: Seconds since 1970.
    """

    id: str
    path: Path
    nbytes: int
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """What somebody outside of the job wants.

    Attributes:
        update: The update.
        at_step: The step that its author chose.
        trial: What it has to prove.
    """

    update: Update
    at_step: int | None = None
    trial: Trial | None = None


def submit(run_dir: Path, update: Update, at_step: int | None = None, trial: Trial | None = None) -> Path:
    """Puts an update into the inbox, whole and durable. Submitting the same again changes nothing.

    Args:
        run_dir: The run directory.
        update: The update.
        at_step: The step at which to apply it; as soon as possible unless given.
        trial: What it has to prove, if it is on trial.

    Returns:
        Its file in the inbox, which is gone when the job has taken it.

    Raises:
        UpdateRefused: Another update of this id waits there, or the step is none.
        OSError: It cannot be written.
    """
    path = _inbox(run_dir) / f"{update.id}{_UPDATE}"
    step = _checked_step(at_step)
    if path.exists():
        other = read(path)
        wanted = (update.content_digest(), step, trial)
        if (other.update.content_digest(), other.at_step, other.trial) != wanted:
            raise UpdateRefused(
                "Another update of this id waits in the inbox",
                expected="an id of its own, or the same content",
                received=update.id,
            )
        return path
    make_durably(path.parent)
    # Before the update is there: from then on the job writes its stage. An old refusal is none of this one.
    (_refused(run_dir) / f"{update.id}.json").unlink(missing_ok=True)
    note_stage(run_dir, update.id, Stage.PROPOSED)
    on_trial = {} if trial is None else {"trial": trial.to_json()}
    write_durably(path, update.file_chunks({"at_step": step, **on_trial}))
    return path


def waiting(run_dir: Path) -> list[Waiting]:
    """What waits in the inbox, the oldest first. What is still being written is not there yet."""
    found = []
    inbox = _inbox(run_dir)
    for path in inbox.iterdir() if inbox.is_dir() else ():
        if path.name.startswith(".") or not path.name.endswith(_UPDATE):
            continue
        with contextlib.suppress(FileNotFoundError):  # Somebody took it away in the meantime.
            status = path.lstat()
            name = path.name.removesuffix(_UPDATE)
            found.append(Waiting(name, path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: (entry.submitted_at, entry.id))


def read(path: Path, max_bytes: int | None = None) -> Submitted:
    """An update from the inbox, and what its author wants of it.

    Args:
        path: Its file.
        max_bytes: The largest file that is read; 4 GiB unless given.

    Raises:
        UpdateRefused: The file cannot be read, is damaged, too large, no update, or has another's name.
    """
    run_dir = path.parent.parent
    later = _refused(run_dir) / path.name
    command = f"replicast push {shlex.quote(str(run_dir))} --add {shlex.quote(str(later))}"
    content = read_tensor_bytes(path, max_tensors=MAX_TENSORS, max_bytes=max_bytes, follow=False)
    update, description = Update.parse(
        content, path.name, remedy=f"Say what to do with them, for example: {command}"
    )
    if path.name != f"{update.id}{_UPDATE}":
        raise UpdateRefused(
            "The file in the inbox must be named like the update in it",
            expected=f"{update.id}{_UPDATE}",
            received=path.name,
        )
    step, trial = _checked_step(description.get("at_step")), _checked_trial(description.get("trial"))
    return Submitted(update, step, trial)


def take(run_dir: Path, path: Path, max_bytes: int | None = None) -> Submitted | None:
    """Reads an update as the job that will propose it: from now on it cannot be withdrawn. Only worker 0.

    The header comes first: of what is no update, no more is read, and nothing is noted.

    Returns:
        What `read` returns; None when the update was withdrawn in the meantime.

    Raises:
        UpdateRefused: As in `read`.
        OSError: The note cannot be written.
    """
    try:
        check_tensor_file(path, max_tensors=MAX_TENSORS)
        note_stage(run_dir, path.name.removesuffix(_UPDATE), Stage.PROPOSED, taken_by=this_process())
        return read(path, max_bytes)
    except UpdateRefused as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def withdraw(run_dir: Path, update_id: str, *, job_is_running: Callable[[], bool]) -> bool:
    """Removes an update that waits, unless a job has taken it already.

    Args:
        run_dir: The run directory.
        update_id: The update's id.
        job_is_running: Asked when a job has taken it and its process cannot be seen from here, or not be told
            from another one that has its number by now.

    Returns:
        True when the update is gone and nobody will apply it. False when it was not there, or it is too late:
        then it is where it was.

    Raises:
        FileDamaged: The journal cannot tell whether it is committed; it is where it was.
        OSError: It cannot be removed.
    """
    if Path(update_id).name != update_id:
        return False
    path = _inbox(run_dir) / f"{update_id}{_UPDATE}"
    aside = path.with_name(f"{TEMPORARY}withdrawn-{os.getpid()}-{time.monotonic_ns()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    taken = True
    try:
        taken = _is_taken(run_dir, update_id, job_is_running=job_is_running)
    finally:
        if taken:
            aside.rename(path)
    if taken:
        return False
    aside.unlink(missing_ok=True)
    (_inbox(run_dir) / f"{update_id}{_STAGE}").unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def request_withdrawal(run_dir: Path, update_id: str) -> Path:
    """Asks a running job to take back an update that it has taken and not applied.

    Returns:
        The request, which is gone when the job has heard it.

    Raises:
        OSError: It cannot be written.
    """
    path = _inbox(run_dir) / f"{checked_id(update_id)}{_WITHDRAW}"
    make_durably(path.parent)
    write_quickly(path, json.dumps({"requested_at": time.time()}))
    return path


def take_withdrawals(run_dir: Path) -> list[str]:
    """The ids of the updates that somebody wants back; the requests are gone then. Only worker 0."""
    found = []
    for path in _inbox(run_dir).glob(f"*{_WITHDRAW}"):
        update_id = path.name.removesuffix(_WITHDRAW)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            found.append(update_id)
    return found


def clean(run_dir: Path) -> None:
    """Removes what nobody needs any more: notes of updates that left long ago, and half-written files.

    Raises:
        OSError: Something cannot be removed.
    """
    inbox = _inbox(run_dir)
    remove_leftovers(inbox)
    for path in list(inbox.glob(f"*{_STAGE}")):
        update = path.with_name(f"{path.name.removesuffix(_STAGE)}{_UPDATE}")
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= _KEEP_SECS and not update.exists():
                path.unlink()


def refuse(run_dir: Path, path: Path, error: UpdateRefused, *, durably: bool = True) -> None:
    """Writes down why an update is refused, then moves its file out of the inbox.

    Args:
        run_dir: The run directory.
        path: Its file in the inbox.
        error: Why.
        durably: Whether to wait for the disk. Thousands of files that are none must not keep others waiting,
            and after a power cut they are refused again.

    Raises:
        OSError: It cannot be written.
    """
    refused = _refused(run_dir)
    make_durably(refused)
    reason = json_bytes({"reason": error.to_json(), "refused_at": time.time()})
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


def done(path: Path) -> None:
    """Removes an update that the job has taken. Nothing happens when it is gone already."""
    path.unlink(missing_ok=True)


def refusals(run_dir: Path) -> dict[str, UpdateRefused]:
    """Why updates were refused, by id. A damaged file is a reason that cannot be read, and hides no other."""
    found = {}
    for path in sorted(_refused(run_dir).glob("*.json")):
        if not path.name.startswith("."):
            found[path.name.removesuffix(".json")] = _reason_in(path)
    return found


def note_stage(run_dir: Path, update_id: str, stage: Stage, **fields: Any) -> None:
    """Tells whoever waits outside how far an update has come.

    Args:
        run_dir: The run directory.
        update_id: The update's id.
        stage: How far it has come.
        **fields: What else to say, as JSON values.

    Raises:
        OSError: It cannot be written.
    """
    path = _inbox(run_dir) / f"{update_id}{_STAGE}"
    make_durably(path.parent)
    write_quickly(path, json.dumps({**fields, "stage": str(stage), "time": time.time()}))


def stage_of(run_dir: Path, update_id: str) -> dict[str, Any] | None:
    """What was last noted of an update, or None when nothing was, or nothing that can be read."""
    if Path(update_id).name != update_id:
        return None
    try:
        return read_json(_inbox(run_dir) / f"{update_id}{_STAGE}", max_bytes=_MAX_NOTE_BYTES)
    except FileDamaged:  # Written without waiting for the disk: a power cut may have taken it.
        return None


def _is_taken(run_dir: Path, update_id: str, *, job_is_running: Callable[[], bool]) -> bool:
    taker = (stage_of(run_dir, update_id) or {}).get("taken_by")
    if isinstance(taker, dict):
        alive = is_alive(taker) if is_on_this_host(taker) else None
        if job_is_running() if alive is None else alive:
            return True
    # A job that died may have promised it: the next one will apply it, whatever lies in the inbox.
    if has_promised(run_dir, update_id):
        return True
    pending = {one.id for manifest in CheckpointStore(run_dir).list() for one in manifest.pending}
    return update_id in pending and update_id not in refused(run_dir)


def _reason_in(path: Path) -> UpdateRefused:
    try:
        reason = read_json(path, max_bytes=_MAX_NOTE_BYTES).get("reason")
    except FileDamaged as error:
        return UpdateRefused(f"The reason cannot be read: {error}")
    if not isinstance(reason, dict):
        return UpdateRefused(f"The reason cannot be read: {path} has none")
    return UpdateRefused.from_json(reason)


def _inbox(run_dir: Path) -> Path:
    return Path(run_dir) / "inbox"


def _refused(run_dir: Path) -> Path:
    return Path(run_dir) / "refused"


def _checked_step(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < MAX_STEP):
        raise UpdateRefused(
            "The step cannot be used", expected="a whole number from 0 on", received=repr(value)[:200]
        )
    return value


def _checked_trial(value: Any) -> Trial | None:
    if value is None:
        return None
    try:
        return Trial.from_json(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise UpdateRefused(f"The trial cannot be used: {error}", received=repr(value)[:200]) from error
