"""Save, restore, and leave in good order when the machine is taken away."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from replicast.checkpoint import CheckpointStore
from replicast.errors import CheckpointError, NotSupported
from replicast.fence import Fence
from replicast.protocol import Member
from replicast.protocol.leaving import Leaving
from replicast.replicas.fits import Fits
from replicast.replicas.holding import Held
from replicast.replicas.position import Fit, Position
from replicast.replicas.restoring import Restored, restore
from replicast.replicas.saving import Keeping, Saver, Saving, WhenBusy
from replicast.strategy import KerasState
from replicast.strategy.passes import Batches, length_of, position_problem, rest_of

logger = logging.getLogger("replicast")

SaveEvery = int | timedelta | Literal["epoch"]
LOOK_SECS = 0.5


@dataclass(frozen=True, slots=True)
class Saves:
    """When checkpoints are made, and which of them stay.

    Attributes:
        every: So many steps, a time, or "epoch"; None for never.
        keeping: Which ones stay.
        when_busy: What becomes of one that is due while the one before is still being written.
    """

    every: SaveEvery | None = None
    keeping: Keeping = field(default_factory=Keeping)
    when_busy: WhenBusy = "wait"

    def __post_init__(self) -> None:
        wrong = isinstance(self.every, bool) or (isinstance(self.every, int) and self.every < 1)
        wrong = wrong or (isinstance(self.every, timedelta) and self.every < timedelta(0))
        if wrong or not (
            self.every is None or self.every == "epoch" or isinstance(self.every, int | timedelta)
        ):
            raise ValueError(
                f'save_every is a number of steps, a datetime.timedelta or "epoch". Received: {self.every!r}'
            )
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f'when_busy must be "wait" or "skip". Received: {self.when_busy!r}')


class Recovery:
    """One worker's part in checkpoints. All methods are for the training thread.

    Attributes:
        position: Where in its data the training stands.
        held: What stays as it is while trainings are passed over.
        leaving: This worker's part in leaving when the machine is taken away.
    """

    def __init__(
        self, member: Member, state: KerasState, run_dir: Path | None, attempt: int, fence: Fence | None
    ) -> None:
        self._member = member
        self._run_dir = run_dir
        self._saver: Saver | None = None
        if run_dir is not None:
            store = CheckpointStore(run_dir, fence)
            self._saver = Saver(member, state, store, attempt)
            if member.channel.rank == 0:
                store.clean()
                self._saver.start()
        self._restores = 0
        self._saves = Saves()
        self._timed = False
        self._fits = Fits(speaks=member.channel.rank == 0)
        self._in_a_pass = False
        self._complained = False
        self.held = Held(member)
        self.position = Position()
        self._metrics: Mapping[str, Any] = {}
        self._owed = False
        self._epoch_ends = False
        self._due_after_epoch = False
        member.actions["save"] = self._save_due
        self.leaving = Leaving(member, self._save_before_leaving)

    def plan(self, saves: Saves) -> None:
        """Sets when checkpoints are made."""
        if saves.every is not None and self._saver is None:
            raise _no_run_dir()
        self._saves = saves
        if isinstance(saves.every, timedelta) and self._member.channel.rank == 0 and not self._timed:
            self._timed = True
            self._member.threads.start("timer", self._wish_in_time)

    def reached(
        self,
        position: Position,
        logs: Mapping[str, Any] | None,
        batches: int | None = None,
        epoch_ends: bool = False,
    ) -> None:
        """Notes where in its data the training stands, and the last loss and metrics.

        Args:
            position: Where.
            logs: Loss and metrics.
            batches: How many batches they are running means of.
            epoch_ends: Whether an epoch ends here, and `after_epoch` follows: a checkpoint waits for that.
        """
        self._epoch_ends = epoch_ends
        self.position = self._fits.stamped(position)
        self._metrics = logs if logs is not None else {}
        self._member.trying.measures.batches = batches

    def after_step(self, steps: int) -> None:
        """A boundary: makes the checkpoint that is due, and raises why the last one failed."""
        if self._saver is not None:
            self._saver.check()
        every, step = self._saves.every, self._member.gate.step
        if self._owed or (isinstance(every, int) and step // every > (step - steps) // every):
            self._save_due()

    def after_epoch(self) -> None:
        """The end of an epoch, with all that callbacks do there."""
        due, self._due_after_epoch, self._epoch_ends = self._due_after_epoch, False, False
        if due or self._saves.every == "epoch":
            self._save_due()

    def save(self, when_busy: WhenBusy | None = None, *, goes_on_later: bool = False) -> Saving:
        """Saves the state of this boundary; returns while it is being written.

        Args:
            when_busy: What becomes of it if the one before is still being written; as planned unless given.
            goes_on_later: It is written after `goes_on`, else at once: whoever saves may wait for it here.

        Raises:
            CheckpointError: It holds an update whose trial is not decided.
        """
        if self._saver is None:
            raise _no_run_dir()
        trial_ends = self._member.gate.trial_ends
        if trial_ends is not None:
            raise CheckpointError(
                "A state that may be taken back is not saved: an update is on trial",
                received=f"step {self._member.gate.step}; the trial ends at step {trial_ends}",
                remedy="Save when the trial is decided; save_every of the callback does so by itself",
            )
        when_busy = self._saves.when_busy if when_busy is None else when_busy
        saving = self._saver.save(self.position, numbers(self._metrics), self._saves.keeping, when_busy)
        if not goes_on_later:
            self._saver.seal()
        return saving

    def goes_on(self) -> None:
        """All that was to be done at this boundary is done, by callbacks too: the next step follows."""
        if self._saver is not None:
            self._saver.seal()

    def restore(self, step: int | None, partial: bool) -> Restored | None:
        """Gives all workers the state of a checkpoint."""
        if self._run_dir is None:
            raise _no_run_dir()
        self._member.pause("restore")
        self._restores += 1
        restored = restore(self._member, CheckpointStore(self._run_dir), self._restores, step, partial)
        if restored is None:
            return None
        self._member.pause("\n".join(["restored", *map(str, sorted(restored.holds))]))
        self._member.applied = set(restored.holds)
        self._member.gate.start_from(restored.step)
        if self._saver is not None:
            self._saver.named = step
        self.position = restored.position
        self._fits.restored(restored.position)
        return restored

    def take_resumed(self, fit: Fit) -> Position:
        """Where the training that begins now goes on; one that was over when the state was saved, "over"."""
        resumed = self._fits.begin(fit)
        self.held.put_back()
        if resumed.inside == "over":
            self.held.keep()
        else:
            self.held.release()
        return resumed

    def ended(self, stopped: bool) -> None:
        """A training is over.

        Args:
            stopped: Whether something ended it before all its epochs were done.
        """
        self._fits.end(self.position.epoch, stopped)
        if stopped:
            self.position = self._fits.stamped(self.position)

    def used(self, batches: int) -> None:
        """An own loop has used so many more batches of its pass."""
        self.position = self._fits.used(self.position, batches)

    def resume(self, dataset: Batches) -> Batches:
        """A pass over the data begins; after a restore, the rest of the one that was interrupted."""
        problem = position_problem(dataset)
        if problem and not self._complained and self._member.channel.rank == 0:
            logger.warning(problem)
        self._complained = self._complained or bool(problem)
        resumed = self._fits.take_loop()
        self.held.put_back()
        self.held.release()
        if resumed is None:
            begun = Position(self.position.epoch + 1) if self._in_a_pass else Position()
            self.position = self._fits.looping(begun)
            self._in_a_pass = True
            return dataset
        self._in_a_pass = True
        self.position = self._fits.looping(resumed.in_passes_of(length_of(dataset)))
        return rest_of(dataset, self.position.epoch, self.position.batch)

    def settle(self) -> None:
        """Waits until the last checkpoint is written, and raises why it could not be."""
        if self._saver is not None:
            self._saver.settle()
            self._saver.check()

    def say_what_was_left(self) -> None:
        """An update for a step that this training did not reach stays in the journal; somebody may wonder."""
        step = self._member.gate.step
        if self.leaving.left:
            return
        if self._fits.awaited() and self._member.channel.rank == 0:
            logger.warning(self._fits.awaited())
        later = [stop for stop in self._member.gate.pending() if stop.step > step]
        for computes, what in (
            (
                False,
                "updates committed for step %s were not applied, and wait in the journal for a later start",
            ),
            (True, "functions proposed for step %s were not run"),
        ):
            steps = sorted({stop.step for stop in later if stop.computes == computes})
            if steps and self._member.channel.rank == 0:
                said = f"the training ended at step %d; {what}"
                logger.warning(said, step, ", ".join(map(str, steps[:10])))

    def make_up(self) -> None:
        """Training has ended, and a trial with it: saves what had to wait for that."""
        if self._owed:
            self._save_due()
            self.settle()

    def _save_due(self) -> None:
        """Saves; in a trial, later: no checkpoint holds what may be taken back. The same on all workers."""
        if self._epoch_ends:
            self._due_after_epoch = True
            return
        trial_ends = self._member.gate.trial_ends
        if trial_ends is not None and not self._owed and self._member.channel.rank == 0:
            logger.warning(
                "the checkpoint of step %d is made when the trial ends, at step %d",
                self._member.gate.step,
                trial_ends,
            )
        self._owed = trial_ends is not None
        if not self._owed:
            self.save(goes_on_later=True)

    def _save_before_leaving(self) -> str:
        """Saves, waits for it as long as is waited for anybody, and says what this worker knows of it."""
        if self._saver is None:
            return "the state is not saved, since there is no run directory"
        patience_secs = self._member.patience.begin_secs
        self._saver.settle(patience_secs)
        manifest = self.save(when_busy="wait").result(patience_secs)
        if self._member.channel.rank != 0:
            return "worker 0 saves the state, and says so"
        return "the state is saved" if manifest is not None else "the state is not saved"

    def _wish_in_time(self) -> None:
        last = time.monotonic()
        while not self._member.threads.stopping.wait(LOOK_SECS):
            every = self._saves.every
            if isinstance(every, timedelta) and time.monotonic() - last >= every.total_seconds():
                last = time.monotonic()
                self._member.wish("save")


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """What in the logs is a number; a metric may be anything."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


def _no_run_dir() -> NotSupported:
    return NotSupported(
        "A checkpoint without a run directory",
        reason="there is no place for it",
        remedy="Give Replicas(model, run_dir=...), or start the job with 'replicast run'",
    )
