"""Chooses the checkpoint from which a job resumes, when some of them may be damaged."""

from __future__ import annotations

import logging

from replicast.errors import CheckpointError, FileDamaged
from replicast.storage.checkpoint.reading import CheckpointReader
from replicast.storage.checkpoint.store import CheckpointStore

logger = logging.getLogger("replicast")


def choose(store: CheckpointStore, step: int | None, damaged: dict[int, str]) -> CheckpointReader | None:
    """Opens the checkpoint to restore: that of a step, or the last one that is not known to be damaged.

    Args:
        store: The checkpoints of a run.
        step: The step; None for the last checkpoint.
        damaged: Known damage, by step. Damage found here is added.

    Returns:
        The open checkpoint; None if there is none and no step was given.

    Raises:
        CheckpointError: There is no checkpoint of that step, or it is damaged; or no step was given and all
            are damaged: a job must not silently start from scratch.
    """
    for candidate in store.steps() if step is None else [step]:
        if candidate in damaged:
            continue
        try:
            return store.open(candidate)
        except FileDamaged as error:
            damaged[candidate] = str(error)
        except CheckpointError as error:
            if step is not None:
                raise
            logger.warning("the checkpoint of step %d is skipped. %s", candidate, error)
    if not damaged:
        return None
    newest = max(damaged)
    whole = store.last_whole(without=newest) if step is not None else None
    begin = f"remove {store.directory} to start from scratch"
    raise CheckpointError(
        f"The checkpoint of step {newest} is damaged: {damaged[newest]}"
        if step is not None
        else f"No checkpoint is intact. Step {newest}: {damaged[newest]}",
        path=store.path(newest),
        step=newest,
        remedy=f"restore(step={whole}) is intact" if whole is not None else f"No other is intact; {begin}",
    )
