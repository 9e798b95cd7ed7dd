"""The contestants of the `audit` table: digests alone, and one training with audits and without."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

import replicast
from benchmarks.audit import EVERY, TABLE_ROWS
from benchmarks.runner import Implementation, Times, lasted
from benchmarks.step_keras import custom_step
from benchmarks.step_task import StepTask
from benchmarks.training import Training
from benchmarks.update_replicast import weights_of
from replicast.training import Source, TensorFlowState
from replicast.update.digest import digest_array

REPEATS = 5
AUDITS_PER_TURN = 5
STEPS_BETWEEN = 5
REPORT_SECS = 10.0


class Digests(Implementation):
    """The digest of every variable, several times over: the mean time of one."""

    def setup(self) -> None:
        with self.group.scope():
            self.model = weights_of(self.task)
        for variable, value in zip(self.model.parts, self.task.change(1), strict=True):
            variable.assign(value)
        self.state = TensorFlowState(*Source(self.model).variables())
        self.found: dict[str, str] = {}

    def check(self, rounds: int) -> None:
        if rounds == 0:
            return
        wanted = [digest_array(value) for value in self.task.change(1)]
        if list(self.found.values()) != wanted:
            raise RuntimeError("The digests do not match the values")

    def arrange(self, index: int) -> None:
        """The state is unchanged."""

    def round(self, index: int) -> Times:
        names = [variable.name for variable in self.state.schema]
        start = time.monotonic_ns()
        for _ in range(REPEATS):
            self.found = self.state.digests(names)
        return lasted((time.monotonic_ns() - start) // REPEATS)


class TableStep(Implementation):
    """Steps on a few rows of a large table, with a boundary after each: the mean time of one."""

    def setup(self) -> None:
        task = StepTask(steps=EVERY, kind="embedding", table=TABLE_ROWS, optimizer="SGD")
        self.step, optimizer, model = custom_step(self.group, task)
        mine = task.batch // self.workers
        self.share = tuple(tf.constant(array[:mine]) for array in task.arrays())
        self.step(self.share)  # now the table is known to be written by rows
        self.replicas = replicast.Replicas(
            model, optimizer=optimizer, durability="memory", audit_every=STEPS_BETWEEN
        )

    def check(self, rounds: int) -> None:
        """No audit found a difference."""
        if not all(report.equal for report in self.replicas.audits):
            raise RuntimeError("The replicas differ")

    def arrange(self, index: int) -> None:
        """Continues where the last turn ended."""

    def round(self, index: int) -> Times:
        spent = self._spent()
        return lasted(spent["step"] // (AUDITS_PER_TURN * STEPS_BETWEEN))

    def _spent(self) -> dict[str, int]:
        """Nanoseconds in steps, and in boundaries with an audit."""
        spent = {"step": 0, "audit": 0}
        for _ in range(AUDITS_PER_TURN):
            for number in range(STEPS_BETWEEN):
                start = time.monotonic_ns()
                self.step(self.share)
                between = time.monotonic_ns()
                self.replicas.boundary()
                spent["step"] += between - start
                if number == STEPS_BETWEEN - 1:
                    spent["audit"] += time.monotonic_ns() - between
        return spent


class TableAudit(TableStep):
    """How long a boundary with an audit stops the training thread, with such a table."""

    def round(self, index: int) -> Times:
        return lasted(self._spent()["audit"] // AUDITS_PER_TURN)


class TouchedRows(Implementation):
    """What digests that follow the touched rows cannot do without: these rows are read and hashed once."""

    steps = EVERY

    def setup(self) -> None:
        task = StepTask(steps=self.steps, kind="embedding", table=TABLE_ROWS, optimizer="SGD")
        self.ids = np.unique(task.arrays()[0])
        self.table = np.ones((TABLE_ROWS, task.width), np.float32)
        self.rows = np.empty((len(self.ids), task.width), np.float32)
        self.found = ""

    def check(self, rounds: int) -> None:
        if rounds and self.found != digest_array(self.table[self.ids]):
            raise RuntimeError("The digest does not match the rows")

    def arrange(self, index: int) -> None:
        """Other rows since the last turn: they are not in the cache."""
        self.table += 1.0

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        np.take(self.table, self.ids, axis=0, out=self.rows, mode="clip")
        self.found = digest_array(self.rows)
        return lasted(time.monotonic_ns() - start)


class TouchedEachStep(TouchedRows):
    """The same for the rows of one step."""

    steps = 1


class Without(Implementation):
    """Steps with a boundary after each. The state has 100 MB in addition to the trained model."""

    audit_every: int | None = None

    def setup(self) -> None:
        self.training = Training(self.group)
        with self.group.scope():
            self.model = weights_of(self.task, self.training.model)
        self.replicas = replicast.Replicas(
            self.model,
            optimizer=self.training.optimizer,
            durability="memory",
            **({} if self.audit_every is None else {"audit_every": self.audit_every}),
        )
        self.audits = 0

    def check(self, rounds: int) -> None:
        """All audits ran and found the replicas equal. Worker 0 knows this soon after the boundary."""
        if not self.is_source:
            return
        until = time.monotonic() + REPORT_SECS
        while len(self.replicas.audits) < self.audits and time.monotonic() < until:
            time.sleep(0.01)
        reports: Any = self.replicas.audits
        if len(reports) != self.audits or not all(report.equal for report in reports):
            raise RuntimeError(f"{len(reports)} audits instead of {self.audits}, or replicas differ")

    def arrange(self, index: int) -> None:
        """Continues where the last turn ended."""

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        for _ in range(EVERY):
            self.training.step()
            self.replicas.boundary()
        self._count(EVERY)
        return lasted((time.monotonic_ns() - start) // EVERY)

    def _count(self, steps: int) -> None:
        if self.audit_every is not None:
            self.audits += steps // self.audit_every


class With(Without):
    """The same steps, with an audit at the last one."""

    audit_every = EVERY


class Audit(Without):
    """How long a boundary with an audit stops the training thread: the mean of several."""

    audit_every = STEPS_BETWEEN

    def round(self, index: int) -> Times:
        spent = 0
        for _ in range(AUDITS_PER_TURN):
            for _ in range(STEPS_BETWEEN - 1):
                self.training.step()
                self.replicas.boundary()
            self.training.step()
            start = time.monotonic_ns()
            self.replicas.boundary()
            spent += time.monotonic_ns() - start
        self._count(AUDITS_PER_TURN * STEPS_BETWEEN)
        return lasted(spent // AUDITS_PER_TURN)
