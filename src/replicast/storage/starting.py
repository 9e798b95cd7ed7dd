"""What a start of the job needs of the journal, checked before the first step.

Whatever this start has to apply must be known and on disk. Otherwise the start stops, and says which file is
missing or damaged, what that means, and what to do next.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from collections.abc import Iterator, Mapping, Sequence

from replicast.core.entries import Saved
from replicast.core.history import History
from replicast.errors import FileDamaged, PayloadRemoved, ReplicastError
from replicast.files import RunDir, RunPath, below
from replicast.storage.checkpoint import CheckpointStore
from replicast.storage.damage import DamagedEntry, Start, why_a_record, why_needed
from replicast.storage.entry_files import EntryFile, StoredPayload

logger = logging.getLogger("replicast")

_Key = tuple[str, str]


def check_records(run_dir: RunDir, files: Sequence[EntryFile], damaged: Sequence[DamagedEntry]) -> None:
    """Checks that the record of every committed update is known: the next one follows them.

    Raises:
        FileDamaged: One may be missing or damaged.
    """
    for one in damaged:
        why = why_a_record(one, files)
        if why:
            raise stopped(run_dir, one.error, why)


def check_start(
    run_dir: RunDir,
    files: Sequence[EntryFile],
    damaged: Sequence[DamagedEntry],
    payloads: Mapping[_Key, EntryFile],
    saved: Saved | None,
) -> None:
    """Checks that all is known and on disk that a start from a checkpoint has to apply.

    Warns of damaged entries that this start does not need.

    Args:
        run_dir: The run directory.
        files: The entries that count, in order.
        damaged: Those that cannot be read.
        payloads: The entries of payloads, by id and digest.
        saved: The checkpoint; None if the job starts from scratch.

    Raises:
        FileDamaged: Something is missing or damaged.
        PayloadRemoved: The job starts from scratch, and the values of updates were removed since.
    """
    history = History(file.entry() for file in files)
    start = Start(history, damaged, saved, _waiting(run_dir) if damaged else {})
    for one in damaged:
        why = why_needed(one, files, start)
        if why:
            raise stopped(run_dir, one.error, why)
    for key, what in _needed(start):
        _check_payload(run_dir, key, what, payloads.get(key), start)
    for one in damaged:
        logger.warning("%s This start does not need it; the file is left in place", one)


def stopped(run_dir: RunDir, error: FileDamaged, why: str) -> FileDamaged:
    """The error of a start that needs a file: what it means, and what to do next."""
    begin, checkpoint = "start the job in a new run directory", _last_checkpoint(run_dir)
    if checkpoint is not None:
        begin = (
            f"go on in a new run directory: copy {checkpoint} to NEW/checkpoints/ and start the job in NEW"
        )
    problem = f"{error.problem.removesuffix('.')}. The job cannot start without it: {why}"
    expected, received = error.expected, error.received
    remedy = f"Restore the file from a backup, or {begin}"
    return FileDamaged(
        error.path, problem, verdict=error.verdict, expected=expected, received=received, remedy=remedy
    )


def _needed(start: Start) -> Iterator[tuple[_Key, str]]:
    """The id and digest of each update that this start has to apply, and why."""
    for record in start.history.after(start.holds):
        what = f"update {record.sequence}, committed at step {record.step}"
        yield (record.id, record.digest), f"{what}, must be applied again"
    for one in start.history.scheduled.values():
        yield (one.id, one.digest), f"update {one.id} is scheduled for step {one.at_step}"
    for id_, digest in start.pending.items():
        yield (id_, digest), f"the checkpoint proposes update {id_} again"


def _check_payload(run_dir: RunDir, key: _Key, what: str, file: EntryFile | None, start: Start) -> None:
    if file is None or not isinstance(file.stored, StoredPayload):
        lost = [one.error for one in start.damaged if one.may_be("payload")]
        nothing = FileDamaged(below(run_dir) / "groups", f"the journal has no payload of update {key[0]}")
        raise stopped(run_dir, lost[0] if lost else nothing, what)
    path, nbytes = file.payload_path(run_dir), file.stored.nbytes
    try:
        status = path.stat()
    except OSError as error:
        # Retention keeps what any checkpoint needs, so only a start from scratch can need what it removed.
        if isinstance(error, FileNotFoundError) and start.saved is None and _last_checkpoint(run_dir):
            why = "every checkpoint that is kept contains it, and this start has restored none"
            raise PayloadRemoved(key[0], why) from error
        raise stopped(
            run_dir, FileDamaged(path, str(error.strerror), verdict="cannot be read"), what
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        found = FileDamaged(
            path, "it has another size", expected=f"{nbytes} bytes", received=f"{status.st_size}"
        )
        raise stopped(run_dir, found, what)


def _last_checkpoint(run_dir: RunDir) -> RunPath | None:
    with contextlib.suppress(ReplicastError, OSError):
        store = CheckpointStore(run_dir)
        last = store.last()
        return None if last is None else store.path(last.step)
    return None


def _waiting(run_dir: RunDir) -> dict[str, float]:
    """When each update in the inbox was submitted, by id."""
    found = {}
    for path in (below(run_dir) / "inbox").glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name.removesuffix(".safetensors")] = path.stat().st_mtime
    return found
