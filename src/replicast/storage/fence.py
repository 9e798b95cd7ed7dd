"""A group's place in a run directory: its claim, and the log of what later starts must know.

See `groups.py` for the files and for why a group that was thought dead cannot do harm.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicast.errors import ClusterError, FileDamaged, JobFailed
from replicast.files import make_durably, sync_directory, write_durably
from replicast.processes import is_alive, is_on_this_host, this_process
from replicast.storage.groups import (
    CLAIM,
    GROUPS,
    Claim,
    checkpoint_parts,
    entry_kinds,
    entry_path,
    group_directory,
    group_numbers,
    last_claim,
)
from replicast.strictjson import sealed

_ENDED = "ended"


class Fence:
    """One group's claim on a run directory. Made by its worker 0, before it writes anything else.

    Args:
        run_dir: The run directory.
        attempt: Which start of the job this is.

    Attributes:
        number: The number of this group.
        directory: Where this group writes what only it may write.
        run: The id of the run.

    Raises:
        ClusterError: A job is running in this directory.
        JobFailed: Another group has taken the run over while this one did.
        FileDamaged: The claim of the group before is not what was written.
        OSError: It cannot be written.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._run_dir = Path(run_dir)
        self._entries = 0
        check_free(self._run_dir)
        groups = self._run_dir / GROUPS
        make_durably(groups)
        with contextlib.suppress(PermissionError):  # Who may not open the parent has not made the run in it.
            # It was there, perhaps: a launcher or a user had made it, and waited for no disk.
            sync_directory(self._run_dir.resolve().parent)
        self.number = _next_number(self._run_dir)
        self.directory = group_directory(self._run_dir, self.number)
        sync_directory(groups)
        # Only now: what an earlier group writes from here on, it will not act on.
        claim = _taken_over(self._run_dir, self.number, attempt)
        self.run = claim.run
        try:
            write_durably(self.directory / CLAIM, [sealed(claim.to_json())])
        except OSError:
            self.check_not_taken_over()  # A later group removes what an earlier one has not finished.
            raise
        self.check()

    def check(self) -> None:
        """Raises when another group has taken the run over. To be called after a write, before acting on it.

        Raises:
            JobFailed: It has. What was written may count or not.
            FileDamaged: The run directory is not there.
        """
        self.check_not_taken_over()
        if not (self.directory / CLAIM).exists():
            raise FileDamaged(self.directory / CLAIM, "it is not there")

    def check_not_taken_over(self) -> None:
        """Raises when another group has taken the run over, also where a write has failed.

        Raises:
            JobFailed: It has.
        """
        if group_directory(self._run_dir, self.number + 1).exists():
            raise JobFailed(
                f"Another group of workers{self._later()} has taken over {self._run_dir}; this one was "
                "thought dead, and what it writes no longer counts"
            )

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Writes the next entry of this group's log, whole and durable. Only one thread may.

        Args:
            kind: What it is.
            fields: What it says, as JSON values.

        Raises:
            JobFailed: Another group has taken the run over.
            OSError: It cannot be written. Nothing is there then; unless only the directory could not be
                synced: the entry is there then, and `entries` counts it.
        """
        number = self._entries + 1
        path = entry_path(self.directory, number, kind)
        try:
            write_durably(path, [sealed({**fields, "group": self.number, "entry": number})])
        finally:
            if path.exists():
                self._entries = number
        self.check()

    @property
    def entries(self) -> int:
        """How many entries this group has written."""
        return self._entries

    def release(self) -> None:
        """The job has ended in good order: another may take the run over at once."""
        with contextlib.suppress(OSError):
            (self.directory / _ENDED).touch()

    def _later(self) -> str:
        with contextlib.suppress(FileDamaged):
            claim = last_claim(self._run_dir)
            if claim is not None and claim.group > self.number:
                return f" (attempt {claim.attempt}, process {claim.process.get('pid')})"
        return ""


def _next_number(run_dir: Path) -> int:
    """Makes the directory of a new group. `mkdir` fails where it is there, so each number has one owner."""
    number = max(group_numbers(run_dir), default=0) + 1
    while True:
        try:
            group_directory(run_dir, number).mkdir()
        except FileExistsError:
            number += 1
        else:
            return number


def _taken_over(run_dir: Path, number: int, attempt: int) -> Claim:
    before = last_claim(run_dir, before=number)
    counted: tuple[tuple[int, int], ...] = ()
    if before is not None:
        entries = max(entry_kinds(group_directory(run_dir, before.group)), default=0)
        counted = (*before.counted, *([(before.group, entries)] if entries else []))
    own = set(group_numbers(run_dir))  # What no group of this run has written, somebody has copied here.
    checkpoints = tuple(
        name
        for name in _checkpoints(run_dir)
        if before is None or before.counts(name) or checkpoint_parts(name)[1] not in own
    )
    run = uuid.uuid4().hex if before is None else before.run
    return Claim(number, counted, checkpoints, attempt, this_process(), time.time(), run)


def _checkpoints(run_dir: Path) -> list[str]:
    """The checkpoints of jobs, by name."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in (run_dir / "checkpoints").iterdir():
            with contextlib.suppress(ValueError):
                if checkpoint_parts(path.name)[1]:
                    found.append(path.name)
    return sorted(found)


def check_free(run_dir: Path) -> None:
    """Looks whether the process that has the run is alive on this host, and has not ended its job.

    Raises:
        ClusterError: It is.
        FileDamaged: Its claim is not what was written.
    """
    claim = last_claim(run_dir)
    if claim is None or (group_directory(run_dir, claim.group) / _ENDED).exists():
        return
    process = claim.process
    if process.get("pid") == os.getpid() or not is_on_this_host(process):
        return
    if is_alive(process):
        raise ClusterError(
            f"A job is running in {run_dir}: process {process.get('pid')} on this host",
            remedy="End it first, or choose another run directory",
        )
