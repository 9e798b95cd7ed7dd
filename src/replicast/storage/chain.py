"""The chain of the journal: every entry contains the hash of the one before, so that a changed one shows.

    claim of group 1 ◄── entry 1 ◄── entry 2 ◄── claim of group 2 ◄── entry 1 ◄── …

A claim contains the hash of the last entry before it that counts; the first entry of a group contains the
hash of its claim. The seal of an entry shows damage; the chain shows that an entry was replaced together
with its seal.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replicast.errors import FileDamaged
from replicast.files import RunDir, RunPath, read_bytes
from replicast.storage.groups import CLAIM, Claim, entry_kinds, entry_path, group_directory, last_claim
from replicast.strictjson import parse_object

_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Chain:
    """What the chain of a run shows.

    Attributes:
        length: The number of records, claims included.
        last: The hash of the last one; empty if there is none.
        problems: What does not fit, in words.
    """

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
    """The hash of the last of the entries that count; empty if there is none, or it cannot be read.

    Args:
        run_dir: The run directory.
        counted: Groups in order, each with the number of its entries that count.
    """
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
