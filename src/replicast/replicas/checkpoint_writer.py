"""Worker 0's part in checkpoints: writes the copies of the state, and says why one was not written.

saver lane      writes a checkpoint that all workers agree on, and removes old ones
release lane    hears from the coordinator how each save ended; one that was not written is settled here
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from replicast.audits.report import what_follows
from replicast.core.commands import Ended
from replicast.core.entries import Saved
from replicast.core.events import WriteOutcome
from replicast.core.refusal import Refusal
from replicast.core.stage import Stage
from replicast.errors import CheckpointError, JobFailed, ReplicasDiverged, ReplicastError
from replicast.replicas.averages import averaged_names, mean
from replicast.replicas.checkpoint_errors import no_run_dir, not_written
from replicast.replicas.saving import Keeping, Saving
from replicast.runtime import Session
from replicast.runtime.measures import MetricHistory, mean_history
from replicast.storage.checkpoint import CheckpointStore, Draft, Manifest, file_order, saved_of
from replicast.update.digest import digest_array
from replicast.update.schema import Schema
from replicast.update.state import Arrays

logger = logging.getLogger("replicast")


@dataclass(slots=True)
class StateCopy:
    """Worker 0's copy of the state, to be written to a file."""

    draft: Draft
    arrays: Arrays
    digests: dict[str, str]
    measured: MetricHistory
    saving: Saving


class CheckpointWriter:
    """Writes checkpoints, on worker 0. For its lanes, unless a method says otherwise.

    Args:
        session: This worker's part in the job.
        schema: The variables.
        store: Where to write; None without a run directory.

    Attributes:
        keeping: Which checkpoints to keep.
        named: The step of a checkpoint to keep: the script restored it by step, and will again on a restart.
        policy: What happens when replicas differ, for messages. Set before the first boundary.
        remove_payloads: Removes payloads that no checkpoint needs, given the updates that all contain and
            those that some propose again. Set before the first boundary.
    """

    def __init__(self, session: Session, schema: Schema, store: CheckpointStore | None) -> None:
        self._session = session
        self._schema = schema
        self._store = store
        self._expected: dict[str, Saving] = {}
        self._failed: tuple[Saving, Exception] | None = None
        self._warned_of_metric = False
        self.keeping = Keeping()
        self.named: int | None = None
        self.policy: Callable[[], str] = lambda: "raise"
        self.remove_payloads: Callable[[frozenset[int], frozenset[tuple[str, str]] | None], None] = (
            lambda held, pending: None
        )

    # The training thread.

    def expect(self, saving: Saving) -> None:
        """The save of this id is about to be decided by all workers; `ended` is called for each."""
        self._expected[saving.id] = saving

    def check(self) -> None:
        """Raises the error of a failed checkpoint, once, unless `result` has raised it already."""
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].told:
            raise failed[1]

    # The lanes.

    def write(self, saved: Saved) -> WriteOutcome:
        """Writes a checkpoint, in the saver lane. It is settled afterwards, even if writing failed."""
        copy: StateCopy = saved.state[0]
        others: Sequence[dict[str, Any]] = saved.state[1:]
        if not copy.saving.begin_writing():  # another checkpoint has replaced it and reuses its memory
            return WriteOutcome.FAILED
        try:
            manifest = self._written(copy, others, saved)
        except JobFailed as error:
            copy.saving.finish(error=error)
            return WriteOutcome.FENCED
        except (ReplicastError, OSError) as error:
            failure = not_written(error, self._store, saved.step) if isinstance(error, OSError) else error
            self._fail(copy.saving, failure)
            return WriteOutcome.FAILED
        except BaseException as error:
            copy.saving.finish(error=JobFailed(f"Checkpoints can no longer be written: {error}"))
            raise
        copy.saving.finish(manifest)
        copy.arrays, copy.measured = {}, []
        for other in others:
            other.clear()
        return WriteOutcome.DURABLE

    def ended(self, ended: Ended) -> None:
        """A save has ended: if it was not written, says why. In the lane "release"."""
        saving, refusal = self._expected.pop(ended.id, None), ended.outcome.result
        if not isinstance(refusal, Refusal):
            if saving is not None:
                saving.finish()  # it was skipped, unless it is written
            return
        problem = f"The state is not saved. {refusal.problem}"
        if ended.outcome.stage is Stage.FAILED:
            error: ReplicastError = ReplicasDiverged(
                f"{problem}. {what_follows(self.policy())}",  # type: ignore[arg-type]
                worker=refusal.workers[0] if refusal.workers else None,
                step=(refusal.details or {}).get("step"),
            )
            logger.warning("%s", error)
            if saving is not None:
                saving.finish(error=error)
        elif saving is None:  # nobody holds it: it was due, and no worker has taken its part
            logger.warning("%s", problem)
        elif not saving.done():
            self._fail(saving, CheckpointError(problem))

    def _fail(self, saving: Saving, error: Exception) -> None:
        self._failed = saving, error
        saving.finish(error=error)

    def _written(self, copy: StateCopy, others: Sequence[dict[str, Any]], saved: Saved) -> Manifest:
        if self._store is None:
            raise no_run_dir()
        replica = self._session.replica
        for name in averaged_names(self._schema, replica.may_differ) if others else ():
            values = [other["values"] for other in others]
            np.copyto(copy.arrays[name], mean(copy.arrays[name], values, name))
            copy.digests[name] = digest_array(copy.arrays[name])
        arrays = ((name, copy.arrays[name]) for name in file_order(copy.draft.schema))
        # One line of text, as it is long and not for people. A trial after a restart is compared with it.
        histories = [copy.measured, *(json.loads(other["measured"]) for other in others)]
        measured = json.dumps(mean_history(histories))
        draft = replace(copy.draft, measured=measured).with_updates(saved)
        manifest = self._store.write(draft, arrays, copy.digests)
        self._prune(manifest)
        return manifest

    def _prune(self, manifest: Manifest) -> None:
        """Removes old checkpoints. The new one is intact, whatever happens to the others."""
        best = self.keeping.best
        if best is not None and best[0] not in manifest.metrics and not self._warned_of_metric:
            self._warned_of_metric = True
            logger.warning(
                "keep_best: the checkpoint of step %d has no metric %r, so it cannot be the best one. It "
                'has: %s. For validation metrics, use save_every="epoch"',
                manifest.step,
                best[0],
                ", ".join(manifest.metrics) or "none",
            )
        try:
            if self._store is not None:
                self._store.prune(self.keeping.last, best, self.named)
                self._remove_payloads(self._store)
        except (ReplicastError, OSError) as error:
            logger.warning("old checkpoints cannot be removed and use disk space: %s", error)

    def _remove_payloads(self, store: CheckpointStore) -> None:
        """Removes the payloads that no start from a checkpoint needs.

        Called in the only thread that writes and removes checkpoints: the list has all of them.
        """
        kept = [saved_of(manifest) for manifest in store.list()]
        held = frozenset.intersection(*(saved.holds for saved in kept)) if kept else frozenset()
        proposals = [one.proposal for saved in kept for one in saved.pending]
        pending = frozenset((one.id, one.digest) for one in proposals)
        # One that is damaged now may be repaired, and nobody knows what it proposes.
        self.remove_payloads(held, None if store.problems() else pending)


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers; a metric may be anything."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


@functools.cache
def versions() -> Mapping[str, Any]:
    """The versions of the packages that a checkpoint depends on. Asked once: that takes milliseconds."""
    found = {}
    for package in ("replicast", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
