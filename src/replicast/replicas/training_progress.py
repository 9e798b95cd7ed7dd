"""The progress of a training: its position in script and data, and what a restarted script repeats."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from replicast.errors import ClusterError
from replicast.replicas.leaving import Leaving
from replicast.replicas.position import Fit, Fits, FrozenVariables, Position
from replicast.replicas.restoring import Restored
from replicast.replicas.saving import Checkpoints, SavePlan, Saving
from replicast.replicas.session import Session
from replicast.training.resuming import Batches, length_of, position_problem, rest_of
from replicast.update.state import State

logger = logging.getLogger("replicast")

LOOK_SECS = 0.5


class Training:
    """One worker's training. All methods are for the training thread."""

    def __init__(self, session: Session, state: State, checkpoints: Checkpoints) -> None:
        self._session = session
        self._checkpoints = checkpoints
        self._has_timer = False
        self._plans = 0
        self._fits = Fits(speaks=session.rank == 0)
        self._in_a_pass = False
        self._warned = False
        self._epoch_ends = False
        self._due_after_epoch = 0
        checkpoints.save_due = self._save_due
        self.frozen_variables = FrozenVariables(session, state)
        self.leaving = Leaving(
            session,
            self._save_before_leaving,
            checkpoints.why_not_written,
            has_run_dir=checkpoints.has_place,
        )

    @property
    def position(self) -> Position:
        """The position of the training in its data."""
        return self._checkpoints.position

    def agree_on_saves(self, plan: SavePlan) -> None:
        """Each worker takes its part of a checkpoint by itself: all must at the same boundaries.

        All workers call it; blocks until they have, at most `join_secs`.
        """
        exchange = self._session.exchange
        self._plans += 1
        said = exchange.agree(f"saves/{self._plans}", repr(plan.every), self._session.timeouts.join_secs)
        for worker, theirs in said.items():
            if theirs != said[0]:
                raise ClusterError(
                    f"Worker {worker} has another save_every than worker 0",
                    remedy="Give save_every alike on all workers; worker 0 writes, all take part",
                    received=f"{theirs}, worker 0: {said[0]}",
                )
        exchange.forget_agreed(f"saves/{self._plans - 1}")  # all who have come to this one have heard it

    def plan_saves(self, plan: SavePlan) -> None:
        """Sets when checkpoints are made."""
        self._checkpoints.plan = plan
        if isinstance(plan.every, timedelta) and self._session.rank == 0 and not self._has_timer:
            self._has_timer = True
            self._session.threads.start("save-timer", self._request_in_time)

    def reached(
        self,
        position: Position,
        logs: Mapping[str, Any] | None,
        batches: int | None = None,
        epoch_ends: bool = False,
    ) -> None:
        """Notes the position in the data, and the latest loss and metrics."""
        self._epoch_ends = epoch_ends
        self._checkpoints.position = self._fits.stamped(position)
        self._checkpoints.metrics = logs if logs is not None else {}
        self._session.replica.measures.batches = batches

    def after_step(self, steps: int) -> None:
        """Called at a boundary: makes a checkpoint if one is due, and raises if the last one failed."""
        self._checkpoints.check()
        every, step = self._checkpoints.plan.every, self._session.step
        if isinstance(every, int) and step // every > (step - steps) // every:
            self._save_due()

    def after_epoch(self) -> None:
        """The end of an epoch, with all that callbacks do there."""
        due, self._due_after_epoch, self._epoch_ends = self._due_after_epoch, 0, False
        due += self._checkpoints.plan.every == "epoch"
        if due:
            self._save_due()
        for _ in range(due - 1):
            self._checkpoints.save_once_more()

    def goes_on(self) -> None:
        """Called before the next step, when everything at this boundary is done, callbacks included."""
        self._checkpoints.report()

    def restored(self, restored: Restored, named: int | None) -> None:
        """Called after a restore."""
        self._checkpoints.writer.named = named
        self._checkpoints.position = restored.position
        self._fits.restored(restored.position)

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
        """Called when a `fit` ends."""
        self._fits.end(self.position.epoch, stopped)
        if stopped:
            self._checkpoints.position = self._fits.stamped(self.position)

    def used(self, batches: int) -> None:
        """Called when a custom training loop has used this many more batches of its pass."""
        self._checkpoints.position = self._fits.used(self.position, batches)

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
            self._checkpoints.position = self._fits.looping(begun)
            self._in_a_pass = True
            return dataset
        self._in_a_pass = True
        self._checkpoints.position = self._fits.looping(resumed.in_passes_of(length_of(dataset)))
        return rest_of(dataset, self.position.epoch, self.position.batch)

    def warn_of_what_was_left(self) -> None:
        """Warns about updates scheduled for steps that this training did not reach."""
        if self.leaving.left or self._session.rank != 0:
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

    def _save_due(self) -> None:
        """Makes a checkpoint that is due. Called on all workers."""
        if self._epoch_ends:
            self._due_after_epoch += 1
        else:
            self._checkpoints.save_in_passing()

    def _save_before_leaving(self) -> str:
        """Saves and waits up to a timeout. Returns why nothing was saved, or an empty string."""
        if not self._checkpoints.has_place:
            return "There is no run directory"
        if self._session.replica.on_trial:
            return "A trial is under way"
        secs = self._session.timeouts.join_secs
        self._checkpoints.settle(secs)
        saving: Saving = self._checkpoints.save_in_passing()
        self._checkpoints.report()
        saving.result(secs)
        return ""

    def _request_in_time(self) -> None:
        waited = 0.0
        while not self._session.threads.stopping.wait(LOOK_SECS):
            waited += LOOK_SECS
            plan = self._checkpoints.plan
            if not isinstance(plan.every, timedelta) or waited < plan.every.total_seconds():
                continue
            waited = 0.0
            if plan.when_busy == "wait" or not self._checkpoints.is_busy:
                self._session.request("save")
