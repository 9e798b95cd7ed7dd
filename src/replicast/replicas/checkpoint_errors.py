"""The errors of checkpoints that cannot be made, each with what to do."""

from __future__ import annotations

import errno

from replicast.errors import CheckpointError, JobFailed, NotSupported
from replicast.storage.checkpoint import CheckpointStore

_MAKE_ROOM = "Free disk space, or keep fewer checkpoints: callback(keep=...)"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EROFS: "The file system is read-only: make it writable, or use another run directory",
    errno.EACCES: "Give this user write permission, or use another run directory",
}


def no_run_dir() -> NotSupported:
    """The error for a checkpoint without a run directory."""
    return NotSupported(
        "A checkpoint without a run directory",
        reason="there is nowhere to write it",
        remedy="Use Replicas(model, run_dir=...), or start the job with 'replicast run'",
    )


def not_written(error: OSError, store: CheckpointStore | None, step: int) -> CheckpointError:
    """The error for a checkpoint that could not be written, with what to do."""
    failure = CheckpointError(
        f"The checkpoint of step {step} could not be written",
        path=None if store is None else store.path(step),
        step=step,
        received=str(error),
        remedy=f"{_REMEDIES.get(error.errno or 0, 'Check the file system')}. Earlier checkpoints are intact",
    )
    failure.__cause__ = error
    return failure


def ended_before() -> JobFailed:
    """The error of a checkpoint that nobody will write any more."""
    return JobFailed("The job ended before its checkpoint was written")
