"""Checks a worker's proposals and gives them ids."""

from __future__ import annotations

import operator
import uuid
from typing import Any

from replicast.errors import UpdateRefused
from replicast.runtime import Session, Ticket
from replicast.runtime.functions import Function
from replicast.update.parts import MAX_STEP, checked_text
from replicast.update.trial import Trial
from replicast.update.update import Update


class Proposing:
    """Checks what can be checked immediately, and passes proposals on. Any thread may call it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rank = session.rank
        self._size = session.size
        self._has_trained = False
        self._last: dict[str, tuple[str, int]] = {}
        self._moment = (-1, "")

    def comes_to(self, moment: str, step: int) -> None:
        """Assigns the training thread's proposals, from here to the next boundary, to this moment.

        Other proposals belong to the previous boundary, or to step 0 if there is none in this attempt.

        Args:
            moment: Its name, one word.
            step: The last step before the moment. In an attempt that begins after it, this is an earlier step
                than the current one.
        """
        self._moment = self._session.step, f"step-{step}-{moment}"

    def go_on(self) -> None:
        """Called when training continues: proposals belong to the current step from now on."""
        self._has_trained = True

    def propose(
        self,
        update: Update | Function,
        *,
        source: int | None,
        at_step: int | None,
        trial: Trial | None = None,
    ) -> Ticket:
        """See `Replicas.propose`."""
        if trial is not None and not isinstance(trial, Trial):
            raise UpdateRefused(
                "trial is not a Trial", expected="replicast.Trial(steps=...)", received=repr(trial)[:200]
            )
        at_step = checked_step(at_step)
        if isinstance(update, Update):
            return self._propose_update(update, source, at_step, trial)
        if not callable(update):
            raise UpdateRefused(
                "Only an Update or a function can be proposed",
                expected="Update().assign(name, value), or a function of the live values",
                received=type(update).__name__,
            )
        runs_on = self._rank if source is None else checked_worker(source, self._size)
        if runs_on != self._rank and not self._session.in_training_thread():
            raise UpdateRefused(
                f"Worker {self._rank} cannot send a function to worker {runs_on}",
                remedy=f"Propose it on worker {runs_on}, or in the training thread of every worker",
            )
        # Outside the training thread it has no definite step, and a restarted job does not propose it again.
        in_step = self._session.in_training_thread()
        id_ = self._next_id(f"function-{runs_on}") if in_step else f"function-{runs_on}-{uuid.uuid4().hex}"
        return self._session.propose_function(id_, update, runs_on, at_step, trial)

    def revert(self, number: Any, note: str, *, force: bool) -> Ticket:
        """See `Replicas.revert`."""
        sequence = checked_step(number)
        if sequence is None:
            raise UpdateRefused("A revert needs the number of an update", received="None")
        checked_text("note", note)
        in_step = self._session.in_training_thread()
        prefix = f"revert-{sequence}-worker-{self._rank}"
        id_ = self._next_id(prefix) if in_step else f"{prefix}-{uuid.uuid4().hex}"
        return self._session.propose_revert(id_, sequence, note, forced=force)

    def _propose_update(
        self, update: Update, source: int | None, at_step: int | None, trial: Trial | None = None
    ) -> Ticket:
        if source is not None:
            raise UpdateRefused("source is only for functions, not for updates", received=f"source={source}")
        if not update.id_was_given and self._session.in_training_thread():
            update = update.with_id(self._next_id(f"worker-{self._rank}"))
        return self._session.propose(update.signed(f"worker {self._rank}"), at_step, trial)

    def _next_id(self, prefix: str) -> str:
        """An id that a restarted job gives to the same proposal again, so that it is applied only once.

        For the training thread. Proposals before training have step 0, even after a restore.
        """
        step = self._session.step
        since, moment = self._moment
        now = moment if since == step else f"step-{step if self._has_trained else 0}"
        last, count = self._last.get(prefix, (now, 0))
        count = count + 1 if last == now else 1
        self._last[prefix] = (now, count)
        return f"{prefix}-{now}-{count}"


def checked_step(at_step: Any) -> int | None:
    """The step that an author chose, if it can be one. Whether it is past, only the coordinator knows.

    Raises:
        UpdateRefused: It is not a whole number, or absurdly large.
    """
    if at_step is None:
        return None
    try:
        step = -1 if isinstance(at_step, bool) else operator.index(at_step)
    except TypeError:
        step = -1
    if not 0 <= step < MAX_STEP:
        raise UpdateRefused(
            "at_step must be a number of steps", expected="an integer from 0 on", received=repr(at_step)[:200]
        )
    return step


def checked_worker(source: Any, size: int) -> int:
    """Checks the rank of a worker.

    Raises:
        UpdateRefused: There is no such worker.
    """
    try:
        number = operator.index(source)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        raise UpdateRefused(
            "There is no such worker", expected=f"source from 0 to {size - 1}", received=repr(source)
        )
    return number
