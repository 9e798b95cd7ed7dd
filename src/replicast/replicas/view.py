"""The read-only part of `Replicas`. Nothing here waits or changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from replicast.audits.report import AuditReport
from replicast.core.entries import Receipt
from replicast.errors import NotSupported
from replicast.files import below
from replicast.replicas.auditing import Auditing
from replicast.replicas.joining import Parts, Settings
from replicast.replicas.position import Position
from replicast.replicas.proposing import Proposing
from replicast.replicas.training import Training
from replicast.strategy import Strategy
from replicast.update.schema import Schema


class ReplicasView:
    """The part of `Replicas` that can be read, by any thread."""

    _strategy: Strategy
    _settings: Settings
    _parts: Parts | None
    _closed: bool

    @property
    def rank(self) -> int:
        """Which worker this is."""
        return self._strategy.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._strategy.size

    @property
    def step(self) -> int:
        """The number of steps trained up to the last boundary."""
        return self._opened().session.step

    @property
    def schema(self) -> Schema:
        """The names, shapes and dtypes of all variables that an update can change."""
        return self._opened().state.schema

    @property
    def run_dir(self) -> Path | None:
        """The run directory, if there is one."""
        run_dir = self._settings.run_dir
        return None if run_dir is None else below(run_dir).as_path()

    @property
    def history(self) -> Sequence[Receipt]:
        """The receipts of all verified updates, the same on every worker."""
        return tuple(self._opened().session.receipts)

    @property
    def audits(self) -> Sequence[AuditReport]:
        """The reports of all audits so far, the latest last.

        Audits that stopped all workers, because one was requested or replicas differed, are known on every
        worker. Audits that found all replicas equal without stopping them are known on worker 0 only.
        """
        return self.auditing.reports

    @property
    def position(self) -> Position:
        """The position of the training in its data: the epoch, and how many batches of it are done."""
        return self.training.position

    def read(self, names: Iterable[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Copies of this replica's values, by full name. For the training thread, between steps.

        Args:
            names: Which variables; any unique suffix of a name works. Default: all.
        """
        return self._opened().state.read(self._full_names(names))

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """The digest of each of this replica's variables, equal on workers with equal bits. As `read`."""
        return self._opened().state.digests(self._full_names(names))

    def _full_names(self, names: Iterable[str] | None) -> list[str]:
        if names is None:
            return [variable.name for variable in self.schema]
        return [self.schema.resolve(name).name for name in names]

    @property
    def proposing(self) -> Proposing:
        """Gives this worker's proposals their ids. For the callback."""
        return self._opened().proposing

    @property
    def training(self) -> Training:
        """The progress of the training. For the callback."""
        return self._opened().training

    @property
    def auditing(self) -> Auditing:
        """This worker's part in audits. For the callback."""
        return self._opened().auditing

    def _active(self) -> Parts:
        if self._closed:
            raise NotSupported(
                "A closed Replicas",
                reason="its threads have ended, on all workers",
                remedy="Create a new replicast.Replicas(model)",
            )
        return self._opened()

    def _counted(self) -> Parts:
        """For the training thread, between steps: first counts the steps of a `fit` without our callback."""
        parts = self._active()
        parts.uncounted.count()
        return parts

    def _opened(self) -> Parts:
        if self._parts is None:
            raise NotSupported(
                "A model that is not built",
                reason="its variables do not exist yet, so they have no names",
                remedy="Give it a keras.Input, or call model.build(shape) inside strategy.scope(), or wait "
                "until training has begun",
            )
        return self._parts
