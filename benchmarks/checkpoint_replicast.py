"""replicast in the `checkpoint` table, and the copy in memory that its stall is compared with."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import replicast
from benchmarks.checkpoint_task import Keeping
from benchmarks.runner import Array, Times, lasted
from benchmarks.update_replicast import Weights, weights_of
from replicast.replicas.job_checkpoints import SavePlan
from replicast.storage.checkpoints import CheckpointStore
from replicast.update.digest import digest_array

RESULT_SECS = 40.0
KEPT_ROUND = 3
"""Restored in every round: any state except zeros."""


class _Replicast(Keeping):
    def setup(self) -> None:
        with self.group.scope():
            self.model = weights_of(self.task)
        self.run_dir: Path = self.task.directory / f"run-{type(self).__name__}"
        self.replicas = replicast.Replicas(self.model, run_dir=self.run_dir)

    def assign(self, values: Iterable[Array]) -> None:
        for variable, value in zip(self.model.parts, values, strict=True):
            variable.assign(value)


class Stall(_Replicast):
    """A call of `save()`, for which all workers stop: how long the slowest training thread was in it.

    Worker 0 copies its state, the others digest theirs; the file is written afterwards.
    """

    def setup(self) -> None:
        super().setup()
        self.replicas.training_begins()

    def arrange(self, index: int) -> None:
        self.assign(self.state(index))
        self.replicas.boundary()  # a checkpoint of another step

    def found(self, rounds: int) -> Iterable[Array] | None:
        if not self.is_source:
            return None
        with CheckpointStore(self.run_dir).open(self.replicas.step) as reader:
            reader.verify()
            names = {name.rpartition("/")[2]: name for name in reader.names()}
            return [reader.read(names[f"part_{number}"]) for number in range(self.task.variables)]

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        saving = self.replicas.save()
        stalled = time.monotonic_ns() - start
        saving.result(RESULT_SECS)
        return lasted(stalled)


class Planned(Stall):
    """A checkpoint that is due, as `save_every` makes it: each worker takes its part and trains on."""

    def setup(self) -> None:
        super().setup()
        self.checkpoints = self.replicas.training_begins().checkpoints
        self.checkpoints.follow(SavePlan(every=1))

    def arrange(self, index: int) -> None:
        self.assign(self.state(index))

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.replicas.boundary()
        stalled = time.monotonic_ns() - start
        self.checkpoints.report()
        ends = time.monotonic() + RESULT_SECS
        store = CheckpointStore(self.run_dir)
        while self.is_source and self.replicas.step not in [one.step for one in store.manifests()]:
            if time.monotonic() > ends:
                raise RuntimeError(f"No checkpoint of step {self.replicas.step} within {RESULT_SECS:g} s")
            time.sleep(0.01)
        return lasted(stalled)


class Durable(Stall):
    """The same save until the checkpoint is compared with the other workers' digests, written and fsynced."""

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.replicas.save().result(RESULT_SECS)
        return start if self.is_source else None, time.monotonic_ns()


class Restore(_Replicast):
    """Every worker reads and verifies the checkpoint; all apply it once all have verified it."""

    def setup(self) -> None:
        super().setup()
        self.assign(self.state(KEPT_ROUND))
        self.replicas.save().result(RESULT_SECS)

    def arrange(self, index: int) -> None:
        self.replicas.close()  # a restore is the first operation of a job
        self.replicas = replicast.Replicas(self.model, run_dir=self.run_dir)
        self.assign(np.zeros((self.task.variables, *self.task.shape), np.float32))

    def found(self, rounds: int) -> Iterable[Array] | None:
        return (variable.numpy() for variable in self.model.parts)

    def kept(self, rounds: int) -> int:
        return KEPT_ROUND

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.replicas.restore()
        return start, time.monotonic_ns()


class Copy(Keeping):
    """A copy of all variables, from array to array, into allocated memory; on all workers together."""

    def setup(self) -> None:
        self.values = self.state(0)
        self.copies = np.zeros_like(self.values)

    def arrange(self, index: int) -> None:
        self.values[:] = self.state(index)

    def found(self, rounds: int) -> Iterable[Array] | None:
        return self.copies

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.copy()
        return lasted(time.monotonic_ns() - start)

    def copy(self) -> None:
        for value, copy in zip(self.values, self.copies, strict=True):
            np.copyto(copy, value)


class StopAndCopy(Copy):
    """All workers stop for a `save()` of one number; then the copy: what a `save()` can do no less."""

    def setup(self) -> None:
        super().setup()
        with self.group.scope():
            self.model = Weights(1, (1,))
        run_dir = self.task.directory / f"run-{type(self).__name__}"
        self.replicas = replicast.Replicas(self.model, run_dir=run_dir)
        self.replicas.training_begins()

    def arrange(self, index: int) -> None:
        super().arrange(index)
        self.replicas.boundary()  # a checkpoint of another step

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        saving = self.replicas.save()
        self.copy()
        lasts = time.monotonic_ns() - start
        saving.result(RESULT_SECS)
        return lasted(lasts)


class Fresh(Copy):
    """The same copy into memory that was never touched: the floor of a restore."""

    def setup(self) -> None:
        super().setup()
        self.copies = self.values

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        memory = np.frombuffer(fresh_memory(self.values.nbytes), self.values.dtype).reshape(self.values.shape)
        for value, copy in zip(self.values, memory, strict=True):
            np.copyto(copy, value)
        lasts = time.monotonic_ns() - start
        self.copies = memory
        return lasted(lasts)


class FreshAndVerified(Fresh):
    """The copy into fresh memory, its digest, and a `restore` of one number: all that a restore does."""

    def setup(self) -> None:
        super().setup()
        with self.group.scope():
            self.model = Weights(1, (1,))
        self.run_dir = self.task.directory / f"run-{type(self).__name__}"
        self.replicas = replicast.Replicas(self.model, run_dir=self.run_dir)
        self.replicas.save().result(RESULT_SECS)

    def arrange(self, index: int) -> None:
        super().arrange(index)
        self.replicas.close()  # a restore is the first operation of a job
        self.replicas = replicast.Replicas(self.model, run_dir=self.run_dir)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.replicas.restore()
        super().round(index)
        for copy in self.copies:
            digest_array(copy)
        return lasted(time.monotonic_ns() - start)


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Memory that was never touched, in huge pages where the system has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
