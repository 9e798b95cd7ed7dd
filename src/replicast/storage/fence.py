"""A group's claim on a run directory, and its log of what later attempts must know.

See `groups.py` for the files, and for why a group that was presumed dead cannot do harm.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from replicast.errors import FileDamaged, JobFailed
from replicast.files import RunDir, below, make_durably, sync_directory, write_durably
from replicast.processes import this_process
from replicast.storage.chain import digest, last_digest
from replicast.storage.groups import (
    CLAIM,
    GROUPS,
    RELEASED,
    Claim,
    checkpoint_parts,
    entry_kinds,
    entry_path,
    group_directory,
    group_numbers,
    last_claim,
)
from replicast.strictjson import sealed


class Fence:
    """One group's claim on a run directory. Created by its worker 0, before it writes anything else.

    A job that runs there is ended by it: call `liveness.check_free` before.

    Args:
        run_dir: The run directory.
        attempt: The number of this attempt of the job.

    Attributes:
        number: The number of this group.
        directory: The directory that only this group writes to.
        run: The id of the run.

    Raises:
        JobFailed: Another group took over the run at the same time.
        FileDamaged: The claim of the previous group is damaged.
        OSError: The claim cannot be written.
    """

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = below(run_dir)
        self._entries = 0
        groups = self._run_dir / GROUPS
        make_durably(groups)
        with contextlib.suppress(PermissionError):  # Then this user did not create the run in it.
            # A launcher or a user may have created the run directory without syncing its parent.
            sync_directory(self._run_dir.as_path().resolve().parent)
        self.number = _next_number(self._run_dir)
        self.directory = group_directory(self._run_dir, self.number)
        sync_directory(groups)
        # Only now: an earlier group will not act on anything that it writes from here on.
        claim = _taken_over(self._run_dir, self.number, attempt)
        self.run = claim.run
        content = sealed(claim.to_json())
        self._previous = digest(content)
        try:
            write_durably(self.directory / CLAIM, [content])
        except OSError:
            self.check_not_taken_over()  # A later group removes unfinished files of earlier ones.
            raise
        self.check()

    def check(self) -> None:
        """Raises if another group has taken over the run. Call it after a write, before acting on it.

        Raises:
            JobFailed: Another group has taken over. What was written may or may not count.
            FileDamaged: The run directory is missing.
        """
        self.check_not_taken_over()
        if not (self.directory / CLAIM).exists():
            raise FileDamaged(self.directory / CLAIM, "it is missing")

    def check_not_taken_over(self) -> None:
        """Raises if another group has taken over the run, even after a write has failed.

        Raises:
            JobFailed: Another group has taken over.
        """
        if self.is_taken_over():
            raise JobFailed(
                f"Another group of workers{self._later()} has taken over {self._run_dir}; this one was "
                "presumed dead, and what it writes no longer counts"
            )

    def is_taken_over(self) -> bool:
        """Whether another group has taken over the run."""
        return group_directory(self._run_dir, self.number + 1).exists()

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Writes the next entry of this group's log, atomically and durably. Only for one thread.

        Args:
            kind: The kind of the entry.
            fields: Its content, as JSON values.

        Raises:
            JobFailed: Another group has taken over the run.
            OSError: The entry cannot be written, and nothing is left behind. If only the directory could not
                be synced, the entry exists, and `entries` counts it.
        """
        number = self._entries + 1
        path = entry_path(self.directory, number, kind)
        place = {"group": self.number, "entry": number, "previous": self._previous}
        content = sealed({**fields, **place})
        try:
            write_durably(path, [content])
        except BaseException:
            if not path.exists():
                raise
            self._entries, self._previous = number, digest(content)
            raise
        self._entries, self._previous = number, digest(content)
        self.check()

    @property
    def entries(self) -> int:
        """The number of entries that this group has written."""
        return self._entries

    @property
    def identity(self) -> str:
        """What `sees_group` compares: equal only for this group of this run."""
        return f"{self.number} {self.run}"

    def release(self) -> None:
        """Marks that the job has ended normally: another group may take over the run at once."""
        with contextlib.suppress(OSError):
            os.close((self.directory / RELEASED).open(os.O_WRONLY | os.O_CREAT))

    def _later(self) -> str:
        with contextlib.suppress(FileDamaged):
            claim = last_claim(self._run_dir)
            if claim is not None and claim.group > self.number:
                return f" (attempt {claim.attempt}, process {claim.process.get('pid')})"
        return ""


def _next_number(run_dir: RunDir) -> int:
    """Creates the directory of a new group. `mkdir` fails if it exists, so each number has one owner."""
    number = max(group_numbers(run_dir), default=0) + 1
    while True:
        try:
            group_directory(run_dir, number).mkdir()
        except FileExistsError:
            number += 1
        else:
            return number


def _taken_over(run_dir: RunDir, number: int, attempt: int) -> Claim:
    before = last_claim(run_dir, before=number)
    counted: tuple[tuple[int, int], ...] = ()
    if before is not None:
        entries = max(entry_kinds(group_directory(run_dir, before.group)), default=0)
        counted = (*before.counted, *([(before.group, entries)] if entries else []))
    own = set(group_numbers(run_dir))  # A checkpoint of any other group was copied here by a user.
    checkpoints = tuple(
        name
        for name in _checkpoints(run_dir)
        if before is None or before.counts(name) or checkpoint_parts(name)[1] not in own
    )
    run = uuid.uuid4().hex if before is None else before.run
    previous = last_digest(run_dir, counted)
    return Claim(number, counted, checkpoints, attempt, this_process(), time.time(), run, previous)


def _checkpoints(run_dir: RunDir) -> list[str]:
    """The names of the checkpoints that jobs wrote."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in (below(run_dir) / "checkpoints").iterdir():
            with contextlib.suppress(ValueError):
                if checkpoint_parts(path.name)[1]:
                    found.append(path.name)
    return sorted(found)
