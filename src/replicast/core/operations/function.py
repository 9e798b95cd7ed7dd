"""Function: one worker computes an update from the live values, at the boundary where all apply it.

    coordinator                               every worker
    stop all ───────────────────────────────► stop at one boundary                         training threads
    Compute ────────────────────────────────► the source runs the function; it may refuse
    Prepare ────────────────────────────────► fetch the bytes, check them; refuse          in the background
    write the payload and the record: THE COMMIT
    Apply, release ─────────────────────────► apply, report the digest, continue

All workers may propose the same function under one id: it runs once, on its source. A function is code and
cannot be stored: until its result is committed, it exists only in the memory of its source.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from replicast.core.messages import Order, Replica
from replicast.core.operation import Ask, Boundary, JobView, Operation, Reserve, Script
from replicast.core.operations.trial import tried
from replicast.core.operations.update import applied, prepared_here
from replicast.core.records import Proposal, Published


class Function(Operation):
    """A function that was proposed."""

    kind: ClassVar[str] = "function"

    def __init__(self, proposal: Proposal) -> None:
        super().__init__(proposal.id, proposal)
        self.function = proposal
        self.has_source = False

    def script(self, job: JobView) -> Script:
        function, times = self.function, job.timeouts
        if function.at_step is not None:
            yield Reserve(function.at_step)
            self.waits_until = function.at_step
        step = yield Boundary(function.at_step)
        source = (0 if function.source is None else function.source,)
        computed = yield Ask(Compute(function.id), source, times.compute_secs, "compute the update")
        made = computed[source[0]]
        update = replace(function, digest=made.digest, content=made.content, note=function.note or made.note)
        yield from prepared_here(job, update)
        if function.trial is not None:
            return (yield from tried(self, job, update, step))
        return (yield from applied(self, job, update, step))


class Compute(Order):
    """Worker, in the training thread of the source: run the function."""

    id: str

    def perform(self, replica: Replica) -> Published:
        return replica.compute(self.id)
