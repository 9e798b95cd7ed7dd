"""Counts every file operation of a writer, so that any of them can fail or be the last one of its process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

NAMES = ("open", "write", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Operations:
    """Stands in the place of the functions of `os` that change files.

    Attributes:
        count: How many there were.
        fired: What happened at the chosen one, as the operation's name; None when it was never reached.
    """

    def __init__(self, at: int, happen: Callable[[], None], *, ever_after: bool = False) -> None:
        self.count = 0
        self.fired: str | None = None
        self._at, self._happen, self._ever_after = at, happen, ever_after

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        for name in NAMES:
            replace(os, name, self._counted(name, getattr(os, name)))

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
