"""How a crew's worker runs the contestants of the `update` table: two things to do, on one seat."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.update_task import Clock, Seat, Task


@dataclass(frozen=True, slots=True)
class Entry:
    """Which contestant, as `module:Class`, and what it is to do."""

    contestant: str
    task: Task


def arrange(group: Any, entry: Entry) -> Callable[[], None]:
    return _seat(group, entry).arrange


def race(group: Any, entry: Entry) -> Callable[[], None]:
    return _seat(group, entry).race


def seat(group: Any, entry: Entry, rank: int, workers: int) -> Seat:
    """Makes the contestant and has it set up."""
    module, name = entry.contestant.split(":")
    contestant = getattr(importlib.import_module(module), name)(group, entry.task, rank, workers)
    return Seat(contestant, Clock(entry.task.clock, workers))


@functools.cache
def _seat(group: Any, entry: Entry) -> Seat:
    return seat(group, entry, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
