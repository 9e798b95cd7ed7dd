"""The contestants of the `stall` table, all during the same training."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import replicast
from benchmarks.peers.mirrored import Floor
from benchmarks.runner import Array, Times, lasted
from benchmarks.training import Loop, Training
from benchmarks.update_replicast import adding, weights_of
from benchmarks.update_task import Adding

LEAD_STEPS = 5
"""Steps before the measurement, so that it happens during training."""
RESULT_SECS = 40.0


class InMemory(Adding):
    """An update that another thread of the source proposes; the receipt has the time of the stall.

    This is the time on the worker with the longest stop: from when its training thread had to wait for the
    update until it continued.
    """

    def setup(self) -> None:
        training = Training(self.group)
        with self.group.scope():
            self.model = weights_of(self.task, training.model)
        self.replicas = replicast.Replicas(self.model, optimizer=training.optimizer, **self._keeping())
        self.loop = Loop(training, self.task.directory / f"last-step-{type(self).__name__}", self.is_source)
        self.proposed: Any = None

    def weights(self) -> Iterable[Array]:
        return (variable.numpy() for variable in self.model.parts)

    def arrange(self, index: int) -> None:
        self.loop.reset()
        if self.is_source:
            self.proposed = adding(self.task.change(index))

    def round(self, index: int) -> Times:
        if not self.is_source:
            self.loop.run(self.replicas.boundary, lambda _: False)
            return lasted(0)  # the source has the receipt, which covers all workers
        with ThreadPoolExecutor(1, thread_name_prefix="author") as author:
            receipt: Future[replicast.Receipt] | None = None

            def enough(steps: int) -> bool:
                nonlocal receipt
                if receipt is None and steps >= LEAD_STEPS:
                    receipt = author.submit(self._propose)
                return receipt is not None and receipt.done()

            self.loop.run(self.replicas.boundary, enough)
            assert receipt is not None
            return lasted(int(receipt.result().stall_secs * 1e9))

    def _propose(self) -> replicast.Receipt:
        return self.replicas.propose(self.proposed).result(RESULT_SECS)

    def _keeping(self) -> dict[str, Any]:
        return {"durability": "memory"}


class OnDisk(InMemory):
    """The same with a journal, which is written with fsync before the update is applied."""

    def _keeping(self) -> dict[str, Any]:
        return {"durability": "disk", "run_dir": self.task.directory / "run"}


class BareFunction(Floor):
    """Only the addition, in a `tf.function`: the change is already on every worker."""

    def setup(self) -> None:
        super().setup()
        path = self.task.directory / f"last-step-{type(self).__name__}"
        self.loop = Loop(Training(self.group), path, self.is_source)

    def arrange(self, index: int) -> None:
        super().arrange(index)
        self.loop.reset()

    def round(self, index: int) -> Times:
        self.loop.run(lambda: None, lambda steps: steps >= LEAD_STEPS)
        start, end = super().round(index)
        assert start is not None
        return lasted(end - start)


class BareEager(BareFunction):
    """Only the addition, one eager operation after the other."""

    def setup(self) -> None:
        super().setup()
        self.step = self._step
