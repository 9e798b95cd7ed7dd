"""The chain of the journal: every entry contains the hash of the one before, so that a changed one shows.

    claim of group 1 ◄── entry 1 ◄── entry 2 ◄── claim of group 2 ◄── entry 1 ◄── …

A claim contains the hash of the last entry before it that counts, or of the claim before if there is none.
The seal of an entry shows damage; the chain shows that somebody has replaced an entry together with its seal.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from replicast.errors import FileDamaged
from replicast.files import read_bytes
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


def read_chain(run_dir: Path) -> Chain:
    """Follows the chain through every record of the journal that counts. Reads all of them."""
    try:
        claim = last_claim(run_dir)
    except FileDamaged as error:
        return Chain(0, "", (str(error),))
    length, before, problems = 0, "", list[str]()
    for path in [] if claim is None else _records(run_dir, claim):
        length += 1
        try:
            content = read_bytes(path, max_bytes=_MAX_BYTES, follow=False)
            previous = parse_object(content).get("previous")
        except (FileDamaged, ValueError, OSError) as error:
            problems.append(f"{path}: {error}")
            before = ""
            continue
        if before and previous != before:
            problems.append(f"{path} does not follow the record before it: one of the two was changed")
        before = digest(content)
    return Chain(length, before, tuple(problems))


def last_digest(run_dir: Path, claim: Claim | None) -> str:
    """The hash of the last record that counts under a claim; empty without one."""
    if claim is None:
        return ""
    directory = group_directory(run_dir, claim.group)
    kinds = entry_kinds(directory)
    last = max(kinds, default=0)
    path = entry_path(directory, last, kinds[last]) if last else directory / CLAIM
    return digest(read_bytes(path, max_bytes=_MAX_BYTES, follow=False))


def digest(content: bytes) -> str:
    """The hash of a record's file."""
    return hashlib.sha256(content).hexdigest()
