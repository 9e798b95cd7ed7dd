"""The evaluator of a job: reads each new checkpoint into the model and measures it.

It is no worker. It reads the run directory as anybody outside does, claims nothing in it, and writes one file
of its own, evaluations.jsonl. So it can be late, killed or started again, and the job does not notice. A
checkpoint is known by its step and the moment when worker 0 made it: after a restart of the job there may be
another one of the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicast.client import connect
from replicast.client.run import Brief
from replicast.errors import CheckpointError, FileDamaged, JobFailed, NotFound, NotSupported
from replicast.files import RunDir, below
from replicast.replicas.job_checkpoints import numbers
from replicast.storage.checkpoints import CheckpointStore, Manifest
from replicast.storage.run_files import EVALUATIONS, JobState, append_metrics, measured_in
from replicast.training.named_variables import GLOBAL_SEED, Source
from replicast.training.tensorflow_state import TensorFlowState
from replicast.update.edits import Edit, EditKind

logger = logging.getLogger("replicast")

POLL_SECS = 1.0
_REMIND_SECS = 60.0


class Follower:
    def __init__(self, source: Source, run_dir: RunDir) -> None:
        if not source.is_built:
            raise NotSupported(
                "follow with a model that is not built",
                reason="its variables do not exist yet, so they have no names",
                remedy="Give it a keras.Input, or call model.build(shape) inside strategy.scope()",
            )
        named, hints = source.variables()
        weights = (one._replace(slots=()) for one in named if one.kind != "optimizer")
        self._state = TensorFlowState([one for one in weights if one.name != GLOBAL_SEED], hints)
        self._names = [variable.name for variable in self._state.schema]
        self._run_dir = run_dir
        self._store = CheckpointStore(run_dir)

    def run(self, evaluate: Callable[[], Any], start_secs: float) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        known = {(one["step"], one["time"]) for one in measured_in(self._run_dir, EVALUATIONS)}
        # If it was stopped or has failed, a scheduler may be starting it again, together with this process.
        at_first = self._brief()
        has_run, seen = False, time.monotonic()
        reminded = seen
        while True:
            brief = self._brief()  # Before the checkpoints: one that the job makes at its end is not missed.
            if brief is not None and (brief.running or at_first is None or _differ(brief, at_first)):
                has_run = True
            for manifest in self._store.list():
                key = (manifest.step, round(manifest.created_at, 6))
                if key in known:
                    continue
                known.add(key)  # Also a damaged one: it is said once.
                if self._restore(manifest):
                    found[manifest.step] = self._measure(manifest, evaluate)
            now, state = time.monotonic(), None if brief is None else brief.state
            if brief is not None and brief.running:
                seen = now
            elif state == JobState.FINISHED or (has_run and state == JobState.STOPPED):
                return found
            elif brief is not None and has_run and state == JobState.FAILED:
                raise JobFailed(f"The job of {below(self._run_dir)} has failed: {brief.sentence}")
            elif now - seen > start_secs:
                if found:
                    return found
                said = "has no job" if brief is None else f"has no running job ({brief.sentence})"
                raise JobFailed(f"{below(self._run_dir)} {said}; the evaluator has waited {start_secs:.0f} s")
            elif now - reminded > _REMIND_SECS:
                logger.warning("the evaluator waits for a job in %s", below(self._run_dir))
                reminded = now
            time.sleep(POLL_SECS)

    def _brief(self) -> Brief | None:
        try:
            return connect(str(below(self._run_dir).as_path())).brief()
        except (NotFound, FileDamaged):  # It is not there yet.
            return None

    def _restore(self, manifest: Manifest) -> bool:
        """Reads a checkpoint into the model. False if it was removed meanwhile, or is damaged."""
        try:
            with self._store.open(manifest.step) as reader:
                for name in self._names:
                    mine, there = self._state.schema.resolve(name), reader.manifest.schema.find(name)
                    if there is None or (mine.shape, mine.dtype) != (there.shape, there.dtype):
                        raise CheckpointError(
                            "The checkpoint is of another model",
                            path=reader.path,
                            step=manifest.step,
                            variable=name,
                            expected=f"{mine.dtype} {mine.shape}",
                            received="no such variable" if there is None else f"{there.dtype} {there.shape}",
                        )
                values = {name: reader.read(name) for name in self._names}
        except FileDamaged as error:
            logger.warning("the checkpoint of step %d is not evaluated: %s", manifest.step, error)
            return False
        except CheckpointError:
            if any(one.step == manifest.step for one in self._store.list()):
                raise
            return False  # Removed since it was listed: the job keeps the latest ones.
        self._state.apply([Edit(EditKind.ASSIGN, name, {"value": values[name]}) for name in self._names])
        return True

    def _measure(self, manifest: Manifest, evaluate: Callable[[], Any]) -> dict[str, float]:
        metrics = evaluate()
        if not isinstance(metrics, Mapping):
            raise TypeError(
                "evaluate must return metrics by name, as model.evaluate(…, return_dict=True) does. "
                f"Received: {type(metrics).__name__}"
            )
        values = numbers(metrics)
        append_metrics(self._run_dir, (manifest.step, manifest.created_at, values), file=EVALUATIONS)
        logger.info("step %d evaluated: %s", manifest.step, values)
        return values


def _differ(brief: Brief, other: Brief) -> bool:
    return (brief.state, brief.heard_at) != (other.state, other.heard_at)
