"""replicast itself in the `update` table: from `propose` on one worker until the last one has applied."""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicast
from benchmarks.runner import Array, Times
from benchmarks.update_task import Adding
from replicast.mapped_memory import Bytes
from replicast.update.digest import blocks_of, bytes_of, digest_block, is_finite


class Weights(keras.Model):  # type: ignore[misc]
    """Variables `part_0`, `part_1` and so on, initially zero."""

    def __init__(self, count: int, shape: tuple[int, ...], net: keras.Model | None = None) -> None:
        super().__init__(name="weights")
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros", trainable=False, name=f"part_{number}")
            for number in range(count)
        ]
        self.net = net
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Does nothing."""
        return inputs


def adding(changes: Iterable[Any]) -> replicast.Update:
    """The changes of all variables as an update."""
    update = replicast.Update()
    for number, change in enumerate(changes):
        update = update.add(f"part_{number}", change)
    return update


def weights_of(task: Any, net: Any = None) -> Weights:
    """The variables of a task, and a model that is trained, if there is one."""
    return Weights(task.variables, task.shape, net)


class Propose(Adding):
    """An `Update` with one `add` for each variable, proposed by the source, without fsync.

    The other workers wait at a boundary, as those of the peers wait for the source's bytes. The time is the
    receipt's: from the call of `propose` to the moment at which the last worker had applied all edits.
    """

    def setup(self) -> None:
        with self.group.scope():
            self.model = weights_of(self.task)
        self.replicas = replicast.Replicas(self.model, durability="memory")
        self.replicas.training_begins()
        self.proposed: Any = None

    def weights(self) -> Iterable[Array]:
        return (variable.numpy() for variable in self.model.parts)

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.proposed = self.update(index)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        ticket = self.replicas.propose(self.proposed) if self.is_source else None
        self.replicas._active().end_training()
        if ticket is None:
            return None, start  # the source has the receipt, with the time of the last worker
        return start, start + int(ticket.result(60.0).propose_to_applied_secs * 1e9)

    def update(self, index: int) -> replicast.Update:
        """The update of a round."""
        return adding(self.task.change(index))


class Unavoidable(Propose):
    """An update of one number, with all its messages; one copy of the bytes; `assign_add` on every worker."""

    def setup(self) -> None:
        with self.group.scope():
            self.model = weights_of(self.task)
            number = Weights(1, (1,))
        self.replicas = replicast.Replicas(number, durability="memory")
        self.replicas.training_begins()
        self.change = self.task.change(0)
        self.copy = np.zeros_like(self.change)
        self.add = tf.function(self._add)

    def arrange(self, index: int) -> None:
        self.change = self.task.change(index)
        self.deltas = [tf.constant(array) for array in self.change]
        if self.is_source:
            self.proposed = adding(np.ones((1, 1), np.float32))

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        if self.is_source:
            self.copy_change()
        super().round(index)
        self.look_at_change()
        self.add(self.deltas)
        return start if self.is_source else None, time.monotonic_ns()

    def copy_change(self) -> None:
        np.copyto(self.copy, self.change)

    def look_at_change(self) -> None:
        """Nothing: `assign_add` is the first to read the bytes."""

    def _add(self, deltas: list[Any]) -> None:
        for variable, delta in zip(self.model.parts, deltas, strict=True):
            variable.value.assign_add(delta, read_value=False)


class Verified(Unavoidable):
    """The same; the source digests each block as it copies it, and each worker verifies its part of them."""

    def copy_change(self) -> None:
        target = bytes_of(self.copy)
        for _, start, content in blocks_of([self.change]):
            copy = functools.partial(_copied, target[start:])
            digest_block(content, copy)

    def look_at_change(self) -> None:
        blocks = list(blocks_of([self.change]))
        for _, _, content in blocks[self.rank :: self.workers]:
            digest_block(content, _finite)


def _copied(target: Bytes, start: int, chunk: Bytes) -> Bytes:
    written = target[start : start + len(chunk)]
    written[:] = chunk
    return written


def _finite(start: int, chunk: Bytes) -> Bytes:
    if not is_finite(chunk.view(np.float32)):
        raise RuntimeError(f"A value at byte {start} is not finite")
    return chunk


class NewMemory(Adding):
    """Memory that was never used, private and shared, filled by the source: what a first update needs."""

    def setup(self) -> None:
        self.change = self.task.change(0)

    def weights(self) -> Iterable[Array]:
        return ()

    def check(self, rounds: int) -> None:
        if rounds and self.is_source and not (self.found == self.change).all():
            raise RuntimeError("The copies differ")

    def arrange(self, index: int) -> None:
        self.found = None
        self.change = self.task.change(index)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        if self.is_source:
            private = np.array(self.change)
            descriptor = os.memfd_create("bench")
            os.posix_fallocate(descriptor, 0, private.nbytes)
            memory = mmap.mmap(descriptor, private.nbytes)
            os.close(descriptor)
            self.found = np.frombuffer(memory, np.float32).reshape(private.shape)
            np.copyto(self.found, private)
        return start if self.is_source else None, time.monotonic_ns()


class MakeAndPropose(Propose):
    """The same, including the creation of the `Update`, which copies the arrays."""

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.change = self.task.change(index)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        if self.is_source:
            self.proposed = adding(self.change)
        proposed, applied = super().round(index)
        return None if proposed is None else start, applied


class First(MakeAndPropose):
    """The same with a new `Replicas` in every round: nothing is prepared by earlier updates."""

    def arrange(self, index: int) -> None:
        self.replicas._active().end_training()
        self.replicas.close()
        self.replicas = replicast.Replicas(self.model, durability="memory")
        self.replicas.training_begins()
        super().arrange(index)
