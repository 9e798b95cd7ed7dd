"""The proposals of one worker: its tickets, and the bytes that it publishes. Any thread may propose."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from replicast import faults
from replicast.core import events as e
from replicast.core.messages import OUTSIDE, Propose, Tell, Withdraw
from replicast.core.records import Proposal, Refusal, Stage
from replicast.errors import JobFailed, UpdatePending, UpdateRefused, printable
from replicast.errors import refusal_of as unexpected_refusal
from replicast.replicas.parcels import Function, Parcels
from replicast.replicas.replica import StateReplica
from replicast.replicas.threads import Lane
from replicast.replicas.ticket import Ticket
from replicast.update.schema import Limits, planned
from replicast.update.trial import Trial
from replicast.update.update import Update

logger = logging.getLogger("replicast")


class Proposals:
    """The proposals of one worker, and on worker 0 those from outside the job."""

    def __init__(
        self,
        replica: StateReplica,
        parcels: Parcels,
        limits: Limits,
        outbox: Lane,
        releasing: Lane,
        post: Callable[[Any], None],
        wait_for: Callable[[Ticket, float | None], bool],
    ) -> None:
        self._replica = replica
        self._parcels = parcels
        self._limits = limits
        self._outbox = outbox
        self._releasing = releasing
        self._post = post
        self._wait_for = wait_for
        self._numbers = itertools.count(1)
        # Unique to this process: a refusal in the journal names tickets, and must never match a later one.
        self._unique = f"worker-{replica.rank}-{uuid.uuid4().hex[:12]}"
        self._tickets: dict[str, Ticket] = {}
        replica.on_stage = self._note_stage

    def propose(self, update: Update, at_step: int | None, trial: Trial | None) -> Ticket:
        """Proposes an update. Returns at once."""
        ticket = self._ticket(update.id, trial)
        self._outbox.do(lambda: self._publish(update, ticket, at_step))
        return ticket

    def propose_function(
        self, id_: str, function: Function, source: int, at_step: int | None, trial: Trial | None
    ) -> Ticket:
        """Proposes a function to be run on worker `source`, which must propose it too."""
        ticket = self._ticket(id_, trial)
        rank = self._replica.rank
        if source == rank:
            self._replica.add_function(id_, function)
        proposal = Proposal(
            id_, "", None, at_step, trial, source, author=f"worker {rank}", proposed_at=ticket.proposed_at
        )
        self._outbox.do(lambda: self._post(e.Proposed(ticket.number, proposal)))
        return ticket

    def propose_revert(self, id_: str, sequence: int, note: str, *, forced: bool) -> Ticket:
        """Proposes to undo a committed update: worker 0 makes the update that does."""
        ticket = self._ticket(id_)
        proposal = Proposal(
            id_,
            "",
            author=f"worker {self._replica.rank}",
            note=note,
            proposed_at=ticket.proposed_at,
            reverts=sequence,
            forced=forced,
        )
        self._outbox.do(lambda: self._post(e.Proposed(ticket.number, proposal)))
        return ticket

    def refuse(self, id_: str, error: UpdateRefused) -> Ticket:
        """Returns a ticket for a proposal that is refused before it leaves this worker."""
        ticket = self._ticket(id_)
        self._fail(ticket, error)
        return ticket

    def propose_from_outside(
        self,
        ticket: str,
        update: Update,
        at_step: int | None,
        trial: Trial | None,
    ) -> None:
        """Worker 0: proposes an update from the inbox. Blocks while its bytes are copied."""
        proposal = self._published(update, _outside(ticket), at_step, trial, time.time())
        self._post(e.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def revert_from_outside(self, ticket: str, update: Update, sequence: int, *, forced: bool) -> None:
        """Worker 0: proposes to undo a committed update, on request from outside the job."""
        proposal = Proposal(
            update.id,
            "",
            author=update.author,
            note=update.note,
            proposed_at=time.time(),
            reverts=sequence,
            forced=forced,
        )
        self._post(e.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def withdraw_from_outside(self, ticket: str, id_: str) -> None:
        """Worker 0: withdraws an update on request from outside the job."""
        self._post(e.FromWorker(OUTSIDE, Withdraw(ticket, id_)))

    def close_from_outside(self, ticket: str, stage: Stage) -> None:
        """Worker 0: releases a proposal from outside that has its outcome. Called by the event loop."""
        self._releasing.do(lambda: self._parcels.release_ticket(_outside(ticket), stage))

    def told(self, number: str, tell: Tell) -> None:
        """Passes on progress reported by the coordinator. Called by the event loop."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        ticket.told(tell)
        if tell.stage is Stage.REFUSED:
            problem = tell.outcome.problem if isinstance(tell.outcome, Refusal) else "in an earlier attempt"
            logger.warning("update %s is refused: %s", tell.id, printable(problem))
        if ticket.done():
            del self._tickets[number]
            self._releasing.do(lambda: self._parcels.release_ticket(number, tell.stage))

    def end(self, step: int) -> None:
        """Fails all open tickets: the job ended at this step."""
        for ticket in list(self._tickets.values()):
            meant = "" if ticket.step is None else f" for step {ticket.step}"
            said = f"The job ended at step {step}; update {ticket.id} is {ticket.stage}{meant}"
            ticket.fail(ticket.stage, UpdatePending(said, stage=ticket.stage, update_id=ticket.id))

    def _ticket(self, id_: str, trial: Trial | None = None) -> Ticket:
        number = f"{self._unique}-{next(self._numbers)}"
        ticket = Ticket(id_, number, self._wait_for, trial)
        self._tickets[number] = ticket
        return ticket

    def _publish(self, update: Update, ticket: Ticket, at_step: int | None) -> None:
        try:
            proposal = self._published(update, ticket.number, at_step, ticket.trial, ticket.proposed_at)
        except UpdateRefused as error:
            self._fail(ticket, error)
            return
        faults.point("propose")
        self._post(e.Proposed(ticket.number, proposal))

    def _published(
        self, update: Update, owner: str, at_step: int | None, trial: Trial | None, proposed_at: float
    ) -> Proposal:
        try:
            # Values are checked later, once all workers have them: each worker checks a share.
            update = planned(update, self._replica.state.schema, self._limits, look_at=lambda _: False)
            self._replica.check_by_guard(update)
            parcel = self._parcels.publish(update, owner)
        except (UpdateRefused, JobFailed):
            raise
        except Exception as error:
            logger.exception("update %s refused: unexpected error while checking it", update.id)
            raise unexpected_refusal(error) from error
        return Proposal(
            update.id,
            parcel.digest,
            parcel,
            at_step,
            trial,
            author=update.author,
            note=update.note,
            proposed_at=proposed_at,
        )

    def _fail(self, ticket: Ticket, error: UpdateRefused) -> None:
        self._tickets.pop(ticket.number, None)
        ticket.fail(Stage.REFUSED, error)

    def _note_stage(self, id_: str, stage: str) -> None:
        for ticket in list(self._tickets.values()):
            if ticket.id == id_:
                ticket.reach(Stage(stage))


def _outside(ticket: str) -> str:
    return f"outside {ticket}"
