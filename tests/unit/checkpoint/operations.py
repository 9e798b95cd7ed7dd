"""Counts every file operation of a writer, so that any of them can fail or be the last one of its process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

NAMES = ("open", "write", "fsync", "rename", "link", "mkdir", "unlink", "rmdir")


class Operations:
    """Stands in the place of the functions of `os` that change files.

    Attributes:
        count: How many there were.
        fired: What happened at the chosen one, as the operation's name; None when it was never reached.
    """

    def __init__(
        self, at: int, happen: Callable[[], None] = lambda: None, *, ever_after: bool = False
    ) -> None:
        self.count = 0
        self.fired: str | None = None
        self._at, self._happen, self._ever_after = at, happen, ever_after

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        for name in NAMES:
            replace(os, name, self._counted(name, getattr(os, name)))

    @contextmanager
    def installed(self, happen: Callable[[], None]) -> Iterator[None]:
        """Lets something happen at the chosen operation of what is done meanwhile."""
        self._happen = happen
        with mock.patch.multiple(os, **{name: self._counted(name, getattr(os, name)) for name in NAMES}):
            yield

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            # Opening to read changes nothing.
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **options)
            self.count += 1
            if self.count == self._at or (self._ever_after and self.count > self._at):
                self.fired = name if self.fired is None else self.fired
                self._happen()
            return real(*arguments, **options)

        return counted


def at_each_operation(folder: Path, *, ever_after: bool = False) -> Iterator[tuple[Path, Operations]]:
    """A new directory for each operation of what is done in it, in turn; in the last one nothing happens."""
    for number in range(1, 1000):
        operations = Operations(number, ever_after=ever_after)
        yield folder / str(number), operations
        if operations.fired is None:
            return
    raise AssertionError("the operations had no end")
