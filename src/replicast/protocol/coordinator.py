"""Worker 0's part: one order for everything, decided once.

    stage    all workers fetch and check the bytes; one that cannot refuses for all
    hold     all workers stop at their next boundary and say which it is; the latest of them is the step
    journal  payload and record are on disk
    go       all workers apply at that step

The list of what a round commits is taken before anyone is asked, and never grows. Until the record is
written the round can be called off and no replica has changed; from then on it will be applied, by a later
life of the job if not by this one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from replicast.errors import JobFailed, UpdateRefused
from replicast.journal import AnyJournal, Record, StagedPayload, summarized
from replicast.protocol.channel import Channel
from replicast.protocol.member import Member
from replicast.protocol.messages import (
    Advance,
    Aim,
    Answer,
    Compute,
    Computed,
    Drop,
    Free,
    Go,
    Hold,
    Parked,
    Paused,
    Proposal,
    Replay,
    Resume,
    Stage,
)
from replicast.protocol.verifier import Committed, Verifier
from replicast.update import Update

logger = logging.getLogger("replicast")

BATCH = 16
"""At most so many waiting proposals share one round."""
REPLAYS_AHEAD = 4
REPLAY_ROUND = -(10**9)
REMIND_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A proposal that all workers have staged, and whose payload is safe."""

    proposal: Proposal
    update: Update
    payload: StagedPayload


