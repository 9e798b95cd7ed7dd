"""The state machines of one worker, driven by its event loop: events in, messages out.

Messages between worker 0 and its own coordinator are handled directly, in the same process. All other
messages go through the channel; readers post incoming ones. Notes go through the channel too, past the state
machines.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from replicast.core import commands as c
from replicast.core import events as e
from replicast.core.coordinator import Coordinator
from replicast.core.messages import Request, Tell
from replicast.core.worker import Worker
from replicast.errors import JobFailed
from replicast.runtime.channel import Channel
from replicast.runtime.loop import Loop
from replicast.runtime.note import Note
from replicast.runtime.threads import Threads

_ToCoordinator = e.FromWorker | e.Written


class Machines:
    """`Worker` and, on worker 0, `Coordinator`, both called by one thread.

    Args:
        worker: The worker's machine.
        coordinator: On worker 0: the coordinator.
        channel: Carries messages between workers.
        threads: Runs the loop and the readers.
        carry_out: Executes the commands that are not messages or timers. Must not block.
        on_tell: Called with the coordinator's progress messages about operations.
        on_note: On worker 0: called with a worker's rank and note, by that worker's reader. Must not raise.

    Attributes:
        lock: Held while a machine is called. The training thread may query a machine under this lock.
    """

    def __init__(
        self,
        worker: Worker,
        coordinator: Coordinator | None,
        channel: Channel,
        threads: Threads,
        carry_out: Callable[[Any], None],
        on_tell: Callable[[Tell], None],
        on_note: Callable[[int, str], None],
    ) -> None:
        self.worker = worker
        self.coordinator = coordinator
        self.lock = threading.Lock()
        self._channel = channel
        self._threads = threads
        self._carry_out = carry_out
        self._on_tell = on_tell
        self._on_note = on_note
        self._loop = Loop(self._handle, threads.stopping.is_set)

    def start(self) -> None:
        """Starts the loop and the readers."""
        self._threads.start("loop", self._run)
        if self.coordinator is None:
            self._threads.start("reader", self._read)
            return
        for rank in range(1, self._channel.size):
            self._threads.start(f"reader-{rank}", partial(self._read_from, rank))

    def post(self, event: Any) -> None:
        """Posts an event and returns at once. Any thread or signal handler. None only wakes the loop up."""
        self._loop.post(event)

    def _run(self) -> None:
        self._loop.run()
        # Lets the readers of all other workers stop now, before their request to the service times out.
        with contextlib.suppress(JobFailed):
            if self.coordinator is None:
                self._channel.send([])
            else:
                self._channel.broadcast([])

    def _handle(self, event: Any) -> None:
        pending = [] if event is None else [event]
        while pending:
            pending = [more for one in pending for more in self._handle_one(one)]

    def _handle_one(self, event: Any) -> list[Any]:
        """Passes an event to its machine, executes the commands, and returns the local events that follow."""
        if isinstance(event, Request):
            return self._dispatch([c.Send(event)])
        if isinstance(event, Note):
            self._channel.send([event])
            return []
        machine: Worker | Coordinator | None
        if isinstance(event, tuple):  # a timer of one of the machines
            machine, event = event
        else:
            machine = self.coordinator if isinstance(event, _ToCoordinator) else self.worker
        if machine is None:
            return []
        if isinstance(event, e.FromCoordinator) and isinstance(event.message, Tell):
            self._on_tell(event.message)
        with self.lock:
            commands: list[Any] = [*machine.handle(event)]
        return self._dispatch(commands, machine)

    def _dispatch(self, commands: list[Any], machine: Worker | Coordinator | None = None) -> list[Any]:
        follow: list[Any] = []
        sent = [command.message for command in commands if isinstance(command, c.Send)]
        said = [command.message for command in commands if isinstance(command, c.Broadcast)]
        if said:  # to the others first: worker 0 must not act on a message that they may never receive
            self._channel.broadcast(said)
            follow += [e.FromCoordinator(message) for message in said]
        if sent and self.coordinator is None:
            self._channel.send(sent)
        elif sent:
            follow += [e.FromWorker(self._channel.rank, message) for message in sent]
        for command in commands:
            if isinstance(command, c.SetTimer):
                self._loop.post_after(command.secs, (machine, e.TimerFired(command.number)))
            elif not isinstance(command, c.Send | c.Broadcast):
                self._carry_out(command)
        return follow

    def _read(self) -> None:
        while not self._threads.stopping.is_set():
            for message in self._channel.receive():
                self._loop.post(e.FromCoordinator(message))

    def _read_from(self, rank: int) -> None:
        while not self._threads.stopping.is_set():
            for message in self._channel.receive_from(rank):
                if isinstance(message, Note):
                    self._on_note(rank, message.text)
                else:
                    self._loop.post(e.FromWorker(rank, message))
