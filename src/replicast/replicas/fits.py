"""Which `fit` of a script a restored position belongs to.

A restarted script calls all its trainings again, in the same order. Those that were over when the checkpoint
was made are skipped; the one in which it was made resumes; later ones start from the beginning.
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
        speaks: Whether this worker logs warnings.
    """

    def __init__(self, speaks: bool = True) -> None:
        self._speaks = speaks
        self._begun: list[Fit] = []
        self._inside: Inside = "loop"
        self._resumed: Position | None = None
        self._said: set[str] = set()

    def restored(self, position: Position) -> None:
        """Sets the position of the restored checkpoint."""
        self._resumed = position

    def begin(self, fit: Fit) -> Position:
        """Called when a training with the callback begins.

        Returns:
            The position at which it resumes. A training that was over when the checkpoint was made is "over"
            and is skipped. One that was "stopped" there still has to be ended by Keras, which may, for
            example, assign moving averages.

        Raises:
            CheckpointError: The attempt that made the checkpoint had no such training.
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
        """Called when the training is over.

        Args:
            epoch: The epoch after its last one.
            stopped: Whether it was stopped before all its epochs were done.
        """
        if self._inside == "fit":
            self._begun[-1] = self._begun[-1]._replace(ended=epoch)
        self._inside = "stopped" if stopped else "loop"

    def stamped(self, position: Position) -> Position:
        """The position in the data, combined with the position in the script."""
        return replace(position, fits=tuple(self._begun), inside=self._inside)

    def used(self, position: Position, batches: int) -> Position:
        """The position after this many more batches; outside of `fit`, those of a custom training loop."""
        if self._inside == "fit" or not batches:
            return replace(position, batch=position.batch + batches)
        self._warn_if_too_early()
        done = position if position.inside == "loop" or position.fits is None else Position()
        return self.looping(replace(done, batch=done.batch + batches))

    def looping(self, position: Position) -> Position:
        """The position of a custom training loop, combined with the position in the script."""
        self._inside = "loop"
        return self.stamped(position)

    def take_loop(self) -> Position | None:
        """Where a custom training loop resumes, once; None if it starts a pass from the beginning."""
        resumed = self._resumed
        if resumed is None or (resumed.fits is not None and len(resumed.fits) > len(self._begun)):
            self._warn_if_too_early()
            return None
        self._resumed = None
        return resumed if resumed.fits is None or resumed.inside == "loop" else None

    def awaited(self) -> str:
        """A warning if the script ends before it reached the position of the checkpoint; else empty."""
        resumed = self._resumed
        if resumed is None or resumed.fits is None or len(resumed.fits) <= len(self._begun):
            return ""
        return (
            f"NOTHING WAS TRAINED: the checkpoint was made in or after training {len(resumed.fits)} of the "
            f"script (a {resumed.fits[-1]}), and the script ended after {len(self._begun)}. After a restore "
            "the script has to make all its calls of fit again; finished ones are skipped"
        )

    def _begins(self, fit: Fit, position: Position) -> Position:
        self._begun.append(fit)
        self._inside = "fit"
        return replace(position, fits=tuple(self._begun), inside="fit")

    def _pass_over(self, fit: Fit, count: int) -> Position:
        self._begun.append(fit)
        self._inside = "loop"
        self._say(
            f"the checkpoint was made in or after training {count} of the script: finished trainings are "
            "skipped"
        )
        return Position(fit.epochs if fit.ended is None else fit.ended, 0, tuple(self._begun), "over")

    def _leave_out(self, fit: Fit, resumed: Position) -> None:
        """Handles a script that omits finished trainings: `if restored is None: model.fit(...)`."""
        then, place = resumed.fits or (), len(self._begun)
        last_may_change = place == len(then) - 1 and resumed.inside != "loop"
        if place >= len(then) or last_may_change or fit.is_like(then[place]):
            return
        found = next((later for later in range(place, len(then)) if fit.is_like(then[later])), None)
        if found is None:
            raise CheckpointError(
                f"Training {place + 1} of this script is not the one from when the checkpoint was made, so "
                "it is not known whether it was finished",
                expected=f"a {then[place]}",
                received=f"a {fit}",
                remedy="Make the same calls of fit in the same order; finished ones are skipped. Or restore "
                "a checkpoint that was made before this training: restore(step=...)",
            )
        self._say(f"the script omits training {place + 1}: the one that begins now is number {found + 1}")
        self._begun.extend(then[place:found])

    def _warn_if_too_early(self) -> None:
        if self._resumed is not None and self._resumed.fits is not None:
            ahead = len(self._resumed.fits)
            if ahead > len(self._begun):
                self._say(
                    "THIS LOOP REPEATS TRAINING that is already in the checkpoint, which was made later, in "
                    f"or after training {ahead} with the callback. End the loop by steps: "
                    "'while replicas.step < 300'"
                )

    def _say(self, message: str) -> None:
        if self._speaks and message not in self._said:
            self._said.add(message)
            logger.warning(message)