class Coordinator:
    """Decides about all proposals, in the order in which they came. One thread; lives in worker 0.

    Args:
        member: Worker 0's own part; its state's copy of a staged update goes into the journal.
        durable: Whether the journal is on disk: then the workers train one step more while it is written.
        attempt: Which life of the job this is, for the records.
    """

    def __init__(self, member: Member, journal: AnyJournal, *, durable: bool, attempt: int = 0) -> None:
        self._member = member
        self._channel: Channel = member.channel
        self._journal = journal
        self._durable = durable
        self._attempt = attempt
        self._round = 0
        self._incoming: queue.Queue[Proposal | Paused | Parked] = queue.Queue()
        self._somebody_parked = threading.Event()
        self._paused: dict[int, dict[int, Paused]] = {}
        self._reminded: dict[int, float] = {}
        self._verifier = Verifier(self._channel, journal, member.threads.stopping)
        self._known: dict[str, str] = {}
        self._replays: list[Record] = []
        self._steps: dict[int, int] = {}
        self._replaying = False
        self._sequence = 0

    def start(self, after_step: int = 0) -> None:
        """Reads the journal and starts the threads.

        Args:
            after_step: The step of the state that training starts from: later updates are applied again.
        """
        records = self._journal.records()
        receipts = self._journal.receipts()
        self._sequence = records[-1].sequence if records else 0
        for record in records:
            self._known[record.id] = record.content_digest
            if record.step > after_step:
                self._replays.append(record)
            elif record.sequence in receipts:
                self._verifier.knows(record, receipts[record.sequence])
        self._steps = {
            r.sequence: min(r.step, receipts[r.sequence].step) if r.sequence in receipts else r.step
            for r in self._replays
        }
        self._replays.sort(key=lambda record: (self._steps[record.sequence], record.sequence))
        threads = self._member.threads
        threads.start("proposals", self._read)
        threads.start("verifier", self._verifier.run)
        threads.start("coordinator", self._run)

    def _read(self) -> None:
        while not self._member.threads.stopping.is_set():
            proposal = self._channel.next_proposal()
            if isinstance(proposal, Parked):
                self._somebody_parked.set()
            if proposal is not None:
                self._incoming.put(proposal)

    def _run(self) -> None:
        while not self._member.threads.stopping.is_set():
            first = self._member.threads.take(self._incoming)
            if first is None:
                self._replay_ahead()
                self._remind()
                self._channel.forget_read()
                continue
            self._handle(first)
            self._replay_ahead()

    def _handle(self, first: Proposal | Paused | Parked) -> None:
        if isinstance(first, Paused):
            self._note_paused(first)
        elif isinstance(first, Parked):
            self._advance()
        elif first.source is not None:
            if self._is_new(first):
                self._decide_computed(first)
        elif first.at_step is not None:
            ready = self._staged(first)
            if ready is not None:
                self._commit([ready], first.at_step)
        else:
            self._handle_plain(first)

    def _handle_plain(self, first: Proposal) -> None:
        batch, after = self._take_batch(first)
        ready = [staged for staged in map(self._staged, batch) if staged is not None]
        if ready:
            self._commit(ready)
        if after is not None:
            self._handle(after)

    def _take_batch(self, first: Proposal) -> tuple[list[Proposal], Proposal | Paused | Parked | None]:
        """What waits behind `first` and may share its round, and the one after them that may not."""
        batch = [first]
        while len(batch) < BATCH:
            try:
                following = self._incoming.get_nowait()
            except queue.Empty:
                break
            if not isinstance(following, Proposal) or not _is_plain(following):
                return batch, following
            batch.append(following)
        return batch, None

    # Stage.

    def _staged(self, proposal: Proposal) -> Ready | None:
        """Has all workers stage it, or refuses it."""
        if not self._is_new(proposal):
            return None
        try:
            return self._stage(proposal)
        except UpdateRefused as error:
            self._drop(proposal, error)
            return None

    def _is_new(self, proposal: Proposal) -> bool:
        known = self._known.get(proposal.id)
        if known is None:
            self._known[proposal.id] = proposal.content_digest
            return True
        if known == proposal.content_digest or proposal.source is not None:
            self._verifier.repeat(proposal.id, proposal.content_digest)
        else:
            error = UpdateRefused(
                f"An update with the id {proposal.id} and other content was proposed before",
                expected=known,
                received=proposal.content_digest,
                remedy="Give it an id of its own",
            )
            self._channel.append(Drop(proposal.id, proposal.content_digest, error.to_json()))
        return False

    def _stage(self, proposal: Proposal) -> Ready:
        if proposal.parcel is None:
            raise UpdateRefused("The proposal has no content", received=proposal.id)
        answers = self._ask(Stage(proposal.id, proposal.parcel), self._member.patience.stage_secs + 10.0)
        for answer in answers.values():
            if answer.error is not None:
                raise UpdateRefused.from_json(answer.error)
        update = self._member.staged(proposal.id)
        return Ready(proposal, update, self._journal.stage(update))

    # Commit.

    def _commit(self, ready: list[Ready], at_step: int | None = None) -> None:
        """Agrees on a step, writes the records, and lets all workers go; or calls it off."""
        self._round += 1
        try:
            step = self._agree_on_step(self._round, at_step)
        except UpdateRefused as error:
            self._channel.append(Free(self._round))
            self._drop_all(ready, error)
            return
        self._write_and_go(self._round, step, ready, scheduled=at_step is not None)

    def _agree_on_step(self, round_: int, at_step: int | None, lead: int = 1) -> int:
        answers = self._ask(Hold(round_), self._member.patience.answer_secs)
        step = max(answer.step for answer in answers.values())
        if at_step is not None:
            if at_step < step:
                raise UpdateRefused(
                    f"Step {at_step} is past",
                    expected=f"step {step} or later",
                    received=f"at_step={at_step}",
                )
            step = at_step
        elif self._durable and not any(answer.parked for answer in answers.values()):
            step += lead
        if any(answer.step != step for answer in answers.values()):
            self._channel.append(Aim(round_, step))
        return step

    def _write_and_go(self, round_: int, step: int, ready: list[Ready], *, scheduled: bool) -> None:
        committed: list[tuple[Ready, Record]] = []
        refused: tuple[list[Ready], UpdateRefused] | None = None
        for place, one in enumerate(ready):
            record = self._record(one, step, scheduled=scheduled)
            try:
                self._journal.commit(one.payload, record)
            except UpdateRefused as error:
                refused = ready[place:], error
                break
            self._sequence += 1
            committed.append((one, record))
        for one, record in committed:
            proposal = one.proposal
            self._verifier.expect(
                Committed(record, proposal.content_digest, proposal.proposed_at, step, scheduled)
            )
        if committed:
            updates = [[record.sequence, record.id] for _, record in committed]
            self._channel.append(Go(round_, step, updates, scheduled))
        else:
            self._channel.append(Free(round_))
        if refused is not None:
            self._drop_all(*refused)

    def _record(self, ready: Ready, step: int, *, scheduled: bool) -> Record:
        return Record(
            sequence=self._sequence + 1,
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
        )

    def _advance(self) -> int | None:
        """If all workers stand at one boundary, has them apply there what is meant for a later one.

        They are held while they are asked: one that only rests must not walk on in between.
        """
        if not self._somebody_parked.is_set():
            return None
        self._somebody_parked.clear()
        self._round += 1
        try:
            answers = self._ask(Hold(self._round), self._member.patience.answer_secs)
        except UpdateRefused as error:  # nothing was asked for that could be refused
            logger.warning("the workers could not be asked where they stand: %s", error)
            self._channel.append(Free(self._round))
            return None
        steps = {answer.step for answer in answers.values()}
        together = len(steps) == 1 and all(answer.parked for answer in answers.values())
        if together:
            self._channel.append(Advance(min(steps)))
        self._channel.append(Free(self._round))
        return min(steps) if together else None

    # Computed at the boundary.

    def _decide_computed(
        self, proposal: Proposal, variables: list[str] | None = None
    ) -> UpdateRefused | None:
        """Lets the source compute an update at an agreed boundary, at which all wait; says why if refused."""
        self._round += 1
        round_ = self._round
        try:
            step = self._agree_on_step(round_, proposal.at_step, lead=0)
            source = 0 if proposal.source is None else proposal.source
            self._channel.append(Compute(round_, step, proposal.id, source, variables))
            step, computed = self._what_was_computed(round_, step, source)
            ready = self._stage(_with(proposal, computed))
        except UpdateRefused as error:
            self._channel.append(Free(round_))
            self._drop(proposal, error)
            return error
        self._write_and_go(round_, step, [ready], scheduled=proposal.at_step is not None)
        return None

    def _what_was_computed(self, round_: int, step: int, source: int) -> tuple[int, Computed]:
        patience = self._member.patience
        ends: float | None = None
        while not self._member.threads.stopping.is_set():
            computed = self._channel.what_was_computed(round_)
            if computed is not None and computed.error is not None:
                raise UpdateRefused.from_json(computed.error)
            if computed is not None:
                return step, computed
            moved_to = self._advance()
            if moved_to is not None:
                step = min(step, moved_to)
            if ends is None and self._member.gate.step >= step:  # until then, training takes its time
                ends = time.monotonic() + patience.compute_secs
            if ends is not None and time.monotonic() > ends:
                raise UpdateRefused(
                    f"Worker {source} did not compute the update within {patience.compute_secs:.0f} s",
                    worker=source,
                )
        raise JobFailed("The job ended while an update was computed")

    # Pauses.

    def _note_paused(self, paused: Paused) -> None:
        there = self._paused.setdefault(paused.token, {})
        there[paused.rank] = paused
        self._reminded.setdefault(paused.token, time.monotonic())
        if len(there) < self._channel.size:
            return
        del self._paused[paused.token], self._reminded[paused.token]
        if len({(one.step, one.intent) for one in there.values()}) > 1:
            said = "; ".join(f"worker {r} at step {p.step}: {p.intent}" for r, p in sorted(there.items()))
            error = UpdateRefused(
                "The workers wait for each other at different places of their scripts", received=said
            )
            self._channel.append(Resume(paused.token, error.to_json()))
            return
        refused = self._carry_out(paused)
        self._channel.append(Resume(paused.token, None if refused is None else refused.to_json()))

    def _carry_out(self, paused: Paused) -> UpdateRefused | None:
        intent, *arguments = paused.intent.split("\n")
        if intent == "train" and self._replays:
            self._replaying = True
            stops = [[REPLAY_ROUND + r.sequence, self._steps[r.sequence]] for r in self._replays]
            self._channel.append(Replay(stops))
            self._replay_ahead()
        elif intent == "sync":
            source, id_, *variables = arguments
            proposal = Proposal(id_, f"function-{id_}", 0, time.time(), source=int(source))
            refused = self._decide_computed(proposal, variables)
            if refused is not None:
                return refused
            self._verifier.wait_until_told(paused.step, self._member.patience.decide_secs)
        elif intent == "close":
            self._verifier.wait_until_told(paused.step, self._member.patience.answer_secs)
        return None

    def _remind(self) -> None:
        for token, since in self._reminded.items():
            if time.monotonic() - since > REMIND_SECS:
                self._reminded[token] = time.monotonic()
                there = self._paused[token]
                missing = sorted(set(range(self._channel.size)) - set(there))
                intent = next(iter(there.values())).intent.split("\n")[0]
                logger.warning("worker %s waits (%s) for worker %s", sorted(there), intent, missing)

    # Replay.

    def _replay_ahead(self) -> None:
        """Stages the next updates that the journal holds for later steps; their stops are up already."""
        while self._replaying and self._replays and self._ahead() < REPLAYS_AHEAD:
            record = self._replays.pop(0)
            update = self._journal.load(record.sequence)
            parcel = self._member.publish(update)
            answers = self._ask(Stage(record.id, parcel.to_json()), self._member.patience.stage_secs + 10.0)
            for worker, answer in answers.items():
                if answer.error is not None:
                    raise JobFailed(
                        f"Update {record.sequence} of the journal cannot be applied again: "
                        f"{UpdateRefused.from_json(answer.error)}",
                        worker=worker,
                    )
            step = self._steps[record.sequence]
            self._verifier.expect(Committed(record, record.content_digest, time.time(), step, scheduled=True))
            round_ = REPLAY_ROUND + record.sequence
            self._channel.append(Go(round_, step, [[record.sequence, record.id]], scheduled=True))

    def _ahead(self) -> int:
        return sum(1 for stop in self._member.gate.pending() if stop.round < 0 and stop.go is not None)

    # Words.

    def _ask(self, message: Stage | Hold, timeout_secs: float) -> dict[int, Answer]:
        """Every worker's answer, or a refusal that names who did not answer."""
        proposals = self._channel.proposals_read
        number = self._channel.append(message)
        answers = self._channel.answers(number, timeout_secs)
        missing = [worker for worker in range(self._channel.size) if worker not in answers]
        if missing:
            raise UpdateRefused(
                f"Worker {', '.join(map(str, missing))} did not answer within {timeout_secs:.0f} s",
                worker=missing[0],
            )
        self._channel.all_have_read(number, proposals)
        return answers

    def _drop_all(self, ready: list[Ready], error: UpdateRefused) -> None:
        for one in ready:
            self._journal.discard(one.payload)
            self._drop(one.proposal, error)

    def _drop(self, proposal: Proposal, error: UpdateRefused) -> None:
        self._known.pop(proposal.id, None)
        self._channel.append(Drop(proposal.id, proposal.content_digest, error.to_json()))


def _is_plain(proposal: Proposal) -> bool:
    return proposal.source is None and proposal.at_step is None


def _with(proposal: Proposal, computed: Computed) -> Proposal:
    return Proposal(
        proposal.id,
        proposal.content_digest,
        proposal.rank,
        proposal.proposed_at,
        computed.parcel,
        proposal.source,
        proposal.at_step,
    )
