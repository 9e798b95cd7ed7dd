"""A worker's note on its way to worker 0, which writes it where a worker cannot write it itself."""

from __future__ import annotations

from replicast.core.record import record


@record
class Note:
    """The note of a worker that does not see the run directory. It is not for the coordinator.

    Attributes:
        text: A `WorkerNote` as JSON; empty if the worker writes its notes itself from now on.
    """

    text: str
