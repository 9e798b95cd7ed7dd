"""Removal from the journal: bytes that no attempt will need again, and files that do not count."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from replicast.core.entries import Committed, Refused, Withdrawn
from replicast.files import remove_leftovers
from replicast.storage.entry_files import PAYLOAD, EntryFile, StoredBefore, bytes_path
from replicast.storage.groups import entry_kinds, entry_path, group_directory, group_numbers, last_claim


def unneeded_payloads(files: Iterable[EntryFile], held: Container[int]) -> Iterator[EntryFile]:
    """The entries whose bytes no attempt will need again: payloads, and values before updates.

    Args:
        files: All entries that count, in order.
        held: The sequence numbers of the updates that every kept checkpoint contains.
    """
    open_: dict[str, dict[str, EntryFile]] = {}  # by id and digest: neither committed nor ended
    kept: dict[int, EntryFile] = {}  # the last values before each update
    for file in files:
        match file.stored:
            case StoredBefore(sequence, problem=""):
                if sequence in kept:
                    yield kept[sequence]  # A later attempt has applied the update again.
                kept[sequence] = file
            case Committed(sequence, id_, digest):
                payload = open_.get(id_, {}).pop(digest, None)
                if payload is not None and sequence in held:
                    yield payload
            case Withdrawn(id_) | Refused(id_, whole=True):
                yield from open_.pop(id_, {}).values()
            case _ if file.payload_key is not None:
                id_, digest = file.payload_key
                earlier = open_.setdefault(id_, {}).pop(digest, None)
                if earlier is not None:
                    yield earlier  # A later attempt has written the same payload again.
                open_[id_][digest] = file
    yield from (file for sequence, file in kept.items() if sequence in held)


def remove_void(run_dir: Path, group: int) -> None:
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


def _remove_void_of(directory: Path, counted: int) -> None:
    remove_leftovers(directory, older_than_secs=0.0)
    kinds = entry_kinds(directory)
    void = [entry_path(directory, number, kind) for number, kind in kinds.items() if number > counted]
    payloads = {
        bytes_path(directory, number, kind)
        for number, kind in kinds.items()
        if kind in ("payload", "before") and number <= counted
    }
    void.extend(path for path in directory.glob(f"*{PAYLOAD}") if path not in payloads)
    for path in void:
        path.unlink(missing_ok=True)
