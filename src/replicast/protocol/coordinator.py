"""Worker 0's part: one order for everything, decided once.

Proposals come through the `Channel`; this thread takes them in the order in which they come, several at a
time if they wait, and holds a round for them (`Rounds`). The list of what a round commits is taken before
anyone is asked, and never grows. Functions are computed at the boundary, so their rounds stay open until
worker 0 stands there; meanwhile others are decided.
"""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import replace
from typing import TypeAlias

from replicast.errors import UpdateRefused
from replicast.journal import AnyJournal, Record
from replicast.protocol.audits import Audits
from replicast.protocol.member import Member
from replicast.protocol.messages import (
    WITHDRAW,
    WITHDRAWN,
    Again,
    Drop,
    Free,
    Parked,
    Paused,
    Proposal,
    Request,
)
from replicast.protocol.pauses import Pauses, apart
from replicast.protocol.replays import Replays
from replicast.protocol.rounds import Ready, Rounds
from replicast.protocol.trials import Trials
from replicast.protocol.verifier import Verifier

logger = logging.getLogger("replicast")

PILE = 200
"""So many entries of the log, read by all, may lie there while there is no time to remove them."""
BATCH = 16
"""At most so many waiting proposals share one round."""


class Stopped:
    """Worker 0's training thread stands at a boundary at which something is undecided."""


class Suspected:
    """An audit for which nobody stood still has found a difference."""


Incoming: TypeAlias = Proposal | Paused | Parked | Request | Stopped | Suspected


