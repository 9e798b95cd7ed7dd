"""Which checkpoint a job goes on from, when some of them may be damaged."""

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
        step: Which one; None for the last.
        damaged: What is known to be wrong with which. Those whose damage is seen here are added.

    Returns:
        It, open; None where there is none and none was asked for.

    Raises:
        CheckpointError: There is none of that step, or it is damaged; or none is asked for and all are:
            nobody should start anew without being told.
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
            logger.warning("the checkpoint of step %d is passed over. %s", candidate, error)
    if not damaged:
        return None
    newest = max(damaged)
    whole = store.last_whole(without=newest) if step is not None else None
    begin = f"remove {store.directory} to begin anew"
    raise CheckpointError(
        f"The checkpoint of step {newest} is damaged: {damaged[newest]}"
        if step is not None
        else f"No checkpoint is whole. That of step {newest}: {damaged[newest]}",
        path=store.path(newest),
        step=newest,
        remedy=f"restore(step={whole}) is whole" if whole is not None else f"No other one is whole; {begin}",
    )
