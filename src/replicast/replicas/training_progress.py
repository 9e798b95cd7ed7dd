"""The progress of one worker's training: where it is, and what a restarted script repeats."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from replicast.replicas.position import Fit, Fits, FrozenVariables, Position
from replicast.replicas.session import Session
from replicast.training.resuming import Batches, length_of, position_problem, rest_of
from replicast.update.state import State

logger = logging.getLogger("replicast")


class Training:
    """For the training thread."""

    def __init__(self, session: Session, state: State) -> None:
        self._session = session
        self._fits = Fits(speaks=session.rank == 0)
        self._in_a_pass = False
        self._warned = False
        self.frozen_variables = FrozenVariables(session, state)
        self.position = Position()
        self.metrics: Mapping[str, Any] = {}
        self.epoch_ends = False  # this boundary is the last of an epoch: a checkpoint waits for its end

    def reached(
        self,
        position: Position,
        logs: Mapping[str, Any] | None,
        batches: int | None = None,
        epoch_ends: bool = False,
    ) -> None:
        """Notes the position in the data, and the latest loss and metrics."""
        self.epoch_ends = epoch_ends
        self.position = self._fits.stamped(position)
        self.metrics = logs if logs is not None else {}
        self._session.replica.measures.batches = batches

    def restored(self, position: Position) -> None:
        self.position = position
        self._fits.restored(position)

    def begin_fit(self, fit: Fit) -> Position:
        """The position at which this `fit` continues; "over" if it was over when the state was saved."""
        resumed = self._fits.begin(fit)
        self.frozen_variables.put_back()
        if resumed.inside == "over":
            self.frozen_variables.keep()
        else:
            self.frozen_variables.release()
        return resumed

    def end_fit(self, stopped: bool) -> None:
        self._fits.end(self.position.epoch, stopped)
        if stopped:
            self.position = self._fits.stamped(self.position)

    def used(self, batches: int) -> None:
        """Called when a custom training loop has used this many more batches of its pass."""
        self.position = self._fits.used(self.position, batches)

    def resume(self, dataset: Batches) -> Batches:
        """Begins a pass over the data; after a restore, returns the rest of the interrupted pass."""
        problem = position_problem(dataset)
        if problem and not self._warned and self._session.rank == 0:
            logger.warning(problem)
        self._warned = self._warned or bool(problem)
        resumed = self._fits.take_loop()
        self.frozen_variables.put_back()
        self.frozen_variables.release()
        if resumed is None:
            begun = Position(self.position.epoch + 1) if self._in_a_pass else Position()
            self.position = self._fits.looping(begun)
            self._in_a_pass = True
            return dataset
        self._in_a_pass = True
        self.position = self._fits.looping(resumed.in_passes_of(length_of(dataset)))
        return rest_of(dataset, self.position.epoch, self.position.batch)

    def warn_of_what_was_left(self) -> None:
        """Warns at the end of the script about what it did not reach. On worker 0."""
        if self._session.rank != 0:
            return
        if self._fits.awaited():
            logger.warning(self._fits.awaited())
        step = self._session.step
        left = [one for one in self._session.operations() if (one["step"] or 0) > step]
        steps = ", ".join(str(at) for at in sorted({one["step"] for one in left})[:10])
        if left:
            logger.warning(
                "the training ended at step %d; updates scheduled for step %s were not applied and stay in "
                "the journal for a later start; functions were not run",
                step,
                steps,
            )
