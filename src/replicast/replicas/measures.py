"""Loss and metrics of one worker's recent steps, stored unconverted until a trial needs them.

Keras' logs in `fit` are running means over the epoch so far. If m(k) is the mean after k batches, the mean of
the last j batches is (m(k)·k - m(k-j)·(k-j)) / j. The logs of a custom training loop are used as they are.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from replicast.errors import UpdateRefused

MOST = 512  # how many boundaries to remember; during a trial all are kept

# One tuple per boundary, oldest first: the step, the number of steps it covers, and its metrics.
MetricHistory: TypeAlias = list[tuple[int, int, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class _Logs:
    step: int
    steps: int
    batches: int | None
    logs: Mapping[str, Any]
    counts: bool = True


class RecentMetrics:
    def __init__(self) -> None:
        self._last: deque[_Logs] = deque()
        self._since: int | None = None
        self.batches: int | None = None

    def note(self, step: int, steps: int, logs: Mapping[str, Any] | None) -> None:
        batches, self.batches = self.batches, None
        if logs is None:
            return
        self._last.append(_Logs(step, steps, batches, dict(logs)))
        if self._since is None and len(self._last) > MOST:
            self._last.popleft()

    def begin(self, step: int) -> None:
        self._since = step

    def during(self, metric: str) -> tuple[float | None, int]:
        """The mean since the trial began (None if nothing was measured), and how many steps it covers."""
        values = self._own_values(metric, self._since)
        return _mean(values), sum(steps for steps, _ in values)

    def end(self, *, reverted: bool) -> None:
        """Ends the trial. The training thread is stopped at the trial's last boundary."""
        since, self._since = self._since, None
        if since is not None and reverted:
            # Keep the reverted boundaries: the values of the next ones are computed from their running means.
            self._last = deque(one if one.step <= since else replace(one, counts=False) for one in self._last)
        while len(self._last) > MOST:
            self._last.popleft()

    def before(self, metric: str, steps: int) -> float:
        """The mean over the last `steps` steps, or over fewer if fewer were measured."""
        last = self._last[-1] if self._last else None
        if last is None:
            raise UpdateRefused(
                "A trial needs a metric from before the update, and nothing was measured yet",
                remedy="Propose the update after the first step; in a custom training loop, pass the metrics "
                "to replicas.boundary(logs={...})",
                received=f"metric {metric!r}",
            )
        if metric not in last.logs:
            raise UpdateRefused(
                "The metric of the trial is not in the logs",
                expected=f"one of {', '.join(map(str, last.logs)) or 'none: the logs are empty'}",
                received=repr(metric),
            )
        latest: list[tuple[int, float]] = []
        values = self._own_values(metric, None)
        while values and steps > 0:
            latest.append(values.pop())
            steps -= latest[-1][0]
        mean = _mean(latest)
        if mean is None or not math.isfinite(mean):
            raise UpdateRefused(
                f"The metric of the trial has no finite value before the update: {metric!r}",
                remedy="Propose the update once the metric is finite. In fit, a running mean that is not "
                "finite stays so until the end of the epoch",
                received="nothing" if mean is None else f"{mean}",
            )
        return mean

    def history(self) -> MetricHistory:
        """The values that a later trial may need, for a checkpoint. For the training thread."""
        found: MetricHistory = []
        for previous, one in itertools.pairwise([None, *self._last]):
            if one is not None and one.counts:
                own = {str(metric): _own_value(one, previous, metric) for metric in one.logs}
                known = {metric: value for metric, value in own.items() if value is not None}
                found.append((one.step, one.steps, known))
        return found

    def recall(self, history: Iterable[Sequence[Any]]) -> None:
        self._last = deque(_Logs(int(step), int(steps), None, logs) for step, steps, logs in history)

    def _own_values(self, metric: str, since: int | None) -> list[tuple[int, float]]:
        """The number of steps and the own value of each boundary, oldest first."""
        found = []
        # A copy: the training thread may append meanwhile.
        for previous, one in itertools.pairwise([None, *self._last]):
            if one is not None and one.counts and (since is None or one.step > since):
                value = _own_value(one, previous, metric)
                found += [] if value is None else [(one.steps, value)]
        return found


def mean_history(histories: Sequence[MetricHistory]) -> MetricHistory:
    """The mean of all workers' histories; each value is averaged over the workers that measured it."""
    others = [{step: values for step, _, values in history} for history in histories]
    found: MetricHistory = []
    for step, steps, values in histories[0]:
        of_all = {
            metric: [each[step][metric] for each in others if metric in each.get(step, {})]
            for metric in values
        }
        found.append((step, steps, {metric: sum(known) / len(known) for metric, known in of_all.items()}))
    return found


def _own_value(one: _Logs, previous: _Logs | None, metric: str) -> float | None:
    value = _number(one.logs.get(metric))
    if value is None or one.batches is None or one.batches <= one.steps:
        return value
    before = one.batches - one.steps
    follows = previous is not None and previous.batches == before
    mean = _number(previous.logs.get(metric)) if previous is not None and follows else None
    return None if mean is None else (value * one.batches - mean * before) / one.steps


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _mean(values: Sequence[tuple[int, float]]) -> float | None:
    steps = sum(count for count, _ in values)
    return sum(count * value for count, value in values) / steps if steps else None
