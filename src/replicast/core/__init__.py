"""The protocol without I/O: event in, commands out.

`Coordinator` and `Worker` are state machines. They have no threads, locks, clocks, files or sockets, so a
simulation can run a whole job of them in one thread, in virtual time, from a seed
(`replicast.testing.simulation`), and a runtime can drive them with real ones:

    on every worker     worker = Worker(rank, step)
    on worker 0         coordinator = Coordinator(size, history, attempt=…, start=checkpoint)

    a message, a boundary, a finished write, a timer ──► handle(event) ──► commands, carried out in order

What the runtime has to keep to:

- Each machine is called by one thread at a time.
- `Broadcast` appends to one log, which every worker reads in order. What a worker sends arrives in order.
- Writes are carried out one after the other, in order. After each write, and before `Written`, the writer
  looks for a later claim of the run directory (`history.py`).
- A training thread at a boundary makes an `Arrived` and waits for `Pass`. When `Worker.passes(step)` says
  that there is nothing to do, it need not: that is one uncontended lock.
- An order that is not `in_background` is carried out by the training thread, which stands.
- What a training thread has proposed is sent before it rests, waits for a ticket or reports.
- `Reported` is made on all workers at the same boundaries. Just before `Arrived`, and just before the next
  step, all have the same state. Between the two, an update may be applied on workers that wait there: then
  an audit looks again where all stand, and a checkpoint's snapshots are taken again (`Replica.snapshot`).
- What a worker publishes is available until its attempt ends; `Replica.load` makes available what the
  journal holds. `Replica.discard` also forgets what is still being fetched.
- A report to raise (`Replica.report`) is raised when the training thread goes on: at `Pass` or `Continue`.
- A guard is asked by the proposing worker before `Proposed`, and of a function's result in `Replica.compute`.

Where is …                          | file
an update coming in                 | `coordinator.py`, `_propose`
it waiting                          | `coordinator.py`: `operations`, the one list
its author told                     | `tickets.py`, and which refusals are written first
its whole way                       | `operations/update.py`
where all training threads stop     | `meeting.py`, `worker.py`; whose turn it is there: `boundaries.py`
what is written down                | `entries.py`; how it is read, and which of it counts: `history.py`
a restart                           | `operations/begin.py`
"""

from replicast.core.coordinator import Coordinator
from replicast.core.history import Group, History, valid
from replicast.core.operation import Timeouts
from replicast.core.proposal import Proposal
from replicast.core.refusal import Refusal, Refuse
from replicast.core.stage import Stage
from replicast.core.worker import Worker

__all__ = [
    "Coordinator",
    "Group",
    "History",
    "Proposal",
    "Refusal",
    "Refuse",
    "Stage",
    "Timeouts",
    "Worker",
    "valid",
]
