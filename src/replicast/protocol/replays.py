"""What the journal holds from an earlier life of the job, applied again, each update at its own step."""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from typing import Any

from replicast.errors import JobFailed, UpdateRefused
from replicast.journal import AnyJournal, Receipt, Record
from replicast.protocol.member import Member
from replicast.protocol.messages import REPLAY_ROUND, Go, Replay, Stage
from replicast.protocol.rounds import Rounds
from replicast.protocol.trials import Trials
from replicast.protocol.verifier import Committed, Verifier, is_healing
from replicast.trial import TrialOutcome
from replicast.update import Stage as Standing

logger = logging.getLogger("replicast")

AHEAD = 4
"""So many updates are staged before their step comes."""


class Replays:
    """The updates that are still to be applied again. For the coordinator's thread only."""

    def __init__(
        self, member: Member, journal: AnyJournal, rounds: Rounds, verifier: Verifier, trials: Trials
    ) -> None:
        self._member = member
        self._journal = journal
        self._rounds = rounds
        self._verifier = verifier
        self._trials = trials
        self._waiting: list[tuple[int, Record]] = []
        self._receipts: dict[int, Receipt] = {}
        self.announced = False
        """Whether the stops of this start are put up: from then on training goes on."""

    def read(self, after_step: int) -> dict[str, str]:
        """Reads the journal.

        Args:
            after_step: The step of the state that training starts from: later updates are applied again.

        Returns:
            The ids of all updates in it, with the digest of what they do.
        """
        records, receipts = self._journal.records(), self._journal.receipts()
        self._trials.read()
        moves, withdrawn = self._journal.moves(), self._journal.withdrawn()
        self._rounds.sequence = records[-1].sequence if records else 0
        self._receipts = receipts
        records = [record for record in records if record.sequence not in withdrawn]
        for record in records:
            receipt = receipts.get(record.sequence)
            # A pause of the training may have brought it forward.
            step = min(record.step, moves.get(record.sequence, record.step))
            step = step if receipt is None else min(step, receipt.step)
            if step > after_step:
                self._waiting.append((step, record))
            else:
                self._knows(record)
        self._waiting.sort(key=lambda waiting: (waiting[0], waiting[1].sequence))
        return {record.id: record.content_digest for record in records}

    def start_from(self, holds: Container[int]) -> None:
        """The state that training starts from holds these updates: all others are applied again.

        Raises:
            UpdateRefused: Something was decided already for the state before.
        """
        if self.announced:
            raise UpdateRefused(
                "Updates were decided before the state was restored",
                remedy="Restore before anything is proposed and before training",
            )
        for _, record in self._waiting:
            if record.sequence in holds:
                self._knows(record)
        self._waiting = [(step, record) for step, record in self._waiting if record.sequence not in holds]

    def step_of(self, id_: str) -> int | None:
        """The step for which an update waits, if it waits."""
        return next((step for step, record in self._waiting if record.id == id_), None)

    def waiting_for(self, id_: str) -> tuple[Record, int] | None:
        """An update that is not staged yet, and its step."""
        return next(((record, step) for step, record in self._waiting if record.id == id_), None)

    def forget(self, sequence: int) -> None:
        """An update is withdrawn."""
        self._waiting = [(step, record) for step, record in self._waiting if record.sequence != sequence]

    def announce(self) -> None:
        """Puts a stop before every step at which something is to be applied again, once.

        Before anything else is decided: what the journal holds comes before what is proposed in this life.
        """
        if self._waiting and not self.announced:
            stops = [[REPLAY_ROUND + record.sequence, step] for step, record in self._waiting]
            steps = ", ".join(str(step) for _, step in stops[:10])
            what = (
                "1 update of an earlier start is"
                if len(stops) == 1
                else f"{len(stops)} updates of an earlier start are"
            )
            logger.warning("%s applied again, at step%s %s", what, "s" if "," in steps else "", steps)
            healing = [REPLAY_ROUND + record.sequence for _, record in self._waiting if is_healing(record)]
            self._member.channel.append(Replay(stops, healing))
        self.announced = True
        self.stage_next()

    def stage_next(self) -> None:
        """Stages the next few; their stops are up already, so training waits should it come there first."""
        while self.announced and self._waiting and self._ahead() < AHEAD:
            step, record = self._waiting.pop(0)
            update = self._journal.load(record.sequence)
            parcel = self._member.shelf.publish(update, record.content_digest)
            message = Stage(record.id, record.content_digest, parcel.to_json())
            answers = self._rounds.ask(message, self._member.patience.stage_secs + 10.0)
            for worker, answer in answers.items():
                if answer.error is not None:
                    raise JobFailed(
                        f"Update {record.sequence} of the journal, from an earlier start in this run "
                        f"directory, cannot be applied again: {UpdateRefused.from_json(answer.error)} Start "
                        "with the model that it was made for, or in another run directory",
                        worker=worker,
                    )
            has_receipt = record.sequence in self._receipts
            committed = Committed(record, record.content_digest, time.time(), step, True, has_receipt)
            self._verifier.expect(committed)
            updates = [[record.sequence, record.id]]
            go = Go(REPLAY_ROUND + record.sequence, step, updates, scheduled=True, trial=self._trial(record))
            self._member.channel.append(go)

    def _knows(self, record: Record) -> None:
        """The state holds it: whoever proposes it again hears how it ended."""
        receipt = self._receipts.get(record.sequence)
        if receipt is None:
            receipt = _unwritten(record, self._trials.outcomes.get(record.sequence))
        self._verifier.knows(record, receipt)

    def _trial(self, record: Record) -> dict[str, Any] | None:
        """The trial of an update, and where it was decided, if it was."""
        outcome = self._trials.outcomes.get(record.sequence)
        if record.trial is None or outcome is None:
            return None if record.trial is None else dict(record.trial)
        return {**record.trial, "ends": outcome.step}

    def _ahead(self) -> int:
        return sum(1 for stop in self._member.gate.pending() if stop.round < 0 and stop.go is not None)


def _unwritten(record: Record, trial: TrialOutcome | None) -> Receipt:
    """What can be said of an update whose receipt was never written, and which the start state holds."""
    return Receipt(
        sequence=record.sequence,
        id=record.id,
        step=record.step,
        digests={},
        propose_to_applied_secs=0.0,
        stall_secs=0.0,
        verified_at=record.committed_at,
        stage=Standing.APPLIED,
        trial=trial,
    )
