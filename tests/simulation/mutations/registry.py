"""The list of breaks, and how one is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from replicast.core import coordinator as coordinator_module
from replicast.core.coordinator import Coordinator
from replicast.core.entries import History
from replicast.core.operation import Meeting
from replicast.core.worker import Worker

Mutation = Callable[[], contextlib.AbstractContextManager[Any]]
MUTATIONS: dict[str, Mutation] = {}
ORIGINAL = {
    (owner, name): getattr(owner, name)
    for owner, name in [
        (Coordinator, "_want"),
        (Coordinator, "_answered"),
        (Coordinator, "keep_before"),
        (Coordinator, "pending"),
        (Coordinator, "_propose"),
        (Coordinator, "_request"),
        (Coordinator, "_serve"),
        (Coordinator, "_withdraw"),
        (Coordinator, "handle"),
        (History, "after"),
        (Meeting, "step"),
        (Worker, "_do"),
        (Worker, "_go_on"),
        (coordinator_module, "replayed"),
    ]
}
"""What is broken, as it was."""


def mutation(make: Mutation) -> Mutation:
    """Adds a break, under its name in words."""
    MUTATIONS[make.__name__.replace("_", " ")] = make
    return make


def broken(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """The core with another value there."""
    return mock.patch.object(owner, name, value)
