"""A boundary at which a training thread has something to do, and in which order it does several things."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from replicast.protocol.audit_messages import Examine, Lend, Weigh
from replicast.protocol.messages import REPLAY_ROUND, Compute, Go

Order: TypeAlias = Compute | Examine | Lend | Weigh
"""What a training thread does at a stop while it is undecided."""


@dataclass(slots=True)
class Stop:
    """A boundary at which something is, or may be, applied. Written by the follower, under the gate's lock.

    Attributes:
        step: The first boundary at or after it is meant.
        go: The decision, once it is there.
        compute: What this worker's training thread still has to do for what is decided here.
        computes: Whether what is decided here depends on the live values.
        error: What the training thread has to raise here.
        scheduled: The step is an author's, or the journal's.
        yields: Whether it gives way to a trial that is under way.
        act: What the training thread does at the end of a trial: before it waits, and once it is decided.
        decided: Whether that is the last.
        since: When it was put up.
    """

    round: int
    step: int
    go: Go | None = None
    compute: Order | None = None
    computes: bool = False
    error: Exception | None = None
    scheduled: bool = False
    yields: bool = False
    act: Callable[[], None] | None = None
    decided: bool = False
    since: float = field(default_factory=time.monotonic)


def order_of(stop: Stop) -> tuple[int, int, int]:
    """What is in the journal comes first, in its order; then what is undecided, and will be later in it.

    What is to be computed comes after all others: it must see their values. An action comes last.
    """
    if stop.round < 0:
        return 0, stop.step, stop.round - REPLAY_ROUND
    if stop.go is not None and stop.go.action:
        return 3, stop.step, stop.round
    if stop.go is not None:
        return 0, stop.step, stop.go.updates[0][0]
    return 2 if stop.computes else 1, stop.step, stop.round
