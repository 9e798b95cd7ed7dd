"""The directories of a run's checkpoints, and which of them count."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable

from replicast.files import TEMPORARY, RunDir, RunPath, below, sync_directory
from replicast.storage.groups import checkpoint_name, checkpoint_parts, last_claim

logger = logging.getLogger("replicast")


class Places:
    """The directories of checkpoints, by their names.

    Args:
        run_dir: The run directory.
        group: The number of the group of workers that writes; 0 for readers.

    Attributes:
        directory: Where they are.
    """

    def __init__(self, run_dir: RunDir, group: int) -> None:
        self._run_dir = run_dir
        self._group = group
        self.directory = below(run_dir) / "checkpoints"

    def counting(self) -> dict[int, list[RunPath]]:
        """The directories of the checkpoints that count, by step; those of one step with the newest last.

        Raises:
            FileDamaged: The claim that says what counts is damaged.
        """
        claim = last_claim(self._run_dir)
        counting: dict[int, list[RunPath]] = {}
        for (step, _, _), path in self._named():
            if claim is None or claim.counts(path.name):
                counting.setdefault(step, []).append(path)
        return counting

    def run(self) -> str:
        """The id of the run; empty if no group has claimed it.

        Raises:
            FileDamaged: The claim is damaged.
        """
        claim = last_claim(self._run_dir)
        return "" if claim is None else claim.run

    def new(self, step: int) -> RunPath:
        """A name for a checkpoint of this step that this group has not used."""
        own = [parts[2] for parts, _ in self._named() if parts[:2] == (step, self._group)]
        return self.directory / checkpoint_name(step, self._group, max(own, default=0) + 1)

    def remove(self, paths: Iterable[RunPath]) -> None:
        """Removes checkpoints in this order, each atomically for readers.

        Raises:
            OSError: One cannot be removed.
        """
        for path in paths:
            aside = self.directory / f"{TEMPORARY}{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            aside.rmtree()

    def clean(self) -> None:
        """Removes leftovers of a writer that died. Only while no one is writing.

        Checkpoints that do not count stay, with a warning: one may be a copy that a user needs.
        """
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if path.name.startswith(TEMPORARY):
                path.rmtree()
        counting = self.counting()
        self.remove(path for paths in counting.values() for path in paths[:-1])
        sync_directory(self.directory)
        for (step, _, _), path in self._named():
            if path not in counting.get(step, []):
                logger.warning(
                    "%s does not count: it was written by a group of workers that was presumed dead. If it "
                    "is a copy from another run, rename it to %08d",
                    path,
                    step,
                )

    def _named(self) -> list[tuple[tuple[int, int, int], RunPath]]:
        """All directories named like a checkpoint, with the parts of their names, in order."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in self.directory.iterdir():
                with contextlib.suppress(ValueError):
                    found.append((checkpoint_parts(path.name), path))
        return sorted(found)
