"""Checkpoints of a running job: the whole state at a boundary, written by worker 0 while training goes on.

    training threads    at one boundary: worker 0 copies its state, the others digest theirs
    saver thread        on worker 0: digests the copy, hears the others' digests, and only if all are equal
                        writes the checkpoint

A state that is not the same on all workers is never saved as if it were one. Of what was declared to differ,
the mean is saved.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

import numpy as np

from replicast import faults
from replicast.audit import what_follows
from replicast.checkpoint import CheckpointStore, Draft, Manifest, file_order
from replicast.digest import digest_array
from replicast.errors import CheckpointError, JobFailed, ReplicasDiverged, ReplicastError
from replicast.fence import Fence
from replicast.protocol import Member
from replicast.protocol.measures import History, mean_history
from replicast.replicas.position import Position
from replicast.replicas.reconciling import averaged_names, mean, packed
from replicast.state import Arrays
from replicast.strategy import KerasState

logger = logging.getLogger("replicast")

WhenBusy = Literal["wait", "skip"]
_NO_METRIC = (
    "keep_best: the checkpoint of step %d has no metric %r, so it cannot be the best one. It has: %s. "
    'Metrics of validation are there with save_every="epoch"'
)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints stay.

    Attributes:
        last: So many of the latest ones.
        best: A metric and whether its smallest or largest value is the best: that one stays too.
    """

    last: int = 3
    best: tuple[str, Literal["min", "max"]] | None = None

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:  # `type`, since True is an int to isinstance
            raise ValueError(f"keep is a number of checkpoints, at least 1. Received: {self.last!r}")
        pair = isinstance(self.best, tuple | list) and len(self.best) == 2 and isinstance(self.best[0], str)
        if self.best is not None and not (pair and self.best[1] in ("min", "max")):
            raise ValueError(
                f'keep_best is a metric and "min" or "max", as in ("loss", "min"). Received: {self.best!r}'
            )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the state, on its way to a file.

    Attributes:
        undecided: What worker 0 had proposed by then and nobody had decided about, by id.
        measured: What worker 0's last steps have measured.
    """

    number: int
    draft: Draft
    arrays: Arrays
    undecided: tuple[str, ...]
    measured: History


class Saving:
    """A checkpoint that is being written. The others' workers hold one too, which is done at once."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: Exception | None = None
        self.told = False
        """Whether somebody was given its failure."""

    def done(self) -> bool:
        """Whether it is written, or never will be."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Manifest | None:
        """Blocks until the checkpoint is durable, at most `timeout` seconds.

        Returns:
            Its manifest; None on the workers that do not write, and when it was skipped.

        Raises:
            ReplicasDiverged: The workers' states differ: nothing was saved.
            CheckpointError: It could not be written.
        """
        if not self._done.wait(timeout):
            raise CheckpointError("The checkpoint is still being written", received=f"after {timeout} s")
        if self._error is not None:
            self.told = True
            raise self._error
        return self._manifest

    def finish(self, manifest: Manifest | None = None, error: Exception | None = None) -> None:
        """Settles it."""
        self._manifest, self._error = manifest, error
        self._done.set()


class Saver:
    """Saves the state of one job. `save` is for the training thread of all workers, at the same boundary.

    Args:
        store: Where; only worker 0 looks at it.
        attempt: Which life of the job this is.
        fence: On worker 0: whether this group may still write.
    """

    def __init__(
        self, member: Member, state: KerasState, store: CheckpointStore, attempt: int, fence: Fence | None
    ) -> None:
        self._member = member
        self._fence = fence
        self._state = state
        self._store = store
        self._attempt = attempt
        self._saves = 0
        self._buffers: Arrays = {}
        self._queue: queue.Queue[tuple[Snapshot, Keeping, Saving]] = queue.Queue()
        self._current: Saving | None = None
        self._failed: tuple[Saving, Exception] | None = None

    def start(self) -> None:
        """Starts the thread that writes. Worker 0 only."""
        self._member.threads.start("saver", self._run)

    def check(self) -> None:
        """Raises, once, why a checkpoint could not be written, unless its `result` has said so already."""
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].told:
            raise failed[1]

    def save(
        self,
        position: Position,
        metrics: Mapping[str, float],
        keeping: Keeping,
        when_busy: WhenBusy = "wait",
    ) -> Saving:
        """Takes the state of this boundary. The training thread pays for a copy, or for digests."""
        faults.point("snapshot")
        self._saves += 1
        saving = Saving()
        measured = self._member.trying.measures.history()
        if self._member.channel.rank != 0:
            digests = self._state.digests(v.name for v in self._state.schema)
            values = packed(self._state, self._averaged())
            said = {
                "step": self._member.gate.step,
                "digests": digests,
                "values": values,
                "undecided": self._member.outcomes.undecided(),
                "measured": measured,
            }
            self._member.channel.tell(f"save/{self._saves}/{self._member.channel.rank}", json.dumps(said))
            saving.finish()
            return saving
        if self._current is not None and not self._current.done():
            if when_busy == "skip":
                saving.finish()
                return saving
            self._wait_for(self._current)
        self._state.snapshot(self._buffers)
        undecided = tuple(self._member.outcomes.undecided())
        snapshot = Snapshot(self._saves, self._draft(position, metrics), self._buffers, undecided, measured)
        self._current = saving
        self._queue.put((snapshot, keeping, saving))
        return saving

    def settle(self) -> None:
        """Blocks until nothing is being written. Worker 0's training thread, at a pause or at the end."""
        if self._current is not None:
            self._wait_for(self._current)

    def _wait_for(self, saving: Saving) -> None:
        while not saving.done():
            self._member.threads.check()
            if self._member.threads.stopping.is_set():
                return
            time.sleep(0.005)

    def _draft(self, position: Position, metrics: Mapping[str, float]) -> Draft:
        holds = self._member.applied
        latest = max(holds, default=0)
        later = [sequence for sequence in range(1, latest) if sequence not in holds]
        return Draft(
            step=self._member.gate.step,
            sequence=latest,
            epoch=position.epoch,
            batch=position.batch,
            created_at=time.time(),
            workers=self._member.channel.size,
            attempt=self._attempt,
            schema=self._state.schema,
            metrics=dict(metrics),
            versions=_versions(),
            extra={"committed_for_later": later, "script": position.script()},
        )

    def _run(self) -> None:
        complained = False
        while not self._member.threads.stopping.is_set():
            work = self._member.threads.take(self._queue)
            if work is None:
                continue
            snapshot, keeping, saving = work
            try:
                manifest = self._write(snapshot, keeping)
                complained = complained or _complained(manifest, keeping)
                saving.finish(manifest)
            except ReplicasDiverged as error:
                saving.finish(error=error)
                # An audit finds out all about it, and raises on every worker if that is what is asked for.
                logger.warning("%s", error)
                self._member.wish("audit")
            except ReplicastError as error:
                self._failed = saving, error
                saving.finish(error=error)
            except OSError as error:
                failure = _not_written(error, self._store, snapshot.draft.step)
                self._failed = saving, failure
                saving.finish(error=failure)

    def _write(self, snapshot: Snapshot, keeping: Keeping) -> Manifest:
        mine = {name: digest_array(value) for name, value in snapshot.arrays.items()}
        workers = range(1, self._member.channel.size)
        try:
            said = [self._compare(snapshot, mine, worker) for worker in workers]
        finally:
            for worker in workers:
                self._member.channel.forget_told(f"save/{snapshot.number}/{worker}")
        others = [each["values"] for each in said]
        for name in self._averaged() if others else ():
            np.copyto(snapshot.arrays[name], mean(snapshot.arrays[name], others, name))
        self._wait_for_decisions({*snapshot.undecided, *(id_ for each in said for id_ in each["undecided"])})
        if self._fence is not None:
            self._fence.check()
        arrays = ((name, snapshot.arrays[name]) for name in file_order(snapshot.draft.schema))
        # As one line of text: it is much, and for no human eye. A trial after a restart is compared with it.
        measured = json.dumps(mean_history([snapshot.measured, *(each["measured"] for each in said)]))
        draft = replace(snapshot.draft, extra={**snapshot.draft.extra, "measured": measured})
        manifest = self._store.write(draft, arrays)
        self._store.prune(keeping.last, keeping.best)
        return manifest

    def _averaged(self) -> list[str]:
        return averaged_names(self._state.schema, self._member.examiner.declared)

    def _wait_for_decisions(self, ids: set[str]) -> None:
        """What was proposed before this boundary is in the journal before the checkpoint is there.

        A restarted script does not come to the lines again that are before it.
        """
        ends = time.monotonic() + self._member.patience.decide_secs
        while not self._member.outcomes.are_decided(ids):
            if self._member.threads.stopping.wait(0.01):
                raise JobFailed("The job ended before its checkpoint was written")
            if time.monotonic() > ends:
                logger.warning("the checkpoint does not wait any longer for proposals: %s", ", ".join(ids))
                return

    def _compare(self, snapshot: Snapshot, mine: dict[str, str], worker: int) -> dict[str, Any]:
        """Raises if a worker's state is another one; gives all that it said."""
        timeout_secs = self._member.patience.begin_secs
        text = self._member.channel.hear(f"save/{snapshot.number}/{worker}", timeout_secs)
        if text is None:
            raise JobFailed(
                f"worker {worker} did not come to checkpoint {snapshot.number} within {timeout_secs:.0f} s",
                worker=worker,
            )
        said: dict[str, Any] = json.loads(text)
        step = snapshot.draft.step
        if said["step"] != step:
            raise CheckpointError(
                "The workers save at different steps",
                step=step,
                expected=f"step {step} on all workers",
                received=f"worker {worker} at step {said['step']}",
                remedy="Call save() on all workers at the same place of the script",
            )
        may_differ = self._member.examiner.declared
        differing = [
            name
            for name, digest in mine.items()
            if name not in may_differ and said["digests"].get(name) != digest
        ]
        if differing:
            raise ReplicasDiverged(
                f"The state is not saved: at step {step} worker {worker} differs from worker 0 in "
                f"{', '.join(differing[:5])}{' and others' if len(differing) > 5 else ''}. "
                f"{what_follows(self._member.examiner.policy)}",
                worker=worker,
                step=step,
            )
        return said


def _not_written(error: OSError, store: CheckpointStore, step: int) -> CheckpointError:
    failure = CheckpointError(
        f"The checkpoint of step {step} could not be written",
        path=store.path(step),
        step=step,
        received=str(error),
        remedy="Make room on the disk, or have fewer stay: callback(keep=...). Those before it are whole",
    )
    failure.__cause__ = error
    return failure


def _complained(manifest: Manifest, keeping: Keeping) -> bool:
    """Whether it had to be said that a checkpoint has not the metric by which the best one stays."""
    if keeping.best is None or keeping.best[0] in manifest.metrics:
        return False
    logger.warning(_NO_METRIC, manifest.step, keeping.best[0], ", ".join(manifest.metrics) or "none")
    return True


def _versions() -> dict[str, Any]:
    found = {}
    for package in ("replicast", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
