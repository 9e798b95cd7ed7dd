"""Removal from the journal: bytes that no attempt will need again, and files that do not count."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from replicast.core.entries import Committed, Refused, Scheduled, Withdrawn
from replicast.files import RunDir, RunPath, remove_leftovers
from replicast.storage.entry_files import PAYLOAD, EntryFile, StoredBefore, StoredPayload, bytes_path
from replicast.storage.groups import entry_kinds, entry_path, group_directory, group_numbers, last_claim

REVERTIBLE_BYTES = 2**30
"""The newest updates can be reverted even when no restart needs them: so many of their bytes are kept."""


def unneeded_payloads(
    files: Iterable[EntryFile],
    held: Container[int],
    group: int,
    pending: Container[tuple[str, str]] | None,
) -> Iterator[EntryFile]:
    """The entries whose bytes no attempt will need again: payloads, and values before updates.

    Those of the newest updates are kept, up to `REVERTIBLE_BYTES`: somebody may revert them.

    Args:
        files: All entries that count, in order.
        held: The sequence numbers of the updates that every kept checkpoint contains.
        group: The group that writes: what it has stored may be under way.
        pending: The ids and digests of the updates that kept checkpoints propose again. None if not known.
    """
    open_: dict[str, dict[str, EntryFile]] = {}  # by id and digest: neither committed nor ended
    kept: dict[int, EntryFile] = {}  # the last values before each update
    applied: dict[int, EntryFile] = {}  # the payloads of committed updates that no start needs
    scheduled: set[str] = set()
    for file in files:
        match file.stored:
            case StoredBefore(sequence, problem=""):
                if sequence in kept:
                    yield kept[sequence]  # A later attempt has applied the update again.
                kept[sequence] = file
            case Committed(sequence, id_, digest):
                payload = open_.get(id_, {}).pop(digest, None)
                if payload is not None and sequence in held:
                    applied[sequence] = payload
            case Scheduled(id_):
                scheduled.add(id_)
            case Withdrawn(id_) | Refused(id_, whole=True):
                yield from open_.pop(id_, {}).values()
            case _ if file.payload_key is not None:
                id_, digest = file.payload_key
                earlier = open_.setdefault(id_, {}).pop(digest, None)
                if earlier is not None:
                    yield earlier  # A later attempt has written the same payload again.
                open_[id_][digest] = file
    yield from _beyond_reverting(applied, {one: file for one, file in kept.items() if one in held})
    for id_, payloads in open_.items():
        for digest, file in payloads.items():
            # An attempt that died has left it. No start brings it back but from a checkpoint or the schedule.
            is_left = file.group < group and id_ not in scheduled
            if is_left and pending is not None and (id_, digest) not in pending:
                yield file


def _beyond_reverting(*kept: Mapping[int, EntryFile]) -> Iterator[EntryFile]:
    """Of the bytes of updates, by number, those that are too old to be kept for a revert."""
    room = REVERTIBLE_BYTES
    for sequence in sorted({sequence for files in kept for sequence in files}, reverse=True):
        files = [one[sequence] for one in kept if sequence in one]
        room -= sum(
            file.stored.nbytes for file in files if isinstance(file.stored, StoredBefore | StoredPayload)
        )
        if room < 0:
            yield from files


def remove_void(run_dir: RunDir, group: int) -> None:
    """Removes files of earlier groups that do not count: they use disk space and would confuse readers.

    Args:
        run_dir: The run directory.
        group: The calling group. No-op if a later group has taken over the run.

    Raises:
        FileDamaged: The claim is damaged.
        OSError: Something cannot be removed.
    """
    claim = last_claim(run_dir)
    if claim is None or claim.group != group:
        return
    counted = dict(claim.counted)
    for earlier in group_numbers(run_dir):
        if earlier < group:
            _remove_void_of(group_directory(run_dir, earlier), counted.get(earlier, 0))


def _remove_void_of(directory: RunPath, counted: int) -> None:
    remove_leftovers(directory, older_than_secs=0.0)
    kinds = entry_kinds(directory)
    void = [entry_path(directory, number, kind) for number, kind in kinds.items() if number > counted]
    # Not those of an entry that is missing: it may come back from a backup.
    payloads = {
        bytes_path(directory, number, kind)
        for number in range(1, counted + 1)
        for kind in ("payload", "before")
        if kinds.get(number, kind) == kind
    }
    void.extend(path for path in directory.glob(f"*{PAYLOAD}") if path not in payloads)
    for path in void:
        path.unlink(missing_ok=True)
