"""One round: all workers stage, stop, and go or are freed. The words that the coordinator says, in order.

    stage    all workers fetch and check the bytes; one that cannot refuses for all
    hold     all workers stop at their next boundary and say which it is; the latest of them is the step
    journal  payload and record are on disk
    go       all workers apply at that step

Until the record is written the round can be called off and no replica has changed; from then on it will be
applied, by a later life of the job if not by this one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from replicast import faults
from replicast.errors import JobFailed, UpdateRefused
from replicast.journal import AnyJournal, Record, StagedPayload, summarized
from replicast.protocol.member import Member
from replicast.protocol.messages import (
    REPLAY_ROUND,
    Compute,
    Computed,
    Drop,
    Free,
    Go,
    Proposal,
    Stage,
)
from replicast.protocol.stopping import OpenRound, Stops
from replicast.protocol.verifier import Committed, Verifier
from replicast.update import Update

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Ready:
    """A proposal that all workers have staged, and whose payload is safe.

    Attributes:
        before: Of a trial: what its metric was then, as the mean over all workers.
        round: The one for which some may be held already; 0 for none.
    """

    proposal: Proposal
    update: Update
    payload: StagedPayload
    before: float | None = None
    round: int = 0


class Rounds(Stops):
    """Says the words of rounds, one round after the other. For the coordinator's thread only.

    Args:
        member: Worker 0's own part; its copy of a staged update goes into the journal.
        durable: Whether the journal is on disk: then the workers train one step more while it is written.
        attempt: Which life of the job this is, for the records.
    """

    def __init__(
        self, member: Member, journal: AnyJournal, verifier: Verifier, *, durable: bool, attempt: int
    ) -> None:
        super().__init__(member, journal, verifier, durable=durable)
        self._attempt = attempt
        self.sequence = 0
        """The number of the last committed update."""
        self._scheduled: dict[int, tuple[int, str]] = {}

    def stage(self, proposal: Proposal, *, alone: bool = False) -> Ready:
        """Has all workers stage it, and its payload written.

        Args:
            proposal: What to stage.
            alone: Nothing else is committed with it: those who are in a pause are held there already.

        Raises:
            UpdateRefused: A worker, or the disk, cannot; it is named.
        """
        round_ = self._next_round() if alone else 0
        try:
            before = self.fetch(proposal, round_)
            return replace(self.keep(proposal), before=before, round=round_)
        except UpdateRefused:
            if alone:
                self._channel.append(Free(round_))
            raise

    def fetch(self, proposal: Proposal, round_: int = 0) -> float | None:
        """Has all workers stage it, and nothing written; for a round, also hold those who stand.

        Returns:
            Of a trial: what its metric is now.

        Raises:
            UpdateRefused: A worker cannot; it is named.
        """
        if proposal.parcel is None:
            raise UpdateRefused("The proposal has no content", received=proposal.id)
        message = Stage(proposal.id, proposal.content_digest, proposal.parcel, proposal.trial, round_)
        answers = self.ask(message, self._member.patience.stage_secs + 10.0)
        self._held = (round_, answers) if round_ else None
        for answer in answers.values():
            if answer.error is not None:
                raise UpdateRefused.from_json(answer.error)
        measured = [answer.measured for answer in answers.values() if answer.measured is not None]
        return sum(measured) / len(measured) if measured else None

    def keep(self, proposal: Proposal) -> Ready:
        """Has the payload of what all workers have staged written.

        Raises:
            UpdateRefused: The disk cannot.
        """
        update = self._member.shelf.staged(proposal.id)
        if proposal.author or proposal.note:
            update = update.labelled(proposal.author, proposal.note)
        return Ready(proposal, update, self._journal.stage(update))

    def commit(
        self, ready: list[Ready], *, at_step: int | None = None, before: int | None = None
    ) -> list[tuple[Proposal, UpdateRefused]] | None:
        """Agrees on a step, writes the records, and lets all workers go; or calls it off.

        Args:
            ready: What to commit, in order.
            at_step: The step that its author wants.
            before: Only if the step is before this one.

        Returns:
            Those that were not committed, and why; None when the step was too late, and all are ready still.
        """
        round_ = ready[0].round if len(ready) == 1 and ready[0].round else self._next_round()
        for one in ready:
            if one.round not in (0, round_):  # another has come to it
                self._channel.append(Free(one.round))
        try:
            step = self._agree_on_step(round_, at_step)
        except UpdateRefused as error:
            self._channel.append(Free(round_))
            return self.discard(ready, error)
        if before is not None and step >= before:
            self._channel.append(Free(round_))
            return None
        return self._write_and_go(round_, step, ready, scheduled=at_step is not None)

    def act(self, action: str) -> None:
        """Has all workers do something at one boundary, if they all answer; they leave once only."""
        if self.leaving:
            return
        try:
            round_, step = self.stop_all()
        except UpdateRefused as error:
            logger.warning("the workers could not agree on a step to %s: %s", action, error)
            return
        if action == "leave":
            self._left_at = step
        self._channel.append(Go(round_, step, [], action=action))

    def open(self, proposal: Proposal, variables: list[str] | None = None) -> None:
        """Has the source compute an update at an agreed boundary, at which all will wait for `finish`.

        Raises:
            UpdateRefused: The step is past, or a worker does not answer.
        """
        round_, step = self.stop_all(proposal.at_step)
        source = 0 if proposal.source is None else proposal.source
        scheduled = proposal.at_step is not None
        self._channel.append(Compute(round_, step, proposal.id, source, variables, scheduled))
        self.opened.append(OpenRound(round_, step, proposal))

    def commit_here(self, round_: int, ready: list[Ready]) -> list[tuple[Proposal, UpdateRefused]]:
        """Commits at the boundary at which all stand because of this round.

        Returns:
            Those that were not committed, and why.
        """
        return self._write_and_go(round_, self._member.gate.step, ready, scheduled=False)

    def due(self) -> list[OpenRound]:
        """The rounds for which worker 0 has come far enough, in the order of the gate; in a trial, audits."""
        step = self._member.gate.step
        due = sorted((one for one in self.opened if one.step <= step), key=lambda one: (one.step, one.round))
        return [one for one in due if one.act is not None] if self._verifier.on_trial(step) else due

    def finish_due(self) -> list[tuple[Proposal, UpdateRefused]] | None:
        """Commits what is computed at the boundary at which worker 0 stands, in the order of the gate.

        Returns:
            Those that were not committed, and why; None when nothing was due.
        """
        due, refused = self.due(), []
        for one in due:
            self.opened.remove(one)
            refused += self._finish_or_act(one)
            if one.proposal.trial is not None:  # those behind it wait for its end
                break
        return refused if due else None

    def _finish_or_act(self, opened: OpenRound) -> list[tuple[Proposal, UpdateRefused]]:
        if opened.act is None:
            return self.finish(opened)
        opened.act()
        return []

    def finish(self, opened: OpenRound) -> list[tuple[Proposal, UpdateRefused]]:
        """Waits for what is computed, and commits it at the boundary at which all stand.

        To be called when worker 0 stands there. Blocks at most as long as the function may take, then names
        the source.
        """
        try:
            computed = self._what_was_computed(opened)
            ready = self.stage(replace(opened.proposal, parcel=computed.parcel))
        except UpdateRefused as error:
            self._channel.append(Free(opened.round))
            return [(opened.proposal, error)]
        scheduled = opened.proposal.at_step is not None
        return self._write_and_go(opened.round, self._member.gate.step, [ready], scheduled=scheduled)

    def drop(self, proposal: Proposal, error: UpdateRefused, twins: Iterable[str] = ()) -> None:
        """Tells all that a proposal is refused, and with it those that were proposed again meanwhile."""
        tickets = [proposal.ticket, *twins]
        self._channel.append(Drop(proposal.id, proposal.content_digest, tickets, error.to_json()))

    def _write_and_go(
        self, round_: int, step: int, ready: list[Ready], *, scheduled: bool
    ) -> list[tuple[Proposal, UpdateRefused]]:
        refused: list[tuple[Proposal, UpdateRefused]] = []
        updates = []
        trial: dict[str, Any] | None = None
        for place, one in enumerate(ready):
            record = self._record(one, step, scheduled=scheduled)
            try:
                self._journal.commit(one.payload, record)
            except UpdateRefused as error:
                refused = self.discard(ready[place:], error)
                break
            self.sequence = record.sequence
            updates.append([record.sequence, record.id])
            trial = None if record.trial is None else dict(record.trial)
            proposal = one.proposal
            self._verifier.expect(
                Committed(record, proposal.content_digest, proposal.proposed_at, step, scheduled)
            )
            if scheduled:
                self._scheduled[record.sequence] = round_, proposal.ticket
        faults.point("commit")
        go = Go(round_, step, updates, scheduled, trial=trial)
        self._channel.append(go if updates else Free(round_))
        return refused

    def _record(self, ready: Ready, step: int, *, scheduled: bool) -> Record:
        trial = ready.proposal.trial
        return Record(
            sequence=self.sequence + 1,
            id=ready.update.id,
            step=step,
            sha256=ready.payload.sha256,
            nbytes=ready.payload.nbytes,
            author=ready.update.author,
            note=ready.update.note,
            edits=summarized(ready.update.edits),
            content_digest=ready.proposal.content_digest,
            workers=self._channel.size,
            attempt=self._attempt,
            scheduled=scheduled,
            committed_at=time.time(),
            trial=None if trial is None else {**trial, "before": ready.before},
        )

    def call_off(self, sequence: int, step: int) -> list[str] | None:
        """Withdraws an update that is committed for a later step, before any worker has come there.

        All workers stand still meanwhile, so that none can come to the step.

        Returns:
            The ticket of its proposal, if it was proposed in this start; None when it is too late.

        Raises:
            UpdateRefused: A worker does not answer.
            OSError: It cannot be written down.
        """
        round_, ticket = self._scheduled.get(sequence, (REPLAY_ROUND + sequence, ""))
        held, stands_at = self.stop_all()
        try:
            if step <= stands_at:
                return None
            self._journal.withdraw(sequence)
            self._verifier.forget(sequence)
            self._channel.append(Free(round_))
        finally:
            self._channel.append(Free(held))
        return [ticket] if ticket else []

    def discard(self, ready: list[Ready], error: UpdateRefused) -> list[tuple[Proposal, UpdateRefused]]:
        """Forgets the payloads of what is not committed, for this reason."""
        for one in ready:
            self._journal.discard(one.payload)
        return [(one.proposal, error) for one in ready]

    def _what_was_computed(self, opened: OpenRound) -> Computed:
        patience = self._member.patience
        ends = time.monotonic() + patience.compute_secs
        while not self._member.threads.stopping.is_set():
            computed = self._channel.what_was_computed(opened.round)
            if computed is not None and computed.error is not None:
                raise UpdateRefused.from_json(computed.error)
            if computed is not None:
                return computed
            if time.monotonic() > ends:
                source = opened.proposal.source
                raise UpdateRefused(
                    f"Worker {source} did not compute the update within {patience.compute_secs:.0f} s",
                    worker=source,
                )
        raise JobFailed("The job ended while an update was computed")
