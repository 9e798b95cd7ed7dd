"""Where all workers stop: the coordinator asks, and the latest boundary that somebody names is the step.

A stop that is put up waits for its decision: an update, a function that is to be computed there, an audit, or
that nothing is to be done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from replicast.errors import UpdateRefused
from replicast.journal import AnyJournal
from replicast.protocol.member import Member
from replicast.protocol.messages import Advance, Aim, Answer, Free, Hold, Proposal, Stage
from replicast.protocol.verifier import Verifier

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that waits for a boundary, at which an update will be computed.

    Attributes:
        act: What to do there instead, when worker 0 stands there.
    """

    round: int
    step: int
    proposal: Proposal
    act: Callable[[], None] | None = None


class Stops:
    """Has all workers stop at one boundary. For the coordinator's thread only.

    Args:
        member: Worker 0's own part.
        durable: Whether the journal is on disk: then the workers train one step more while it is written.
    """

    def __init__(self, member: Member, journal: AnyJournal, verifier: Verifier, *, durable: bool) -> None:
        self._member = member
        self._channel = member.channel
        self._journal = journal
        self._verifier = verifier
        self._durable = durable
        self._round = 0
        self._latest_step = 0
        self._left_at: int | None = None
        self._held: tuple[int, dict[int, Answer]] | None = None
        self.opened: list[OpenRound] = []
        """The rounds that wait for their boundary."""

    @property
    def leaving(self) -> bool:
        """Whether all workers were told to leave the training at a boundary."""
        return self._left_at is not None

    def ask(self, message: Stage | Hold, timeout_secs: float) -> dict[int, Answer]:
        """Every worker's answer.

        Raises:
            UpdateRefused: Somebody did not answer in time, and is named.
        """
        proposals = self._channel.proposals_read
        number = self._channel.append(message)
        answers = self._channel.answers(number, timeout_secs, self._member.threads.stopping.is_set)
        missing = [worker for worker in range(self._channel.size) if worker not in answers]
        if missing:
            raise UpdateRefused(
                f"Worker {', '.join(map(str, missing))} did not answer within {timeout_secs:.0f} s",
                worker=missing[0],
            )
        self._channel.all_have_read(number, proposals)
        return answers

    def stop_all(self, at_step: int | None = None) -> tuple[int, int]:
        """Has all workers stop at one boundary, until it is decided.

        Returns:
            The round, and the step: the given one, or what they have agreed on.

        Raises:
            UpdateRefused: The step is past, or a worker does not answer.
        """
        round_ = self._next_round()
        try:
            return round_, self._agree_on_step(round_, at_step, lead=0)
        except UpdateRefused:
            self._channel.append(Free(round_))
            raise

    def hold_here(self) -> int:
        """Puts up another stop where all workers stand already; gives its round.

        Raises:
            UpdateRefused: A worker does not answer.
        """
        round_ = self._next_round()
        try:
            self.ask(Hold(round_), self._member.patience.answer_secs)
        except UpdateRefused:
            self._channel.append(Free(round_))
            raise
        return round_

    def advance(self) -> None:
        """If all workers stand at one boundary, has them apply there what is meant for a later one.

        They are held while they are asked: one that only rests must not walk on in between.
        """
        round_ = self._next_round()
        try:
            answers = self.ask(Hold(round_), self._member.patience.answer_secs).values()
        except UpdateRefused as error:  # nothing was asked for that could be refused
            logger.warning("the workers could not be asked where they stand: %s", error)
        else:
            self._advance_if_together(answers)
        self._channel.append(Free(round_))

    def advance_at(self, step: int) -> None:
        """The same when all workers are known to stand at `step`, until they are told to go on."""
        self._advance_if_together([Answer(step=step, parked=True)])

    def _advance_if_together(self, answers: Collection[Answer]) -> None:
        steps = {answer.step for answer in answers}
        if len(steps) > 1 or not all(answer.parked for answer in answers):
            return
        if self._left_at is not None and min(steps) >= self._left_at:
            return  # some have left here, and apply nothing more
        step = self._latest_step = min(steps)
        for sequence in self._verifier.meant_for_later(step):
            try:  # first, or a later life would apply it where it was meant for
                self._journal.move(sequence, step)
            except OSError as error:
                logger.warning("that update %d is applied earlier cannot be noted: %s", sequence, error)
            self._verifier.moved(sequence, step)
        self._channel.append(Advance())
        self.opened = [
            one if one.proposal.at_step is not None else replace(one, step=min(one.step, step))
            for one in self.opened
        ]

    def _next_round(self) -> int:
        self._round += 1
        return self._round

    def _ask_to_hold(self, round_: int) -> list[Answer]:
        return [*self.ask(Hold(round_), self._member.patience.answer_secs).values()]

    def _all_held(self, round_: int) -> list[Answer] | None:
        """Their answers, if all were in a pause when they staged, and are held there for this round."""
        held, self._held = self._held, None
        if held is None or held[0] != round_ or not all(answer.parked for answer in held[1].values()):
            return None
        return [*held[1].values()]

    def _agree_on_step(self, round_: int, at_step: int | None, lead: int = 1) -> int:
        answers = self._all_held(round_) or self._ask_to_hold(round_)
        step = max(answer.step for answer in answers)
        if self._left_at is not None:
            # Whoever stands there may have left: what is decided now is for the next start.
            step = max(step, self._left_at + 1)
        elif step < self._latest_step:  # somebody waits before a boundary for which others are committed
            self._advance_if_together(answers)
        if at_step is not None and at_step < step:
            raise UpdateRefused(
                f"Step {at_step} is past", expected=f"step {step} or later", received=f"at_step={at_step}"
            )
        if at_step is not None:
            step = at_step
        else:
            on_the_way = self._durable and not any(answer.parked for answer in answers)
            # Never before an earlier one: sequence numbers are the order, here and when they are replayed.
            step = self._latest_step = max(step + lead if on_the_way else step, self._latest_step)
        if any(answer.step != step for answer in answers):
            self._channel.append(Aim(round_, step))
        return step
