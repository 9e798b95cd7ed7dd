"""The protocol without I/O: event in, commands out.

`Coordinator` and `WorkerMachine` are state machines. They have no threads, locks, clocks, files or sockets:
a simulation runs a whole job of them in one thread, in virtual time, from a seed (`tests.simulator`), and a
runtime drives them with real ones:

    on every worker     worker = WorkerMachine(rank, step)
    on worker 0         coordinator = Coordinator(size, history, attempt=…, start=checkpoint)

    a message, a boundary, a finished write, a timer ──► handle(event) ──► commands, carried out in order

What the runtime must guarantee:

- Each machine is called by one thread at a time.
- `Broadcast` appends to one log, which every worker reads in order. Messages of one worker arrive in order.
- Writes are carried out one at a time, in order. After each write, and before `Written`, the writer checks
  for a later claim of the run directory (`entries.py`).
- A training thread at a boundary creates an `Arrived` and waits for `Pass`. It may skip this if
  `Worker.passes(step)` returns true, which costs one uncontended lock.
- An order that is not `in_background` is carried out by the training thread, which is stopped meanwhile.
- Proposals of a training thread are sent before it rests, waits for a ticket or reports.
- An `Answer` for a planned report is created on all workers at the same boundaries. Just before `Arrived`,
  and just before the next step, all have the same state. Between the two, an update may be applied on
  workers that wait there. An audit is then repeated with all workers stopped, and snapshots are taken again
  (`Replica.snapshot`).
- What a worker publishes is available until its attempt ends. `Replica.load` makes payloads of the journal
  available. `Replica.discard` also cancels a fetch in progress.
- A report to raise (`Replica.report`) is raised when the training thread continues: at `Pass` or `Continue`.
- A guard is checked by the proposing worker before `Propose`; for a function's result, in `Replica.compute`.

Where to look:

    an update comes in, waits, is refused; whose turn it is     `coordinator.py`
    its script, and the workers' part of it                     `operations/apply.py`
    all training threads stop                                   `worker.py`, `Meeting` in `operation.py`
    entries of the journal, and which of them are valid         `entries.py`
    what passes between the machines, and to the runtime        `messages.py`
"""
