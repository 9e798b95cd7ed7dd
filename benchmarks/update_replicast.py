"""replicast itself in the `update` table: from `propose` on one worker until the last one has applied."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import keras

from benchmarks.update_task import Array, Contestant, Task


class Weights(keras.Model):
    """A model that is nothing but its variables."""

    def __init__(self, task: Task) -> None:
        super().__init__(name="weights")
        for number in range(task.variables):
            self.add_weight(shape=task.shape, initializer="zeros", trainable=False, name=f"part_{number}")
        self.built = True

    def call(self, inputs: Any) -> Any:
        return inputs


class Propose(Contestant):
    """An `Update` with one `add` for each variable, proposed by the source, without fsync.

    The other workers wait at a boundary, as those of the peers wait for the source's bytes. The time is the
    receipt's: from the call of `propose` to the moment at which the last worker had applied all edits.
    """

    def setup(self) -> None:
        import replicast

        with self.group.scope():
            self.model = Weights(self.task)
        self.replicas = replicast.Replicas(self.model, durability="memory")
        self.update: Any = None

    def weights(self) -> Iterable[Array]:
        return (variable.numpy() for variable in self.model.weights)

    def arrange(self, index: int) -> None:
        if not self.is_source:
            return
        import replicast

        self.update = replicast.Update()
        for number, change in enumerate(self.task.change(index)):
            change.flags.writeable = False  # ours alone: no copy is needed
            self.update = self.update.add(f"part_{number}", change)

    def round(self, index: int) -> tuple[int | None, int]:
        start = time.monotonic_ns()
        ticket = self.replicas.propose(self.update) if self.is_source else None
        self.replicas.training_ends()
        if ticket is None:
            return None, start  # the receipt, which the source has, tells when the last one was done
        return start, start + int(ticket.result(60.0).propose_to_applied_secs * 1e9)
