"""Which runs are served: one run directory, or all in a directory. Only what is listed can be named."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from replicast.client import Run, connect, is_run
from replicast.page.problems import HttpError
from replicast.page.threads import Threads
from replicast.page.watch import Watch

MOST_RUNS = 500
_READERS = 8
_ACTORS = 16

Find = Callable[[], Mapping[str, Run]]
"""The runs that there are, by name."""


class Runs:
    """The runs that are served, each with its one reader.

    Args:
        find: Finds the runs, by name. Called often, and must return the same object for the same run.

    Attributes:
        readers: Threads for what reads files.
        actors: Threads for what waits for a job.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self.readers = Threads(_READERS)
        self.actors = Threads(_ACTORS)
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
        """One run.

        Raises:
            HttpError: There is none with this name.
        """
        if name not in self._watches:
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
    opened: dict[Path, Run] = {}

    def find() -> dict[str, Run]:
        root = path.resolve()
        places = [root] if is_run(root) else _children(root)
        for place in places:
            if place not in opened:
                opened[place] = connect(place)
        return {place.name: opened[place] for place in places}

    return find


def _children(root: Path) -> list[Path]:
    """The runs in a directory, the newest ones if there are very many. Links are not followed."""
    try:
        with os.scandir(root) as entries:
            found = [
                (entry.stat(follow_symlinks=False).st_mtime, Path(entry.path))
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            ]
    except OSError:
        return []
    newest = sorted(found, reverse=True)
    return [path for _, path in newest if is_run(path)][:MOST_RUNS]
