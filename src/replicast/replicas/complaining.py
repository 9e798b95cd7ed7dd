"""What is said of a checkpoint that could not be written, or that cannot be the best one."""

from __future__ import annotations

import errno
import logging

from replicast.checkpoint import CheckpointStore, Manifest
from replicast.errors import CheckpointError

logger = logging.getLogger("replicast")

_MAKE_ROOM = "Make room on the disk, or have fewer stay: callback(keep=...)"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EROFS: "The file system is read-only: make it writable, or give another run directory",
    errno.EACCES: "Let this user write there, or give another run directory",
}
_NO_METRIC = (
    "keep_best: the checkpoint of step %d has no metric %r, so it cannot be the best one. It has: %s. "
    'Metrics of validation are there with save_every="epoch"'
)


def not_written(error: OSError, store: CheckpointStore, step: int) -> CheckpointError:
    """What became of a checkpoint, and what to do, after such an error."""
    failure = CheckpointError(
        f"The checkpoint of step {step} could not be written",
        path=store.path(step),
        step=step,
        received=str(error),
        remedy=f"{_REMEDIES.get(error.errno or 0, 'See what is wrong there')}. Those before it are whole",
    )
    failure.__cause__ = error
    return failure


def complained(manifest: Manifest, best: tuple[str, str] | None) -> bool:
    """Whether it had to be said that a checkpoint has not the metric by which the best one stays."""
    if best is None or best[0] in manifest.metrics:
        return False
    logger.warning(_NO_METRIC, manifest.step, best[0], ", ".join(manifest.metrics) or "none")
    return True
