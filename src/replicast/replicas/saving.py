"""Checkpoints of a running job: the whole state at a boundary, written by worker 0 while training goes on.

    training threads    at one boundary: worker 0 copies its state, the others digest theirs
    training threads    when they go on behind that boundary: say what they have proposed up to here
    saver thread        on worker 0: digests the copy, hears the others' digests, and only if all are equal,
                        and what was proposed is decided, writes the checkpoint

A state that is not the same on all workers is never saved as if it were one. Of what was declared to differ,
the mean is saved.

A restarted script does not come again to what callbacks have proposed at the boundary of the checkpoint. So
it is written when that is in the journal: a worker that dies with its proposal leaves the checkpoint before.
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
from replicast.checkpoint import CheckpointStore, Draft, Manifest, file_order
from replicast.digest import digest_array
from replicast.errors import CheckpointError, JobFailed, ReplicasDiverged, ReplicastError
from replicast.protocol import Member
from replicast.protocol.measures import History, mean_history
from replicast.replicas.complaining import complained, not_written
from replicast.replicas.position import Position
from replicast.replicas.reconciling import averaged_names, mean
from replicast.replicas.witnessing import ENDED, Seal, Witnesses
from replicast.state import Arrays
from replicast.strategy import KerasState

logger = logging.getLogger("replicast")

WhenBusy = Literal["wait", "skip"]


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
        measured: What worker 0's last steps have measured.
        seal: Given when worker 0's training goes on.
    """

    number: int
    draft: Draft
    arrays: Arrays
    measured: History
    seal: Seal


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

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is done, at most `timeout` seconds; says whether it is."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> Manifest | None:
        """Blocks until the checkpoint is durable, at most `timeout` seconds.

        Returns:
            Its manifest; None on the workers that do not write, and when it was skipped.

        Raises:
            ReplicasDiverged: The workers' states differ: nothing was saved.
            CheckpointError: It could not be written.
        """
        if not self.wait(timeout):
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

    Attributes:
        named: The step of a checkpoint that stays: the script asked for it, and does so again if restarted.
    """

    def __init__(self, member: Member, state: KerasState, store: CheckpointStore, attempt: int) -> None:
        self._member = member
        self._state = state
        self._store = store
        self._attempt = attempt
        self._witnesses = Witnesses(member, state)
        self._saves = 0
        self._unsealed: int | None = None
        self._seal = Seal()
        self._buffers: Arrays = {}
        self._queue: queue.Queue[tuple[Snapshot, Keeping, Saving]] = queue.Queue()
        self._current: Saving | None = None
        self._failed: tuple[Saving, Exception] | None = None
        self._ending = threading.Lock()
        self._ended: JobFailed | None = None
        self._complained = False
        self.named: int | None = None

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
        """Takes the state of this boundary. The training thread pays for a copy, or for digests.

        It is written when all workers have called `seal`.

        Raises:
            JobFailed: The job ended while the checkpoint before was being written.
        """
        faults.point("snapshot")
        self.seal()
        self._saves += 1
        self._unsealed = self._saves
        saving = Saving()
        if self._member.channel.rank != 0:
            self._witnesses.testify(self._saves, self._averaged())
            saving.finish()
            return saving
        measured = self._member.trying.measures.history()
        if self._current is not None and not self._current.done():
            if when_busy == "skip":
                saving.finish()
                return saving
            self._wait_for(self._current)
        self._state.snapshot(self._buffers)
        self._seal = Seal()
        draft = self._draft(position, metrics)
        snapshot = Snapshot(self._saves, draft, self._buffers, measured, self._seal)
        self._current = saving
        with self._ending:
            if self._ended is None:
                self._queue.put((snapshot, keeping, saving))
            else:  # Nobody would ever take it.
                saving.finish(error=self._ended)
        return saving

    def seal(self) -> None:
        """This worker's training goes on behind the last checkpoint: its proposals so far belong to that."""
        unsealed, self._unsealed = self._unsealed, None
        if unsealed is None:
            return
        if self._member.channel.rank == 0:
            self._seal.give(self._member.outcomes.undecided())
        else:
            self._witnesses.seal(unsealed)

    def settle(self, timeout_secs: float | None = None) -> None:
        """Blocks until nothing is being written. All workers' training threads, at a pause or at the end.

        Raises:
            CheckpointError: It is, after `timeout_secs`.
            JobFailed: The job ended before.
        """
        self.seal()
        if self._current is None:
            return
        if timeout_secs is not None and not self._current.wait(timeout_secs):
            raise CheckpointError(
                "The checkpoint before is still being written", received=f"after {timeout_secs} s"
            )
        self._wait_for(self._current)

    def _wait_for(self, saving: Saving) -> None:
        while not saving.done():
            self._member.threads.check()
            if self._member.threads.stopping.is_set() and not saving.done():
                # Its thread may still be writing: whoever goes on would change the copy that it writes.
                raise JobFailed(ENDED)
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
        ended = JobFailed(ENDED)
        try:
            while not self._member.threads.stopping.is_set():
                work = self._member.threads.take(self._queue)
                if work is not None:
                    self._finish(*work)
            self._member.threads.check()
        except BaseException as error:
            ended = _died(error)
            raise
        finally:
            self._end(ended)

    def _end(self, ended: JobFailed) -> None:
        """This thread takes nothing any more: who waits for a checkpoint that it was given is told so."""
        with self._ending:
            self._ended = ended
            while not self._queue.empty():
                self._queue.get_nowait()[2].finish(error=ended)

    def _finish(self, snapshot: Snapshot, keeping: Keeping, saving: Saving) -> None:
        """Writes a checkpoint, or says why not. Whatever happens, nobody waits for it any more."""
        try:
            manifest = self._write(snapshot)
            self._prune(manifest, keeping)
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
            failure = not_written(error, self._store, snapshot.draft.step)
            self._failed = saving, failure
            saving.finish(error=failure)
        except BaseException as error:  # A mistake in the code: it ends this thread, and with it the job.
            saving.finish(error=_died(error))
            raise

    def _prune(self, manifest: Manifest, keeping: Keeping) -> None:
        """Removes what need not stay. The new one is whole, whatever becomes of this."""
        self._complained = self._complained or complained(manifest, keeping.best)
        try:
            self._store.prune(keeping.last, keeping.best, self.named)
        except (ReplicastError, OSError) as error:
            logger.warning("old checkpoints are not removed, and take room: %s", error)

    def _write(self, snapshot: Snapshot) -> Manifest:
        digests = {name: digest_array(value) for name, value in snapshot.arrays.items()}
        said = self._witnesses.hear(snapshot.number)
        self._witnesses.check(said, snapshot.draft.step, digests)
        others = [each["values"] for each in said]
        for name in self._averaged() if others else ():
            np.copyto(snapshot.arrays[name], mean(snapshot.arrays[name], others, name))
            digests[name] = digest_array(snapshot.arrays[name])
        mine = snapshot.seal.wait(self._member.threads.stopping)
        self._witnesses.wait_for_decisions(mine | self._witnesses.hear_seals(snapshot.number))
        arrays = ((name, snapshot.arrays[name]) for name in file_order(snapshot.draft.schema))
        # As one line of text: it is much, and for no human eye. A trial after a restart is compared with it.
        measured = json.dumps(mean_history([snapshot.measured, *(each["measured"] for each in said)]))
        draft = replace(snapshot.draft, extra={**snapshot.draft.extra, "measured": measured})
        return self._store.write(draft, arrays, digests)

    def _averaged(self) -> list[str]:
        return averaged_names(self._state.schema, self._member.examiner.declared)


def _died(error: BaseException) -> JobFailed:
    failure = JobFailed(f"No checkpoint is written any more. {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _versions() -> dict[str, Any]:
    found = {}
    for package in ("replicast", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
