"""What is measured: how many workers, how many bytes, how often; and whether this machine has room for it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from replicast.bench.machine import available_memory
from replicast.errors import LaunchRefused

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SMALLEST = 10**4
COPIES_PER_WORKER = 6
"""State, staged update, tensors of the all-reduce, its result, a checkpoint's copy, a copy in memory."""
FILES = 5
"""Checkpoints that are kept, one that is being written, and the journal's latest payload."""
MEASURES = {
    "copy": "copy in memory (floor)",
    "all-reduce": "all-reduce",
    "update": "update: proposed to applied by all",
    "checkpoint-stall": "checkpoint: training stops",
    "checkpoint": "checkpoint: durable",
    "audit": "audit of all replicas",
}
"""The figures of one round, in the order in which they are measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the benchmark."""

    workers: int
    nbytes: int
    rounds: int


def parse_size(text: str) -> int:
    """The number of bytes in a text such as 100MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    if found is None:
        raise ValueError(f"expected a size such as 500KB, 100MB or 1GB. Received: {text!r}")
    nbytes = int(float(found[1]) * _UNITS[found[2]])
    if nbytes < SMALLEST:
        raise ValueError(f"must be at least {SMALLEST // 1000}KB. Received: {text!r}")
    return nbytes


def size_text(nbytes: int) -> str:
    """A number of bytes as `parse_size` reads it."""
    unit = next((name for name in ("GB", "MB") if nbytes >= _UNITS[name]), "KB")
    return f"{nbytes / _UNITS[unit]:g} {unit}"


def check_room(plan: Plan, directory: Path) -> None:
    """Refuses what this machine has no memory or no disk space for."""
    wanted, free = plan.nbytes * plan.workers * COPIES_PER_WORKER, available_memory()
    if wanted > free:
        raise LaunchRefused(
            f"{plan.workers} workers with {size_text(plan.nbytes)} each need about {size_text(wanted)} of "
            f"memory; {size_text(free)} are available",
            remedy="Choose a smaller --size, or fewer --workers",
        )
    wanted, free = plan.nbytes * FILES, shutil.disk_usage(directory).free
    if wanted > free:
        raise LaunchRefused(
            f"Checkpoints of {size_text(plan.nbytes)} need about {size_text(wanted)} in {directory}; "
            f"{size_text(free)} are free",
            remedy="Choose a smaller --size, or set TMPDIR to a directory on a larger disk",
        )
