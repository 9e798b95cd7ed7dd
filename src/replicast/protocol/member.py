"""A worker's part in the protocol: proposes, stages, stops and applies.

    proposer thread    validates what this worker proposes, makes its bytes available, posts the proposal
    follower thread    reads the log in order: stages and answers, puts stops in the training thread's way,
                       settles tickets
    training thread    applies at its boundaries what was decided (`Gate`), reports the digest

Everything that can fail or wait happens in the two background threads, before the decision.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from replicast.errors import ReplicasDiverged, UpdatePending, UpdateRefused
from replicast.journal import Receipt
from replicast.protocol.channel import Channel
from replicast.protocol.functions import Function, computed_update
from replicast.protocol.gate import Gate
from replicast.protocol.messages import (
    Advance,
    Aim,
    Answer,
    Applied,
    Compute,
    Computed,
    Drop,
    Failed,
    Free,
    Go,
    Hold,
    Parked,
    Paused,
    Proposal,
    Replay,
    Resume,
    Stage,
    Verified,
)
from replicast.protocol.threads import Threads
from replicast.protocol.ticket import Ticket, Tickets
from replicast.state import State
from replicast.transport import Parcel, Transport
from replicast.update import Stage as Standing
from replicast.update import Update
from replicast.validate import Limits, planned


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for whom.

    Attributes:
        stage_secs: For every worker to have fetched and checked an update's bytes.
        answer_secs: For every worker's follower thread to answer.
        decide_secs: For the coordinator, by a training thread that stands at a boundary.
        compute_secs: For a function that runs at a boundary, once all have come there.
        begin_secs: For the other workers to make their `Replicas`.
        park_secs: For the other workers to wait as well, by a training thread that waits for a result.
    """

    stage_secs: float = 120.0
    answer_secs: float = 30.0
    decide_secs: float = 900.0
    compute_secs: float = 600.0
    begin_secs: float = 600.0
    park_secs: float = 5.0


