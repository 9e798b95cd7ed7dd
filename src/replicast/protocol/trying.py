"""A worker's part in trials: copies its state before the update, says what it measured, goes back or stays.

Where the update is applied, the training thread copies the whole state and puts up the end as a stop. There
it says what was measured and waits; then it does what was decided, and says the digest of its state. The
follower says what the metric is when a trial is staged, and hands on what was decided.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from replicast import faults
from replicast.errors import UpdateRefused
from replicast.protocol.measures import Measures
from replicast.protocol.messages import TRIAL_ROUND, Answer, Go, Stage
from replicast.protocol.trial_messages import Cut, Settle, Settled, Tried
from replicast.state import Arrays
from replicast.trial import Trial, TrialOutcome

if TYPE_CHECKING:
    from replicast.protocol.member import Member

logger = logging.getLogger("replicast")


class Trying:
    """One worker's part in trials, one at a time.

    Attributes:
        measures: What the last steps have measured.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._rank = member.channel.rank
        self._copy: Arrays = {}
        self._began = 0
        self._cut: set[int] = set()
        self.measures = Measures()

    def answer(self, message: Stage, answer: Answer) -> Answer:
        """To a worker's answer to `Stage`, of a trial: adds what its metric is now. For the follower."""
        if message.trial is None or answer.error is not None:
            return answer
        trial = Trial.from_json(message.trial)
        try:
            return replace(answer, measured=self.measures.before(trial.metric, trial.steps))
        except UpdateRefused as error:
            return Answer(error={**error.to_json(), "worker": self._rank})

    def begin(self, go: Go, step: int) -> None:
        """The training thread is about to apply an update on trial."""
        if go.trial is None:
            return
        trial, sequence = Trial.from_json(go.trial), int(go.updates[0][0])
        before: float | None = None
        with contextlib.suppress(UpdateRefused):  # a restart has forgotten what was before its checkpoint
            before = self.measures.before(trial.metric, trial.steps)
        self._member.state.snapshot(self._copy)
        self._began = step
        self.measures.begin(step)
        ends = max(step, go.trial.get("ends", step + trial.steps))
        tell = partial(self._tell, sequence, trial.metric, before)
        self._member.gate.begin_trial(TRIAL_ROUND + sequence, ends, tell)

    def heed(self, message: Cut | Settle) -> None:
        """Hands the training thread what the coordinator has said. For the follower."""
        gate, round_ = self._member.gate, TRIAL_ROUND + message.sequence
        match message:
            case Cut():
                self._cut.add(message.sequence)
                gate.cut_trial(round_)
            case Settle():
                outcome = TrialOutcome.from_json(message.outcome)
                # Here, while the training thread waits: the next one may be staged before it has gone on.
                self.measures.end(reverted=outcome.outcome == "reverted")
                gate.end_trial(round_, partial(self._settle, outcome))

    def _tell(self, sequence: int, metric: str, before: float | None) -> None:
        tried = Tried(self._member.gate.step, before, *self.measures.during(metric))
        self._member.channel.say(tried_key(sequence, self._rank), tried)

    def _settle(self, outcome: TrialOutcome) -> None:
        faults.point("settle")
        if outcome.outcome == "reverted":
            self._member.state.restore_snapshot(self._copy)
        self._copy = {}
        self._member.channel.say(settled_key(outcome.sequence, self._rank), Settled(self._digest()))
        if self._rank == 0:
            self._log(outcome)

    def _digest(self) -> str:
        """The digest of all that must be equal on all workers."""
        declared = self._member.examiner.declared
        names = (variable.name for variable in self._member.state.schema)
        digests = self._member.state.digests(name for name in names if name not in declared)
        joined = "".join(digests[name] for name in sorted(digests))
        return xxhash.xxh3_128_hexdigest(joined.encode())

    def _log(self, outcome: TrialOutcome) -> None:
        if outcome.outcome == "kept":
            logger.info("update %d is kept after its trial: %s", outcome.sequence, outcome.reason)
            return
        steps = self._member.gate.step - self._began
        then = (
            f"; training goes on with new data, and the batches of the {steps} steps since are not used again"
        )
        if outcome.sequence in self._cut:
            then = "; the training has ended"
        logger.warning(
            "update %d is taken back at step %d: %s. Every replica has the state of step %d again, as it was "
            "before the update%s",
            outcome.sequence,
            outcome.step,
            outcome.reason,
            self._began,
            then,
        )


def tried_key(sequence: int, rank: int) -> str:
    """Where a worker says what it measured in a trial."""
    return f"trial/{sequence}/tried/{rank}"


def settled_key(sequence: int, rank: int) -> str:
    """Where a worker says that it has done what was decided of a trial."""
    return f"trial/{sequence}/settled/{rank}"
