"""The open tickets of one worker, and how they end."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable

from replicast.errors import ReplicasDiverged, ReplicastError, UpdatePending, UpdateRefused
from replicast.journal import Receipt
from replicast.protocol.messages import Drop, Failed, Go, Verified
from replicast.protocol.ticket import Ticket
from replicast.update import Stage

REMEMBERED = 10_000
"""How many decisions are remembered, for who asks late."""


class Outcomes:
    """The tickets that wait for their outcome. Written by proposing threads and by the follower.

    Attributes:
        history: The receipts of all verified updates so far, in order. Written by the follower.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, list[Ticket]] = defaultdict(list)
        self.history: list[Receipt] = []
        self._in_history: set[int] = set()
        self._decided: deque[str] = deque(maxlen=REMEMBERED)  # of all workers' proposals; by the follower

    def add(self, ticket: Ticket) -> None:
        """Keeps a ticket until it is settled."""
        with self._lock:
            self._open[ticket.id].append(ticket)

    def about(self, id_: str, content_digest: str | None = None) -> list[Ticket]:
        """The open tickets for this update, or for this content of it."""
        with self._lock:
            tickets = list(self._open.get(id_, ()))
        return [ticket for ticket in tickets if content_digest in (None, ticket.content_digest)]

    def note_stage(self, id_: str, stage: Stage) -> None:
        """An update has come so far."""
        for ticket in self.about(id_):
            ticket.stage, ticket.waits_for = stage, ""

    def note_step(self, id_: str, step: int) -> None:
        """An update is meant for this step."""
        for ticket in self.about(id_):
            ticket.step = step

    def note_again(self, id_: str, step: int, trial: int | None = None) -> None:
        """What somebody proposed is on its way: it is meant for this step, or has to wait until then.

        Args:
            id_: The update's id.
            step: Which step.
            trial: The update whose trial ends there, if it waits for one.
        """
        self._decided.append(id_)
        for ticket in self.about(id_):
            if ticket.step is None:
                ticket.step = step
            if trial is not None:
                ticket.waits_for = f"the trial of update {trial}, until step {step}"

    def note_committed(self, go: Go) -> None:
        """These updates are committed."""
        for _, id_ in go.updates:
            self._decided.append(id_)
            for ticket in self.about(id_):
                ticket.committed(go.step)

    def settle(self, message: Drop | Verified | Failed) -> str:
        """Gives all tickets of an update their outcome; returns its id."""
        match message:
            case Drop(id_, content_digest, tickets, error):
                self._decided.append(id_)
                for ticket in self.about(id_, content_digest):
                    if ticket.number in tickets:
                        ticket.fail(Stage.REFUSED, UpdateRefused.from_json(error))
            case Verified(content_digest, described):
                receipt = Receipt.from_json(described)
                id_ = receipt.id
                if receipt.sequence not in self._in_history:
                    self._in_history.add(receipt.sequence)
                    self.history.append(receipt)
                for ticket in self.about(id_, content_digest):
                    ticket.succeed(receipt)
            case Failed(id_, content_digest):
                for ticket in self.about(id_, content_digest):
                    ticket.fail(Stage.FAILED, diverged(message))
        self._forget_settled(id_)
        return id_

    def undecided(self) -> list[str]:
        """The ids of what this worker has proposed and nobody has decided about.

        Without functions: they are not durable, and decided at a boundary only.
        """
        with self._lock:
            tickets = [ticket for several in self._open.values() for ticket in several]
        return [
            ticket.id
            for ticket in tickets
            if ticket.stage in (Stage.PROPOSED, Stage.STAGED) and not ticket.is_function
        ]

    def are_decided(self, ids: Iterable[str]) -> bool:
        """Whether all of these, whoever has proposed them, are committed or refused.

        Those that wait for a later step, behind a trial for example, count too: training has to go on first.
        """
        return set(ids) <= set(self._decided)

    def refuse(self, ticket: Ticket, error: ReplicastError) -> None:
        """One of this worker's own proposals never left it."""
        ticket.fail(Stage.REFUSED, error)
        self._forget_settled(ticket.id)

    def end(self, step: int) -> None:
        """The job is over: tickets that are still open say so."""
        with self._lock:
            tickets = [ticket for several in self._open.values() for ticket in several]
        for ticket in tickets:
            meant = "" if ticket.step is None else f" for step {ticket.step}"
            said = f"The job ended at step {step}; update {ticket.id} is {ticket.stage}{meant}"
            ticket.fail(ticket.stage, UpdatePending(said, stage=ticket.stage, update_id=ticket.id))

    def _forget_settled(self, id_: str) -> None:
        with self._lock:
            left = [ticket for ticket in self._open.pop(id_, []) if not ticket.done()]
            if left:
                self._open[id_] = left


def diverged(failed: Failed) -> ReplicasDiverged:
    """The error of an update after which the replicas are not equal."""
    by_rank = {int(rank): digest for rank, digest in failed.digests.items()}
    if failed.trained:
        counted = ", ".join(f"worker {rank}: {count}" for rank, count in sorted(failed.trained.items()))
        why = (
            f"the workers had not trained equally far at that boundary (transfers so far: {counted}): one "
            "has missed a boundary, or has made one too many. Every worker must call replicas.boundary() "
            "after each step"
        )
    else:
        groups: dict[str, list[str]] = {}
        for worker, digest in sorted(by_rank.items()):
            groups.setdefault(digest, []).append(str(worker))
        said = "; ".join(f"worker {', '.join(workers)}: {digest}" for digest, workers in groups.items())
        what = "the variables it touched are not equal"
        if failed.after_trial:
            what = "at the end of its trial the replicas' states are not equal"
        why = (
            f"{what} ({said}). They must have differed before: a worker has "
            "assigned to a variable by itself. replicas.sync(source=0) makes them equal"
        )
    return ReplicasDiverged(
        f"Update {failed.id} was applied by all workers at step {failed.step}, and {why}",
        digests=by_rank,
        update_id=failed.id,
        step=failed.step,
    )
