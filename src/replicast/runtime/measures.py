"""What the last steps of one worker have measured, kept cheaply until a trial asks.

Keras' logs in `fit` are running means since the beginning of the epoch: after k batches with the mean m(k),
what the last j of them measured is (m(k)·k - m(k-j)·(k-j)) / j. What an own loop gives is taken as it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from replicast.errors import UpdateRefused

MOST = 512
"""So many boundaries are remembered; in a trial, all."""

History: TypeAlias = list[tuple[int, int, dict[str, float]]]
"""What boundaries have measured by themselves: the step, how many steps, each metric. The oldest first."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One boundary.

    Attributes:
        step: The steps trained up to it.
        steps: How many of them since the boundary before.
        batches: In `fit`: how many batches the running means in the logs are of; None in an own loop.
        logs: Loss and metrics, as they were given: nothing is converted before somebody asks.
        counts: Whether the state that was measured is still there: a trial may have gone back since.
    """

    step: int
    steps: int
    batches: int | None
    logs: Mapping[str, Any]
    counts: bool = True


class Measures:
    """The last boundaries of one worker. `before` and `end` are for the follower, the rest for training.

    Attributes:
        batches: Written by the callback of `fit` before each boundary: see `Measured.batches`.
    """

    def __init__(self) -> None:
        self._last: deque[Measured] = deque()
        self._since: int | None = None
        self.batches: int | None = None

    def note(self, step: int, steps: int, logs: Mapping[str, Any] | None) -> None:
        """A boundary was reached."""
        batches, self.batches = self.batches, None
        if logs is None:
            return
        self._last.append(Measured(step, steps, batches, dict(logs)))
        if self._since is None and len(self._last) > MOST:
            self._last.popleft()

    def begin(self, step: int) -> None:
        """A trial begins at this boundary."""
        self._since = step

    def during(self, metric: str) -> tuple[float | None, int]:
        """The mean since the trial began, None when nothing was measured; and of how many steps it is."""
        values = self._own_values(metric, self._since)
        return _mean(values), sum(steps for steps, _ in values)

    def end(self, *, reverted: bool) -> None:
        """The trial is decided; the training thread stands at its end."""
        since, self._since = self._since, None
        if since is not None and reverted:
            # They stay as the running means that the next ones are computed from.
            self._last = deque(one if one.step <= since else replace(one, counts=False) for one in self._last)
        while len(self._last) > MOST:
            self._last.popleft()

    def before(self, metric: str, steps: int) -> float:
        """The mean over the last `steps` steps, or as many as are known.

        Raises:
            UpdateRefused: There is none, or it is no finite number.
        """
        last = next(iter(list(self._last)[-1:]), None)
        if last is None:
            raise UpdateRefused(
                "A trial is compared with the steps before, and nothing was measured yet",
                remedy="Propose it after a step of the training; in an own loop, give the values to "
                "replicas.boundary(logs={...})",
                received=f"metric {metric!r}",
            )
        if metric not in last.logs:
            raise UpdateRefused(
                "The metric of the trial is not among those that are measured",
                expected=f"one of {', '.join(map(str, last.logs)) or 'none: the logs are empty'}",
                received=repr(metric),
            )
        mean = _mean(_latest(self._own_values(metric, None), steps))
        if mean is None or not math.isfinite(mean):
            raise UpdateRefused(
                f"The metric of the trial has no finite value before the update: {metric!r}",
                remedy="Propose it when it has; in fit, a running mean that was once not finite stays so "
                "until the end of the epoch",
                received="nothing" if mean is None else f"{mean}",
            )
        return mean

    def history(self) -> History:
        """All that a later trial may be compared with, for a checkpoint. For the training thread."""
        found: History = []
        previous: Measured | None = None
        for one in self._last:
            own = {str(metric): _own_value(one, previous, metric) for metric in one.logs}
            previous = one
            if one.counts:
                known = {metric: value for metric, value in own.items() if value is not None}
                found.append((one.step, one.steps, known))
        return found

    def recall(self, history: Iterable[Sequence[Any]]) -> None:
        """The state is that of a checkpoint: what was measured before it counts, and nothing else."""
        self._last = deque(Measured(int(step), int(steps), None, logs) for step, steps, logs in history)

    def _own_values(self, metric: str, since: int | None) -> list[tuple[int, float]]:
        """What each boundary measured by itself, and in how many steps, the oldest first."""
        found = []
        previous: Measured | None = None
        for one in list(self._last):  # made at once: the training thread may add to it
            value = _own_value(one, previous, metric)
            previous = one
            if value is not None and one.counts and (since is None or one.step > since):
                found.append((one.steps, value))
        return found


def mean_history(histories: Sequence[History]) -> History:
    """What all workers have measured, as one: the mean over those that have measured it."""
    others = [{step: values for step, _, values in history} for history in histories]
    found: History = []
    for step, steps, values in histories[0]:
        of_all = {
            metric: [each[step][metric] for each in others if metric in each.get(step, {})]
            for metric in values
        }
        found.append((step, steps, {metric: sum(known) / len(known) for metric, known in of_all.items()}))
    return found


def _own_value(one: Measured, previous: Measured | None, metric: str) -> float | None:
    value = _number(one.logs.get(metric))
    if value is None or one.batches is None or one.batches <= one.steps:
        return value
    before = one.batches - one.steps
    mean = None
    if previous is not None and previous.batches == before:
        mean = _number(previous.logs.get(metric))
    return None if mean is None else (value * one.batches - mean * before) / one.steps


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _latest(values: list[tuple[int, float]], steps: int) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    while values and steps > 0:
        found.append(values.pop())
        steps -= found[-1][0]
    return found


def _mean(values: Iterable[tuple[int, float]]) -> float | None:
    values = list(values)
    steps = sum(count for count, _ in values)
    return sum(count * value for count, value in values) / steps if steps else None
