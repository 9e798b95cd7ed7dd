"""The groups of workers that a run directory has had, and what of each counts. For readers.

    groups/000003/claim.json              what counts of the groups before the third
    groups/000003/run.json                what this group's job is about
    groups/000003/000017.payload.json     an entry of its log (`storage/entry_files.py`)
    groups/000003/000017.safetensors      the bytes of that payload
    checkpoints/00001200-3/               a checkpoint that the third group has written

Each start of a job is a new group, which writes only under names of its own. A group that was thought dead
may go on: the claim of the next group says how many entries, and which checkpoints, were there when it took
over, and readers ignore whatever comes later. Nothing is looked up before a write, so there is no moment
between a look and a write.

A group claims in two steps (`fence.py`): it makes its directory, and only then counts what is there. A writer
looks for a later directory after each write, and before it acts on what it has written. So either it sees
the later group, or the later group counts its write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replicast.errors import FileDamaged
from replicast.files import read_sealed
from replicast.strictjson import described

GROUPS, CLAIM = "groups", "claim.json"
_ENTRY = re.compile(r"([0-9]{6,})\.([a-z]+)\.json")
_CHECKPOINT = re.compile(r"([0-9]{8,})(?:-([0-9]+)(?:-([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one group found when it took a run directory over.

    Attributes:
        group: The group's number, from 1.
        counted: The groups before it whose entries count, the first one first, and how many of each.
        checkpoints: The names of the checkpoints of earlier groups that count.
        attempt: Which start of the job it is, as the launcher counts.
        process: The process of its worker 0.
        claimed_at: Seconds since 1970.
        run: The id of the run, made up by its first group: a checkpoint may be a copy of another run's.
    """

    group: int
    counted: tuple[tuple[int, int], ...]
    checkpoints: tuple[str, ...]
    attempt: int
    process: Mapping[str, Any]
    claimed_at: float
    run: str = ""

    def counts(self, checkpoint: str) -> bool:
        """Whether a checkpoint of this name counts, as long as this is the last claim."""
        group = checkpoint_parts(checkpoint)[1]
        return group in (0, self.group) or checkpoint in self.checkpoints

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Claim:
        """What `to_json` described.

        Raises:
            ValueError: It is no claim.
        """
        return described(cls, "claim", fields)


def group_directory(run_dir: Path, group: int) -> Path:
    """Where a group writes."""
    return Path(run_dir) / GROUPS / f"{group:06d}"


def group_numbers(run_dir: Path) -> list[int]:
    """The groups that have a directory, whether they came to their claim or not; the last one first."""
    try:
        names = [path.name for path in (Path(run_dir) / GROUPS).iterdir()]
    except FileNotFoundError:
        return []
    found = {int(name) for name in names if name.isascii() and name.isdigit() and f"{int(name):06d}" == name}
    return sorted(found, reverse=True)


def last_claim(run_dir: Path, before: int | None = None) -> Claim | None:
    """The claim that says what counts now: the last one, or the last one of an earlier group.

    Raises:
        FileDamaged: It is not what was written.
    """
    for group in group_numbers(run_dir):
        path = group_directory(run_dir, group) / CLAIM
        # One without a claim died before it had taken anything over, or is about to.
        if (before is None or group < before) and path.exists():
            try:
                claim = Claim.from_json(read_sealed(path))
            except ValueError as error:
                raise FileDamaged(path, str(error)) from error
            if claim.group != group:
                raise FileDamaged(path, f"it is the claim of another group. Received: {claim.group}")
            return claim
    return None


def entry_kinds(directory: Path) -> dict[int, str]:
    """The kind of each entry of a group's log, by number."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return {}
    matches = (_ENTRY.fullmatch(name) for name in names)
    return {int(match[1]): match[2] for match in matches if match is not None}


def entry_path(directory: Path, number: int, kind: str) -> Path:
    """The file of an entry."""
    return directory / f"{number:06d}.{kind}.json"


def checkpoint_name(step: int, group: int, count: int) -> str:
    """The name of a checkpoint: the step, the group that wrote it, and how often it has written this step."""
    if count > 1:
        return f"{step:08d}-{group}-{count}"
    return f"{step:08d}-{group}" if group else f"{step:08d}"  # None of a job: a copy, or a patched one.


def checkpoint_parts(name: str) -> tuple[int, int, int]:
    """Step, group and count in the name of a checkpoint.

    Raises:
        ValueError: It is none.
    """
    match = _CHECKPOINT.fullmatch(name)
    parts = (0, 0, 0) if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 1))
    if match is None or checkpoint_name(*parts) != name:
        raise ValueError(f"This is no name of a checkpoint. Received: {name}")
    return parts
