"""Whether all workers run the same script: each sends the digest of its own to worker 0."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_SHOWN_DIGITS, _SHOWN_WORKERS = 8, 5


def main_script() -> Path | None:
    """The file of `__main__`; None if there is none, as in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file) if isinstance(file, str) else None


def digest_of(script: Path | None) -> str | None:
    """The SHA-256 of a script in hexadecimal; None if it is not a file that can be read."""
    try:
        if script is None or not script.is_file():  # Not a pipe, which can be read only once.
            return None
        with script.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def is_digest(value: object) -> bool:  # It comes from a port that is open to all.
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def difference(script: Path | None, own: str | None, others: Mapping[int, str]) -> str:
    """A line that names the workers whose script is not that of worker 0; empty if there are none."""
    differing = sorted((worker, digest) for worker, digest in others.items() if digest != own)
    if script is None or own is None or not differing:
        return ""
    named = [f"{digest[:_SHOWN_DIGITS]} on worker {worker}" for worker, digest in differing[:_SHOWN_WORKERS]]
    more = len(differing) - len(named)
    return (
        f"replicast: warning: {script.name} differs between the workers: {own[:_SHOWN_DIGITS]} on worker 0, "
        f"{', '.join(named)}{f' and {more} more' if more else ''} (SHA-256). Copy the same file to all "
        "hosts, unless this is on purpose\n"
    )
