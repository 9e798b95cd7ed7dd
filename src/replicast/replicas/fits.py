"""Which `fit` of a script a restored position belongs to.

A restarted script comes to all its trainings again, in the same order. Those that were over when the
checkpoint was made are passed over; the one in which it was made goes on; those behind it start anew.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from replicast.errors import CheckpointError
from replicast.replicas.position import Fit, Inside, Position

logger = logging.getLogger("replicast")


class Fits:
    """The trainings of one script. The same on all workers, for their training threads.

    Args:
        speaks: Whether this worker says what there is to say.
    """

    def __init__(self, speaks: bool = True) -> None:
        self._speaks = speaks
        self._begun: list[Fit] = []
        self._inside: Inside = "loop"
        self._resumed: Position | None = None
        self._said: set[str] = set()

    def restored(self, position: Position) -> None:
        """A checkpoint was made at this position."""
        self._resumed = position

    def begin(self, fit: Fit) -> Position:
        """A training with the callback begins.

        Returns:
            Where it goes on. One that was over when the checkpoint was made is "over": it changes nothing.
            One that was "stopped" there has still to be ended as Keras does it, with a moving average maybe.

        Raises:
            CheckpointError: It was not in the life of the job that made the checkpoint.
        """
        resumed = self._resumed
        if resumed is None or resumed.fits is None:
            self._resumed = None
            return self._begins(fit, Position() if resumed is None else resumed)
        self._leave_out(fit, resumed)
        place = len(self._begun)
        last = len(resumed.fits) - 1
        if place < last or (place == last and resumed.inside == "loop"):
            return self._pass_over(resumed.fits[place], len(resumed.fits))
        self._resumed = None
        if place > last:
            return self._begins(fit, Position())
        found = self._begins(fit, resumed)
        stopped = resumed.inside == "stopped" and fit.is_like(resumed.fits[place])
        return replace(found, inside="stopped") if stopped else found

    def end(self, epoch: int, stopped: bool) -> None:
        """The training is over.

        Args:
            epoch: The epoch after its last one.
            stopped: Whether something ended it before all its epochs were done.
        """
        if self._inside == "fit":
            self._begun[-1] = self._begun[-1]._replace(ended=epoch)
        self._inside = "stopped" if stopped else "loop"

    def stamped(self, position: Position) -> Position:
        """The position, with its place in the script."""
        return replace(position, fits=tuple(self._begun), inside=self._inside)

    def used(self, position: Position, batches: int) -> Position:
        """The position after so many more batches; outside of `fit`, those of an own loop."""
        if self._inside == "fit" or not batches:
            return replace(position, batch=position.batch + batches)
        self._warn_if_too_early()
        done = position if position.inside == "loop" or position.fits is None else Position()
        return self.looping(replace(done, batch=done.batch + batches))

    def looping(self, position: Position) -> Position:
        """The position of an own loop, with its place in the script."""
        self._inside = "loop"
        return self.stamped(position)

    def take_loop(self) -> Position | None:
        """Where an own loop that begins a pass goes on, once; None when that is at a beginning."""
        resumed = self._resumed
        if resumed is None or (resumed.fits is not None and len(resumed.fits) > len(self._begun)):
            self._warn_if_too_early()
            return None
        self._resumed = None
        return resumed if resumed.fits is None or resumed.inside == "loop" else None

    def awaited(self) -> str:
        """What is wrong when the script ends before it came to the place of the checkpoint."""
        resumed = self._resumed
        if resumed is None or resumed.fits is None or len(resumed.fits) <= len(self._begun):
            return ""
        return (
            f"NOTHING WAS TRAINED: the checkpoint was made in or after training {len(resumed.fits)} of the "
            f"script (a {resumed.fits[-1]}), and the script ended after {len(self._begun)}. After a restore "
            "it has to come to all its calls of fit again; those that were done are passed over"
        )

    def _begins(self, fit: Fit, position: Position) -> Position:
        self._begun.append(fit)
        self._inside = "fit"
        return replace(position, fits=tuple(self._begun), inside="fit")

    def _pass_over(self, fit: Fit, count: int) -> Position:
        self._begun.append(fit)
        self._inside = "loop"
        self._say(
            f"the checkpoint was made in or after training {count} of the script: those that were done are "
            "passed over"
        )
        return Position(fit.epochs if fit.ended is None else fit.ended, 0, tuple(self._begun), "over")

    def _leave_out(self, fit: Fit, resumed: Position) -> None:
        """A script may leave out what was done: `if restored is None: model.fit(...)`."""
        then, place = resumed.fits or (), len(self._begun)
        last_may_change = place == len(then) - 1 and resumed.inside != "loop"
        if place >= len(then) or last_may_change or fit.is_like(then[place]):
            return
        found = next((later for later in range(place, len(then)) if fit.is_like(then[later])), None)
        if found is None:
            raise CheckpointError(
                f"Training {place + 1} of this script is another one than when the checkpoint was made, so "
                "nobody knows whether it was done",
                expected=f"a {then[place]}",
                received=f"a {fit}",
                remedy="Call fit as before, in the same order, also where it was done: it is passed over. "
                "Or restore a checkpoint that was made before this training: restore(step=...)",
            )
        self._say(
            f"training {place + 1} of the script is left out: the one that begins is number {found + 1}"
        )
        self._begun.extend(then[place:found])

    def _warn_if_too_early(self) -> None:
        if self._resumed is not None and self._resumed.fits is not None:
            ahead = len(self._resumed.fits)
            if ahead > len(self._begun):
                self._say(
                    "THIS LOOP TRAINS AGAIN what is in the checkpoint, which was made in or after training "
                    f"{ahead} with the callback, behind it. Let it end by steps: 'while replicas.step < 300'"
                )

    def _say(self, message: str) -> None:
        if self._speaks and message not in self._said:
            self._said.add(message)
            logger.warning(message)
