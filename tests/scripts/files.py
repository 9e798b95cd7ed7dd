"""Which files a process writes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

_watched: dict[str, set[str]] = {}


def files_opened_to_write(directory: Path) -> set[str]:
    """From now on, the files below `directory` that this process writes; a part of one has its name."""
    if not _watched:
        sys.addaudithook(_note)
    return _watched.setdefault(str(directory), set())


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str):
        return
    path, mode, flags = arguments
    writes = any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
    for directory, files in _watched.items():
        if writes and path.startswith(directory):
            files.add(re.sub(r"\.part-\d+-", "", path[len(directory) + 1 :]))
