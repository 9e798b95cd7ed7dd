"""The position of a training in its script and its data.

A restarted script calls all its trainings again, in the same order. Those that were over when the checkpoint
was made are skipped; the one in which it was made resumes; later ones start from the beginning. Until then
the script and its callbacks change variables a second time; these changes are undone, since the restored
state has them already.

Epoch and batch come from the checkpoint's manifest (`Restore.run` of job_checkpoints.py). When `fit` begins,
the callback passes them on to `training/resuming.py`, which positions Keras and its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from replicast.errors import CheckpointError, logger
from replicast.replicas.session import Session
from replicast.update.edits import Edit, EditKind
from replicast.update.schema import Arrays

# What a position refers to: the last `fit` that was begun; a `fit` that was stopped early, or that was over
# in an earlier attempt; or a custom training loop.
Inside = Literal["fit", "stopped", "over", "loop"]


class Fit(NamedTuple):
    """One `fit` with the callback, as a restarted script recognizes it."""

    epochs: int
    batches: int | None = None
    ended: int | None = None

    def __str__(self) -> str:
        batches = "an unknown number of batches" if self.batches is None else f"{self.batches} batches"
        return f"fit with {self.epochs} epochs of {batches}"

    def is_like(self, other: Fit) -> bool:
        return (self.epochs, self.batches) == (other.epochs, other.batches)


@dataclass(frozen=True, slots=True)
class Position:
    """How much of the data was used. Positions at the same place in their data are equal."""

    epoch: int = 0
    batch: int = 0
    fits: tuple[Fit, ...] | None = field(default=None, compare=False)
    inside: Inside = field(default="fit", compare=False)

    def in_passes_of(self, length: int) -> Position:
        """The same position, with each pass as long as the data. A length below 0 means unknown."""
        if length <= 0:
            return self
        passes, batch = divmod(self.batch, length)
        return replace(self, epoch=self.epoch + passes, batch=batch)

    def script(self) -> dict[str, Any]:
        fits = None if self.fits is None else [list(fit) for fit in self.fits]
        return {"fits": fits, "inside": self.inside}

    def at(self, script: Mapping[str, Any] | None) -> Position:
        """This position in the data, combined with a position in the script, as given by `script()`."""
        if script is None or script["fits"] is None:
            return self
        return replace(self, fits=tuple(Fit(*fit) for fit in script["fits"]), inside=script["inside"])


class Fits:
    """Which `fit` of a script a position belongs to. The same on all workers, for their training threads."""

    def __init__(self, speaks: bool = True) -> None:
        self._speaks = speaks
        self._begun: list[Fit] = []
        self._inside: Inside = "loop"
        self.resumed: Position | None = None
        self._said: set[str] = set()

    def begin(self, fit: Fit) -> Position:
        resumed = self.resumed
        if resumed is None or resumed.fits is None:
            self.resumed = None
            return self._begins(fit, Position() if resumed is None else resumed)
        self._leave_out(fit, resumed)
        place = len(self._begun)
        last = len(resumed.fits) - 1
        if place < last or (place == last and resumed.inside == "loop"):
            return self._pass_over(resumed.fits[place], len(resumed.fits))
        self.resumed = None
        if place > last:
            return self._begins(fit, Position())
        found = self._begins(fit, resumed)
        stopped = resumed.inside == "stopped" and fit.is_like(resumed.fits[place])
        return replace(found, inside="stopped") if stopped else found

    def end(self, epoch: int, stopped: bool) -> None:
        if self._inside == "fit":
            self._begun[-1] = self._begun[-1]._replace(ended=epoch)
        self._inside = "stopped" if stopped else "loop"

    def stamped(self, position: Position) -> Position:
        return replace(position, fits=tuple(self._begun), inside=self._inside)

    def used(self, position: Position, batches: int) -> Position:
        """The position after this many more batches; outside of `fit`, those of a custom training loop."""
        if self._inside == "fit" or not batches:
            return replace(position, batch=position.batch + batches)
        self._warn_if_too_early()
        done = position if position.inside == "loop" or position.fits is None else Position()
        self._inside = "loop"
        return Position(done.epoch, done.batch + batches, tuple(self._begun), "loop")  # `replace` takes 1 µs

    def looping(self, position: Position) -> Position:
        self._inside = "loop"
        return self.stamped(position)

    def take_loop(self) -> Position | None:
        """Where a custom training loop resumes, once; None if it starts a pass from the beginning."""
        resumed = self.resumed
        if resumed is None or self._fits_ahead():
            self._warn_if_too_early()
            return None
        self.resumed = None
        return resumed if resumed.fits is None or resumed.inside == "loop" else None

    def awaited(self) -> str:
        """A warning if the script ends before it reached the position of the checkpoint; else empty."""
        if not (fits := self._fits_ahead()):
            return ""
        return (
            f"NOTHING WAS TRAINED: the checkpoint was made in or after training {len(fits)} of the "
            f"script (a {fits[-1]}), and the script ended after {len(self._begun)}. After a restore "
            "the script has to make all its calls of fit again; finished ones are skipped"
        )

    def _begins(self, fit: Fit, position: Position) -> Position:
        self._begun.append(fit)
        self._inside = "fit"
        return replace(position, fits=tuple(self._begun), inside="fit")

    def _pass_over(self, fit: Fit, count: int) -> Position:
        self._begun.append(fit)
        self._inside = "loop"
        made = f"the checkpoint was made in or after training {count} of the script"
        self.say(f"{made}: finished trainings are skipped")
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
        self.say(f"the script omits training {place + 1}: the one that begins now is number {found + 1}")
        self._begun.extend(then[place:found])

    def _warn_if_too_early(self) -> None:
        if self._fits_ahead():
            self.say(
                "THIS LOOP REPEATS TRAINING that is already in the checkpoint, which was made later, in "
                f"or after training {len(self._fits_ahead())} with the callback. End the loop by steps: "
                "'while replicas.step < 300'"
            )

    def _fits_ahead(self) -> tuple[Fit, ...]:
        """The trainings of the checkpoint, if the script has not begun all of them again."""
        fits = () if self.resumed is None else self.resumed.fits or ()
        return fits if len(fits) > len(self._begun) else ()

    def say(self, message: str) -> None:
        """Each message once, and on one worker."""
        if self._speaks and message not in self._said:
            self._said.add(message)
            logger.warning(message)


class FrozenVariables:
    """Variables that are put back while a restarted script repeats work. An update ends the freeze."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state = session.state
        self._copy: Arrays = {}
        self._digests: dict[str, str] = {}
        self._holds: set[int] = set()

    def keep(self, names: Iterable[str] | None = None) -> None:
        holds = self._session.replica.holds
        if self._copy and self._holds == holds:
            return
        chosen = [variable.name for variable in self._state.schema] if names is None else [*names]
        self._copy, self._digests = self._state.read(chosen), self._state.digests(chosen)
        self._holds = set(holds)

    def put_back(self) -> None:
        if not self._copy or self._holds != self._session.replica.holds:
            return
        for name, digest in self._state.digests(self._copy).items():
            if digest != self._digests[name]:
                # A copy: the variable may take over the assigned memory, and training would change it.
                self._state.apply([Edit(EditKind.ASSIGN, name, {"value": np.array(self._copy[name])})])

    def release(self) -> None:
        self._copy, self._digests = {}, {}


