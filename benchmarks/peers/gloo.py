"""torch.distributed over gloo: a broadcast and an addition."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from benchmarks.runner import SOURCE, Array, Times
from benchmarks.update_task import Adding


class Fused(Adding):
    """One broadcast of all variables, which are in one buffer."""

    def setup(self) -> None:
        self.variables = torch.zeros((self.task.variables, *self.task.shape))
        self.delta = torch.zeros_like(self.variables)

    def weights(self) -> Iterable[Array]:
        values: Array = self.variables.numpy()
        return values

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.delta.copy_(torch.from_numpy(self.task.change(index)))

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self._transfer_and_add()
        return start if self.is_source else None, time.monotonic_ns()

    def _transfer_and_add(self) -> None:
        self.group.broadcast(self.delta, src=SOURCE)
        self.variables.add_(self.delta)


class Each(Fused):
    """One broadcast for each variable."""

    def _transfer_and_add(self) -> None:
        for variable, delta in zip(self.variables, self.delta, strict=True):
            self.group.broadcast(delta, src=SOURCE)
            variable.add_(delta)