class Coordinator:
    """Decides about all proposals, in the order in which they came. Lives in worker 0, in three threads.

    Args:
        member: Worker 0's own part.
        durable: Whether the journal is on disk.
        attempt: Which life of the job this is, for the records.
    """

    def __init__(self, member: Member, journal: AnyJournal, *, durable: bool, attempt: int = 0) -> None:
        self._member = member
        self._channel = member.channel
        self._verifier = Verifier(member.channel, journal, member.threads.stopping)
        self._rounds = Rounds(member, journal, self._verifier, durable=durable, attempt=attempt)
        self._trials = Trials(member, journal, self._verifier)
        self._replays = Replays(member, journal, self._rounds, self._verifier, self._trials)
        self._pauses = Pauses(member.channel)
        self._audits = Audits(member, self._rounds, self._go_on, self._pauses.end)
        self._held_back: list[Proposal] = []
        self._incoming: queue.Queue[Incoming] = member.channel.posted_here
        self._known: dict[str, str] = {}
        self._twins: dict[str, list[str]] = {}
        self._sourceless: dict[str, Proposal] = {}
        self._failed_functions: dict[str, UpdateRefused] = {}
        self._behind: list[Ready] = []

    def start(self, after_step: int = -1) -> None:
        """Reads the journal and starts the threads.

        Args:
            after_step: The step of the state that training starts from: later updates are applied again.
                Default: no state; all of them are.
        """
        self._known = self._replays.read(after_step)
        self._member.gate.on_stopped = lambda: self._incoming.put(Stopped())
        threads = self._member.threads
        threads.start("proposals", self._read)
        threads.start("verifier", self._verifier.run)
        self._audits.start(lambda: self._incoming.put(Suspected()))
        threads.start("coordinator", self._run)

    def _read(self) -> None:
        while not self._member.threads.stopping.is_set():
            proposal = self._channel.next_proposal()
            if proposal is not None:
                self._incoming.put(proposal)

    def _run(self) -> None:
        following: Incoming | None = None
        while not self._member.threads.stopping.is_set():
            first = following or self._member.threads.take(self._incoming)
            following = None
            match first:
                case None:
                    self._pauses.remind()
                    self._channel.forget_read()
                case Paused():
                    self._note_paused(first)
                case Parked():
                    self._rounds.advance()
                case Stopped():
                    self._finish_open()
                case Suspected():
                    self._audits.look_into_suspicion()
                case Request("audit"):
                    self._audits.open()
                case Request(action) if action.startswith(WITHDRAW):
                    self._withdraw(action.removeprefix(WITHDRAW))
                case Request(action):
                    self._rounds.act(action)
                case Proposal() if self._held_back or self._must_wait():
                    self._hold_back(first)
                case Proposal() if _is_plain(first):
                    self._replays.announce()
                    batch, following = self._take_batch(first)
                    self._decide(batch)
                case Proposal():
                    self._replays.announce()
                    self._decide_special(first)
            self._replays.stage_next()
            self._channel.forget_read(at_least=PILE)

    def _go_on(self) -> None:
        """While an audit waits for workers: what they may have to pass before they can answer."""
        self._replays.stage_next()
        self._trials.decide_due()

    def _must_wait(self) -> bool:
        """Whether nothing may be decided now: in an audit between looking and healing, and in a trial."""
        on_its_way = any(one.proposal.trial is not None for one in self._behind)
        return on_its_way or self._audits.is_open() or self._trials.until() is not None

    def _hold_back(self, proposal: Proposal) -> None:
        self._held_back.append(proposal)
        trial, until = self._trials.under_way() or (None, None)
        if until is None:  # it waits for an audit, or behind a trial that waits for a function
            until = min((one.step for one in self._rounds.opened), default=None)
        if until is not None:  # a training thread that waits for it would have to train until then
            self._channel.append(Again(proposal.id, until, trial))

    def _take_up(self) -> None:
        """Decides what was held back, in its order, as far as that may be decided now."""
        while self._held_back and not self._must_wait():
            held_back = self._held_back.pop(0)
            self._replays.announce()
            if _is_plain(held_back):
                self._decide([held_back])
            else:
                self._decide_special(held_back)

    def _take_batch(self, first: Proposal) -> tuple[list[Proposal], Incoming | None]:
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

    def _decide(self, batch: list[Proposal], at_step: int | None = None) -> None:
        ready: list[Ready] = []
        alone = len(batch) == 1 and _is_plain(batch[0]) and not self._behind
        for proposal in batch:
            if not self._is_new(proposal):
                continue
            try:
                ready.append(self._rounds.stage(proposal, alone=alone))
            except UpdateRefused as error:
                self._drop([(proposal, error)])
        if ready and at_step is not None and batch[0].trial is None:
            self._drop(self._rounds.commit(ready, at_step=at_step) or [])
        elif ready:
            self._behind += ready
            self._commit_those_behind()

    def _commit_those_behind(self) -> None:
        """Commits what is ready, unless a function runs at its boundary: then after the function.

        A function that has seen the values must not find that others were applied after it looked.
        """
        while self._behind:
            # A trial comes alone: those before it are no part of it, and nothing is behind it.
            together = [one for one in self._behind if one.proposal.trial is None] or self._behind[:1]
            refused = self._refuse_beside_a_function(together)
            if refused is None:
                at_step = together[0].proposal.at_step
                opened = [one.step for one in self._rounds.opened if at_step in (None, one.step)]
                before = min(opened, default=None)
                refused = self._rounds.commit(together, at_step=at_step, before=before)
            if refused is None:
                for one in self._behind:  # whoever waits for it in a training thread has to train until then
                    self._channel.append(Again(one.proposal.id, min(opened)))
                return
            self._behind = self._behind[len(together) :]
            self._drop(refused)

    def _refuse_beside_a_function(self, ready: list[Ready]) -> list[tuple[Proposal, UpdateRefused]] | None:
        """A trial and a function for the same given step: what the function has seen might be taken back."""
        at_step = ready[0].proposal.at_step
        if at_step is None or at_step not in [one.proposal.at_step for one in self._rounds.opened]:
            return None
        error = UpdateRefused(
            f"A function is computed at step {at_step}, where the trial would begin",
            expected="another step",
            received=f"at_step={at_step}",
        )
        return self._rounds.discard(ready, error)

    def _decide_special(self, proposal: Proposal) -> None:
        """One for a given step, or a function."""
        if proposal.source is None:
            self._decide([proposal], proposal.at_step)
        elif proposal.rank != proposal.source and proposal.id in self._failed_functions:
            self._rounds.drop(proposal, self._failed_functions[proposal.id])
        elif proposal.rank != proposal.source and proposal.id not in self._known:
            self._twins.setdefault(proposal.id, []).append(proposal.ticket)  # its source will propose it too
            self._sourceless.setdefault(proposal.id, proposal)
        elif self._is_new(proposal):
            self._sourceless.pop(proposal.id, None)
            try:
                self._rounds.open(proposal)
            except UpdateRefused as error:
                self._drop([(proposal, error)])

    def _is_new(self, proposal: Proposal) -> bool:
        known = self._known.get(proposal.id)
        if known is None:
            self._known[proposal.id] = proposal.content_digest
            return True
        if known == proposal.content_digest or proposal.source is not None:
            self._join_the_first(proposal)
            return False
        error = UpdateRefused(
            f"An update with the id {proposal.id} and other content was proposed before",
            expected=known,
            received=proposal.content_digest,
            remedy="Give it an id of its own",
        )
        self._rounds.drop(proposal, error)
        return False

    def _join_the_first(self, proposal: Proposal) -> None:
        """What was proposed before has one outcome, for all who proposed it."""
        id_ = proposal.id
        if self._verifier.repeat(id_, proposal.content_digest):
            return
        self._twins.setdefault(id_, []).append(proposal.ticket)
        opened = next((one.step for one in self._rounds.opened if one.proposal.id == id_), None)
        steps = (opened, self._verifier.step_of(id_), self._replays.step_of(id_))
        step = next((step for step in steps if step is not None), None)
        if step is not None:
            self._channel.append(Again(id_, step))

    def _drop(self, refused: list[tuple[Proposal, UpdateRefused]]) -> None:
        for proposal, error in refused:
            del self._known[proposal.id]
            if proposal.source is not None:
                self._failed_functions[proposal.id] = error
            self._rounds.drop(proposal, error, self._twins.pop(proposal.id, ()))

    def _withdraw(self, id_: str) -> None:
        """Takes an update back that no worker has applied: undecided, or committed for a later step."""
        error = UpdateRefused(WITHDRAWN, received=id_)
        held_back = [proposal for proposal in self._held_back if proposal.id == id_]
        self._held_back = [proposal for proposal in self._held_back if proposal.id != id_]
        for proposal in held_back:
            self._rounds.drop(proposal, error)
        for ready in [one for one in self._behind if one.proposal.id == id_]:
            self._behind.remove(ready)
            if ready.round:
                self._channel.append(Free(ready.round))
            self._drop(self._rounds.discard([ready], error))
        committed = self._verifier.scheduled(id_)
        later = (
            (committed.record, committed.step) if committed is not None else self._replays.waiting_for(id_)
        )
        # Before the first boundary it is not known what the state holds that training starts from.
        if later is not None and self._replays.announced:
            self._call_off(*later, error)

    def _call_off(self, record: Record, step: int, error: UpdateRefused) -> None:
        try:
            tickets = self._rounds.call_off(record.sequence, step)
        except (UpdateRefused, OSError) as problem:
            logger.warning("update %d is not withdrawn: %s", record.sequence, problem)
            return
        if tickets is None:
            return
        self._replays.forget(record.sequence)
        self._known.pop(record.id, None)
        tickets += self._twins.pop(record.id, [])
        self._channel.append(Drop(record.id, record.content_digest, tickets, error.to_json()))
        logger.warning("update %d, for step %d, is withdrawn", record.sequence, step)

    def _refuse_sourceless(self) -> None:
        """All workers stand here, and what they proposed is known: nobody will propose these functions."""
        held_back = {proposal.id for proposal in self._held_back}
        for id_ in [id_ for id_ in self._sourceless if id_ not in held_back]:
            proposal = self._sourceless.pop(id_)
            error = UpdateRefused(
                f"Worker {proposal.source}, on which the function was to run, has not proposed it",
                expected=f"propose(function, source={proposal.source}) on all workers, at the same step",
                received=f"a proposal of worker {proposal.rank} only",
                worker=proposal.source,
                remedy=f"Propose it in the training thread of every worker, or on worker {proposal.source}",
            )
            first, *twins = self._twins.pop(id_)
            self._rounds.drop(replace(proposal, ticket=first), error, twins)

    def _finish_open(self) -> None:
        """Decides what is decided at the boundary at which worker 0 stands, and what waited for that."""
        self._trials.decide_due()
        refused = self._rounds.finish_due()
        if refused is not None:
            self._drop(refused)
            self._commit_those_behind()
        self._take_up()

    def _note_paused(self, paused: Paused) -> None:
        there = self._pauses.note(paused)
        if there is not None:
            self._pauses.resume(there, apart(there) or self._carry_out(paused))

    def _carry_out(self, paused: Paused) -> UpdateRefused | None:
        """What all workers have paused for. Everything that was proposed before comes first."""
        intent, *arguments = paused.intent.split("\n")
        if intent == "restored":
            try:
                self._replays.start_from({int(sequence) for sequence in arguments})
            except UpdateRefused as error:
                return error
            return None
        if intent not in ("begin", "restore"):
            self._replays.announce()
        if intent in ("compare", "sync"):
            self._audits.only_warn()
        self._rounds.advance_at(paused.step)
        self._finish_open()
        ends = intent in ("drain", "close") and not self._rounds.leaving  # else it is tried at the next start
        while (ends and self._trials.cut_short(paused.step)) or self._rounds.due():
            self._finish_open()  # what had waited for others; perhaps another trial
        if intent in ("drain", "close"):
            self._refuse_sourceless()
        may_raise = intent not in ("compare", "sync")
        if intent not in ("begin", "restore") and self._audits.settle(may_raise=may_raise):
            return None  # their training threads raise, and are gone from here
        if intent in ("compare", "sync", "import"):
            in_trial = self._trials.refusal("import_weights" if intent == "import" else "sync")
            if in_trial is not None:
                return in_trial
        if intent == "audit":
            prevented = self._audits.at_once(arguments[0])
            self._verifier.wait_until_told(paused.step, self._member.patience.decide_secs)
            return prevented
        if intent == "sync":
            source, id_, *variables = arguments
            proposal = Proposal(id_, f"function-{id_}", 0, id_, time.time(), source=int(source))
            try:
                self._rounds.open(proposal, variables)
            except UpdateRefused as error:
                return error
            for _, refused in self._rounds.finish_due() or ():
                return refused
            self._verifier.wait_until_told(paused.step, self._member.patience.decide_secs)
            if len(variables) == len(self._member.state.schema) and self._verifier.is_verified(id_):
                self._audits.made_equal(paused.step)
        elif intent == "close":
            self._verifier.wait_until_told(paused.step, self._member.patience.answer_secs)
        return None


def _is_plain(proposal: Proposal) -> bool:
    return proposal.source is None and proposal.at_step is None and proposal.trial is None
