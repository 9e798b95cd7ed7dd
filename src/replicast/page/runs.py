"""Which runs are served: one run directory, or all in a directory. Only what is listed can be named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from replicast.client import Run, is_run
from replicast.client.directory import DirectoryRun
from replicast.files import RunPath
from replicast.page.events import Slots
from replicast.page.problems import HttpError
from replicast.page.settings import MAX_FILES
from replicast.page.threads import Threads
from replicast.page.watch import Watch

MOST_RUNS = 500
_READERS = 8
_ACTORS = 16

Find = Callable[[], Mapping[str, Run]]
"""The runs that there are, by name."""


class Runs:
    """The runs that are served, each with its one reader."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self.readers = Threads(_READERS)
        self.actors = Threads(_ACTORS)
        self.files = Slots(MAX_FILES, "Too many files of values are being sent", "Try again later")
        self._watches: dict[str, Watch] = {}

    async def all(self) -> list[Watch]:
        """All runs, by name."""
        found = await self.readers.call(self._find)
        for name in [name for name, watch in self._watches.items() if found.get(name) is not watch.run]:
            self._watches.pop(name).stop()
        for name, run in found.items():
            if name not in self._watches:
                self._watches[name] = Watch(name, run, self.readers)
        return [self._watches[name] for name in sorted(found)]

    async def named(self, name: str) -> Watch:
        # At every request: somebody may have put a link where the run was, or removed it.
        known = self._watches.get(name)
        if known is None or not await self.readers.call(partial(_is_there, known.run)):
            await self.all()
        if name not in self._watches:
            raise HttpError(404, "There is no run with this name", received=name, remedy="See /api/runs")
        return self._watches[name]

    def stop(self) -> None:
        """Ends every stream."""
        for watch in self._watches.values():
            watch.stop()


def runs_in(path: Path) -> Find:
    """Finds the run at a path, or else the runs in the directory that it names."""
    opened: dict[RunPath, Run] = {}

    def find() -> dict[str, Run]:
        root = RunPath(path.resolve())
        places = [root] if is_run(root) else _children(root)
        for place in places:
            if place not in opened:
                opened[place] = DirectoryRun(place)
        return {place.name: opened[place] for place in places}

    return find


def _is_there(run: Run) -> bool:
    return run.path is not None and run.path.is_dir()


def _children(root: RunPath) -> list[RunPath]:
    """The runs in a directory, the newest ones if there are very many.

    Each is a path below this directory, so that no later access follows a link in its place either.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            with contextlib.suppress(OSError):  # One that cannot be read hides no other.
                if not path.name.startswith(".") and path.is_dir() and is_run(path):
                    found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:MOST_RUNS]]