class Training:
    """One worker's training: where it is, and what a restarted script repeats. For the training thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fits = Fits(speaks=session.rank == 0)
        self._in_a_pass = False
        self.frozen_variables = FrozenVariables(session)
        self.position = Position()
        self.metrics: Mapping[str, Any] = {}
        self.active = False  # between the first boundary and the end of a training
        self.has_begun = False
        self.epoch_ends = False  # this boundary is the last of an epoch: a checkpoint waits for its end

    def reached(
        self,
        position: Position,
        logs: Mapping[str, Any] | None,
        batches: int | None = None,
        counts: Mapping[str, Sequence[Any]] = {},
        epoch_ends: bool = False,
    ) -> None:
        self.epoch_ends = epoch_ends
        self.position = self._fits.stamped(position)
        self.metrics = logs if logs is not None else {}
        measures = self._session.replica.measures
        measures.batches, measures.counts = batches, counts

    def restored(self, position: Position) -> None:
        self.position = position
        self._fits.resumed = position

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
        self.position = self._fits.used(self.position, batches)

    def resume(self, dataset: Any) -> Any:
        """Begins a pass over the data; after a restore, returns the rest of the interrupted pass."""
        # Not at the top: it imports TensorFlow, which a job of threads does without.
        from replicast.training.resuming import length_of, position_problem, rest_of

        if problem := position_problem(dataset):
            self._fits.say(problem)
        resumed, in_a_pass = self._fits.take_loop(), self._in_a_pass
        self._in_a_pass = True
        self.frozen_variables.put_back()
        self.frozen_variables.release()
        if resumed is None:
            begun = Position(self.position.epoch + 1) if in_a_pass else Position()
            self.position = self._fits.looping(begun)
            return dataset
        self.position = self._fits.looping(resumed.in_passes_of(length_of(dataset)))
        return rest_of(dataset, self.position.epoch, self.position.batch)

    def warn_of_what_was_left(self) -> None:
        """Warns at the end of the script about what it did not reach. On worker 0."""
        if self._session.rank != 0:
            return
        if awaited := self._fits.awaited():
            logger.warning(awaited)
        step = self._session.step
        left = {one["step"] for one in self._session.operations() if (one["step"] or 0) > step}
        if left:
            logger.warning(
                f"the training ended at step {step}; updates scheduled for step "
                f"{', '.join(map(str, sorted(left)[:10]))} were not applied and stay in the journal for a "
                "later start; functions were not run"
            )
