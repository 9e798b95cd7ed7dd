"""Worker 0's part in trials: an update that was applied for some steps is kept by all, or taken back by all.

    go, with trial   every worker copies its state, applies, and trains on; nothing else is committed
    tried            at the end all workers stop, and each says what it has measured
    journal          the mean over the workers decides; the outcome is on disk
    settle           every worker goes back to its copy, or stays; digests of the whole states are compared

A later life of the job that finds the outcome takes it, whatever it measures; one that does not decides anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from replicast import faults
from replicast.anyjournal import AnyJournal
from replicast.errors import JobFailed, UpdateRefused
from replicast.protocol.channel import LOOK_SECS
from replicast.protocol.member import Member
from replicast.protocol.messages import TRIAL_ROUND
from replicast.protocol.trial_messages import Cut, Settle, Tried
from replicast.protocol.trying import tried_key
from replicast.protocol.verifier import Committed, Verifier
from replicast.trial import Trial, TrialOutcome, judged


class Trials:
    """Decides trials. For the coordinator's thread only.

    Attributes:
        outcomes: How the trials ended that are decided, by sequence number; also those of earlier lives.
    """

    def __init__(self, member: Member, journal: AnyJournal, verifier: Verifier) -> None:
        self._member = member
        self._channel = member.channel
        self._journal = journal
        self._verifier = verifier
        self.outcomes: dict[int, TrialOutcome] = {}

    def read(self) -> None:
        """Reads what earlier lives of the job have decided."""
        self.outcomes = self._journal.outcomes()

    def until(self) -> int | None:
        """The step for which others wait because a trial is under way; None when none is."""
        under_way = self.under_way()
        return None if under_way is None else under_way[1]

    def under_way(self) -> tuple[int, int] | None:
        """The sequence number of the update that is on trial, and the step at which that ends."""
        on_trial = self._verifier.on_trial(self._member.gate.step)
        if not on_trial:
            return None
        first, ends = on_trial[0], self._member.gate.trial_ends
        return first.record.sequence, first.step + _trial_of(first).steps if ends is None else ends

    def refusal(self, what: str) -> UpdateRefused | None:
        """Why all workers together cannot do something now, if they cannot."""
        until = self.until()
        if until is None:
            return None
        return UpdateRefused(
            f"A trial runs until step {until}",
            received=what,
            remedy="Ask again when it is decided: training has to go on until then",
        )

    def decide_due(self) -> None:
        """Decides the trial at whose end worker 0's training thread stands, if it does."""
        for committed in self._verifier.on_trial(self._member.gate.step):
            if self._member.gate.stands_at(TRIAL_ROUND + committed.record.sequence):
                self._decide(committed)

    def cut_short(self, step: int) -> bool:
        """All workers have paused at this step, and training ends: decides a trial that is under way.

        Returns:
            Whether there was one. There may be another, which has waited for it.
        """
        for committed in self._verifier.on_trial(step):
            self._channel.append(Cut(committed.record.sequence))
            self._decide(committed)
            return True
        return False

    def _decide(self, committed: Committed) -> None:
        record = committed.record
        tried = self._gather(record.sequence)
        outcome = self.outcomes.get(record.sequence)
        if outcome is None:
            outcome = self._judge(committed, tried)
            faults.point("decide")
            try:
                self._journal.write_outcome(outcome)
            except OSError as error:
                raise JobFailed(
                    f"How the trial of update {record.sequence} ended cannot be written ({error.strerror}). "
                    "Make room or repair the disk of the run directory, and start the job again"
                ) from error
            self.outcomes[record.sequence] = outcome
        self._verifier.decided(record.sequence, outcome)
        self._channel.append(Settle(record.sequence, outcome.to_json()))

    def _judge(self, committed: Committed, tried: dict[int, Tried]) -> TrialOutcome:
        record, trial = committed.record, _trial_of(committed)
        before: float | None = (record.trial or {}).get("before")
        if record.scheduled:
            # Its author chose the step: what was measured when it was committed may be long past.
            measured = _mean(one.before for one in tried.values())
            before = before if measured is None else measured
        during = _mean(one.during for one in tried.values())
        step = max(one.step for one in tried.values())
        measured = min(one.measured for one in tried.values())
        return judged(trial, record.sequence, step, before, during, measured)

    def _gather(self, sequence: int) -> dict[int, Tried]:
        """What each worker has measured; they come to the end of the trial with the training."""
        timeout_secs = self._member.patience.decide_secs
        ends = time.monotonic() + timeout_secs
        tried: dict[int, Tried] = {}
        for worker in range(self._channel.size):
            key = tried_key(sequence, worker)
            while worker not in tried:
                said = self._channel.said(key, LOOK_SECS)
                if said is not None:
                    tried[worker] = said
                elif self._member.threads.stopping.is_set():
                    raise JobFailed("The job ended at the end of a trial")
                elif time.monotonic() > ends:
                    raise JobFailed(
                        f"worker {worker} did not come to the end of the trial of update {sequence} within "
                        f"{timeout_secs:.0f} s. Look for the reason in its log",
                        worker=worker,
                    )
        for worker in tried:
            self._channel.forget_said(tried_key(sequence, worker))
        return tried


def _trial_of(committed: Committed) -> Trial:
    return Trial.from_json(committed.record.trial or {})


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