class Member:
    """One worker. `propose` may be called by any thread; `arrive`, `pause` by the training thread.

    Args:
        check: Raises when the job has failed elsewhere, so that no wait outlives it.
    """

    def __init__(
        self,
        channel: Channel,
        transport: Transport,
        state: State,
        *,
        patience: Patience | None = None,
        limits: Limits | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel = channel
        self.transport = transport
        self.state = state
        self.patience = patience or Patience()
        self.limits = limits or Limits()
        self.threads = Threads(on_death=lambda: self.gate.wake())
        self._check_elsewhere = check
        self.gate = Gate(self, self._check, self.patience.decide_secs, self._say_parked)
        self._tickets = Tickets()
        self._outbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._staged: dict[str, tuple[Update, str]] = {}
        self._functions: dict[str, Function] = {}
        self._own_parcels: dict[str, list[str]] = {}
        self._parcels = 0
        self._token = 0
        self._resumed: dict[int, dict[str, Any] | None] = {}
        self._training_thread: int | None = None
        self.history: list[Receipt] = []
        """The receipts of all verified updates so far, in order. Written by the follower."""

    def start(self) -> None:
        """Starts the background threads. The calling thread is taken for the training thread."""
        self._training_thread = threading.get_ident()
        self.threads.start("follower", self._follow)
        self.threads.start("proposer", self._send)

    def propose(self, update: Update, at_step: int | None = None) -> Ticket:
        """Proposes an update. Returns at once."""
        ticket = self._ticket(update.id, "")
        self._outbox.put(lambda: self._post_update(update, ticket, at_step))
        return ticket

    def propose_function(self, id_: str, function: Function, source: int, at_step: int | None) -> Ticket:
        """Proposes what a function will compute on worker `source`; only that worker posts it."""
        ticket = self._ticket(id_, f"function-{id_}")
        if source == self.channel.rank:
            self._functions[id_] = function
            proposal = Proposal(
                id_, ticket.content_digest, self.channel.rank, time.time(), source=source, at_step=at_step
            )
            self._outbox.put(lambda: self.channel.post(proposal))
        return ticket

    def arrive(self, step: int) -> None:
        """The training thread stands at a boundary; see `Gate.arrive`."""
        self._training_thread = threading.get_ident()
        self.gate.arrive(step)

    def in_training_thread(self) -> bool:
        """Whether the caller is the thread that comes to the boundaries."""
        return threading.get_ident() == self._training_thread

    def pause(self, intent: str) -> None:
        """Waits at the current boundary until all workers have come here with the same intent.

        Everything that was proposed before, by anyone, is settled when it returns. Blocks as long as the
        others run; raises when one of them fails.
        """
        self._training_thread = threading.get_ident()
        self._token += 1
        token = self._token
        paused = Paused(token, self.channel.rank, self.gate.step, intent)
        self._outbox.put(lambda: self.channel.post(paused))
        self.gate.park(lambda: token in self._resumed, None)
        error = self._resumed.pop(token)
        if error is not None:
            raise UpdateRefused.from_json(error)

    def stop(self, timeout_secs: float = 5.0) -> None:
        """Ends the background threads; open tickets say that the job is over."""
        self.threads.stop(timeout_secs)
        for ticket in self._tickets.all():
            ticket.fail(
                ticket.stage,
                UpdatePending(
                    f"The job ended at step {self.gate.step}; update {ticket.id} is {ticket.stage}"
                    + (f" for step {ticket.step}" if ticket.step is not None else ""),
                    stage=ticket.stage,
                    update_id=ticket.id,
                ),
            )
        self.transport.close()

    def staged(self, id_: str) -> Update:
        """A staged update; for the coordinator, which writes it to the journal."""
        return self._staged[id_][0]

    def publish(self, update: Update) -> Parcel:
        """Makes an update's bytes, and what it says, available to all workers."""
        self._parcels += 1
        described = np.frombuffer(json.dumps(update.describe()).encode(), np.uint8)
        parcel_id = f"{self.channel.rank}-{self._parcels}"
        parcel = self.transport.publish(parcel_id, [*update.arrays(), described])
        self._own_parcels.setdefault(update.id, []).append(parcel.id)
        return parcel

    # What the training thread does at a boundary.

    def apply(self, go: Go, step: int, since: float) -> None:
        """Applies committed updates, in order, and reports each."""
        for sequence, id_ in go.updates:
            update, parcel_id = self._staged.pop(id_)
            self.state.apply(update.edits)
            applied_at = time.time()
            digest = self.state.digest(update.edits)
            # Giving back the memory takes as long as applying: not in this thread.
            self._outbox.put(partial(self._let_go, update, parcel_id))
            del update
            stall_secs = time.monotonic() - since
            self.channel.applied(sequence, Applied(digest, step, applied_at, stall_secs))
            for ticket in self._tickets.about(id_):
                ticket.stage = Standing.APPLIED

    def compute(self, order: Compute) -> None:
        """Runs the function, if this worker is the source, and makes what it returns available."""
        if order.source != self.channel.rank:
            return
        try:
            update = computed_update(order, self._functions.pop(order.id, None), self.state)
            update = planned(update, self.state.schema, self.limits)
            computed = Computed(self.publish(update).to_json(), content_digest=update.content_digest())
        except UpdateRefused as error:
            computed = Computed(error=_by(error, self.channel.rank))
        self.channel.computed(order.round, computed)

    # The proposer thread.

    def _send(self) -> None:
        while not self.threads.stopping.is_set():
            send = self.threads.take(self._outbox)
            if send is not None:
                send()

    def _let_go(self, update: Update, parcel_id: str) -> None:
        del update
        self.transport.release(parcel_id)

    def _post_update(self, update: Update, ticket: Ticket, at_step: int | None) -> None:
        try:
            # Its values are looked at when all workers have them, each worker at its share.
            parcel = self.publish(planned(update, self.state.schema, self.limits, look_at=lambda _: False))
        except UpdateRefused as error:
            self._settle_refused(ticket, error)
            return
        ticket.content_digest = parcel.digest  # of the values and of what is done with them, note included
        self.channel.post(
            Proposal(
                update.id,
                ticket.content_digest,
                self.channel.rank,
                ticket.proposed_at,
                parcel=parcel.to_json(),
                at_step=at_step,
            )
        )

    # The follower thread.

    def _follow(self) -> None:
        number = 0
        while not self.threads.stopping.is_set():
            message = self.channel.entry(number)
            if message is None:
                continue
            answer = self._heed(message)
            if answer is not None:
                self.channel.answer(number, answer)
            number += 1

    def _heed(self, message: Any) -> Answer | None:
        match message:
            case Stage():
                return self._stage(message)
            case Hold(round_):
                step, parked = self.gate.hold(round_)
                return Answer(step=step, parked=parked)
            case Aim(round_, step):
                self.gate.aim(round_, step)
            case Advance():
                self.gate.bring_forward()
            case Compute():
                self._note_step(message.id, message.step)
                self.gate.compute(message)
            case Go():
                self._note_committed(message)
                self.gate.go(message)
            case Free(round_):
                self.gate.free(round_)
            case Replay(stops):
                for round_, step in stops:
                    self.gate.schedule(round_, step)
            case Resume(token, error):
                self.gate.bring_forward()
                self._resumed[token] = error
                self.gate.wake()
            case Drop() | Verified() | Failed():
                self._settle(message)
        return None

    def _stage(self, message: Stage) -> Answer:
        try:
            parcel = Parcel.from_json(message.parcel)
            *arrays, described = self.transport.receive(parcel, self.patience.stage_secs)
            update = Update.from_parts(json.loads(described.tobytes()), arrays)
            rank, size = self.channel.rank, self.channel.size
            update = planned(update, self.state.schema, self.limits, look_at=lambda i: i % size == rank)
        except UpdateRefused as error:
            return Answer(error=_by(error, self.channel.rank))
        except (OSError, MemoryError, ValueError) as error:
            said = f"A worker could not stage it ({type(error).__name__}: {error})"
            return Answer(error=UpdateRefused(said, worker=self.channel.rank).to_json())
        self._staged[message.id] = (update, parcel.id)
        for ticket in self._tickets.about(message.id):
            ticket.stage = Standing.STAGED
        return Answer()

    def _note_step(self, id_: str, step: int) -> None:
        for ticket in self._tickets.about(id_):
            ticket.step = step

    def _note_committed(self, go: Go) -> None:
        for _, id_ in go.updates:
            for ticket in self._tickets.about(id_):
                ticket.committed(go.step)
        self.gate.wake()

    def _settle(self, message: Drop | Verified | Failed) -> None:
        match message:
            case Drop(id_, content_digest, error):
                staged = self._staged.pop(id_, None)
                if staged is not None:
                    self.transport.release(staged[1])
                for ticket in self._tickets.about(id_, content_digest):
                    self._settle_refused(ticket, UpdateRefused.from_json(error))
            case Verified(content_digest, described):
                receipt = Receipt.from_json(described)
                id_ = receipt.id
                self.history.append(receipt)
                for ticket in self._tickets.about(id_, content_digest):
                    ticket.succeed(receipt)
            case Failed(id_, content_digest, step, digests, _):
                by_rank = {int(rank): digest for rank, digest in digests.items()}
                diverged = diverged_error(id_, step, by_rank)
                for ticket in self._tickets.about(id_, content_digest):
                    ticket.fail(Standing.FAILED, diverged)
        self._tickets.forget_settled(id_)
        for parcel_id in self._own_parcels.pop(id_, ()):
            self.transport.release(parcel_id)
        self.gate.wake()

    def _settle_refused(self, ticket: Ticket, error: UpdateRefused) -> None:
        ticket.fail(Standing.REFUSED, error)
        self._tickets.forget_settled(ticket.id)
        self.gate.wake()

    # Waiting.

    def _ticket(self, id_: str, content_digest: str) -> Ticket:
        ticket = Ticket(id_, content_digest, self._wait_for)
        self._tickets.add(ticket)
        return ticket

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> bool:
        if self.in_training_thread():
            hopeless = _Since(lambda: ticket.step is not None and ticket.step > self.gate.step)
            park_secs = self.patience.park_secs
            self.gate.park(lambda: ticket.done() or hopeless.secs() > park_secs, timeout)
            return ticket.done()
        ends = None if timeout is None else time.monotonic() + timeout
        while not ticket.wait(0.5 if ends is None else max(0.0, min(0.5, ends - time.monotonic()))):
            self._check()
            if ends is not None and time.monotonic() >= ends:
                return False
        return True

    def _say_parked(self, step: int) -> None:
        parked = Parked(self.channel.rank, step)
        self._outbox.put(lambda: self.channel.post(parked))

    def _check(self) -> None:
        self._check_elsewhere()
        self.threads.check()


class _Since:
    """How long a condition has held, each time it is asked."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds
        self._since: float | None = None

    def secs(self) -> float:
        if not self._holds():
            self._since = None
            return 0.0
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since


def diverged_error(id_: str, step: int, digests: Mapping[int, str]) -> ReplicasDiverged:
    """The error of an update after which the replicas are not equal."""
    groups: dict[str, list[str]] = {}
    for worker, digest in sorted(digests.items()):
        groups.setdefault(digest, []).append(str(worker))
    said = "; ".join(f"worker {', '.join(workers)}: {digest}" for digest, workers in groups.items())
    return ReplicasDiverged(
        f"Update {id_} was applied by all workers at step {step}, and the variables it touched are not equal "
        f"({said}). They must have differed before: a worker has assigned to a variable by itself. "
        "replicas.sync(source=0) makes them equal",
        digests=digests,
        update_id=id_,
        step=step,
    )


def _by(error: UpdateRefused, rank: int) -> dict[str, Any]:
    described = error.to_json()
    if described["worker"] is None:
        described["worker"] = rank
    return described
