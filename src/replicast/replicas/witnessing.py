"""What the other workers say of a state that worker 0 is about to save, and whether theirs is the same."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicast.audit import what_follows
from replicast.errors import CheckpointError, JobFailed, ReplicasDiverged
from replicast.protocol import Member
from replicast.protocol.channel import LOOK_SECS
from replicast.replicas.reconciling import packed
from replicast.state import State

logger = logging.getLogger("replicast")

REMIND_LOOKS = 60
ENDED = "The job ended before its checkpoint was written"
Said = dict[str, Any]
"""A worker's `step`, `digests`, `values` of what may differ, and last measures."""


class Seal:
    """What worker 0 has proposed and nobody has decided about when its training goes on, by id."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._undecided: set[str] = set()

    def give(self, undecided: Iterable[str]) -> None:
        """The training goes on."""
        self._undecided.update(undecided)
        self._given.set()

    def wait(self, stopping: threading.Event) -> set[str]:
        """Blocks until the training goes on, or the job stops."""
        while not self._given.wait(LOOK_SECS):
            if stopping.is_set():
                raise JobFailed(ENDED)
        return self._undecided


class Witnesses:
    """The other workers. `testify` and `seal` are for their training threads, the rest for the saver."""

    def __init__(self, member: Member, state: State) -> None:
        self._member = member
        self._state = state
        self._forgotten = 0

    def testify(self, number: int, averaged: Sequence[str]) -> None:
        """Says what this worker's state is at this boundary, for the checkpoint with this number."""
        said: Said = {
            "step": self._member.gate.step,
            "digests": self._state.digests(variable.name for variable in self._state.schema),
            "values": packed(self._state, averaged),
            "measured": self._member.trying.measures.history(),
        }
        self._member.channel.tell(f"save/{number}/{self._member.channel.rank}", json.dumps(said))

    def seal(self, number: int) -> None:
        """Says what this worker has proposed and nobody has decided about; the training goes on from here."""
        undecided = json.dumps(self._member.outcomes.undecided())
        self._member.channel.tell(f"sealed/{number}/{self._member.channel.rank}", undecided)

    def hear(self, number: int) -> list[Said]:
        """What all others said of a checkpoint. Blocks until they have, at most `begin_secs` for each.

        Raises:
            JobFailed: One did not, or the job ended before.
        """
        workers = range(1, self._member.channel.size)
        said = [self._hear_one(number, worker) for worker in workers]
        # Each says one after the other: of earlier numbers, which worker 0 may have skipped, nothing comes.
        for each in range(self._forgotten + 1, number + 1):
            for worker in workers:
                self._member.channel.forget_told(f"save/{each}/{worker}")
                if each < number:
                    self._member.channel.forget_told(f"sealed/{each}/{worker}")
        self._forgotten = number
        return said

    def hear_seals(self, number: int) -> set[str]:
        """What all others had proposed when their training went on behind a checkpoint, by id.

        Blocks until it has: a callback may take as long as it likes.

        Raises:
            JobFailed: The job ended before.
        """
        undecided: set[str] = set()
        for worker in range(1, self._member.channel.size):
            key = f"sealed/{number}/{worker}"
            looks = 0
            while (text := self._member.channel.hear(key, LOOK_SECS)) is None:
                looks += 1
                if looks % REMIND_LOOKS == 0:
                    logger.warning("checkpoint %d waits until worker %d begins its next step", number, worker)
                if self._member.threads.stopping.is_set():
                    raise JobFailed(ENDED)
            undecided.update(json.loads(text))
            self._member.channel.forget_told(key)
        return undecided

    def check(self, said: Sequence[Said], step: int, mine: Mapping[str, str]) -> None:
        """Compares the state that worker 0 has copied with that of all others.

        Raises:
            ReplicasDiverged: A worker's state is another one.
            CheckpointError: A worker is at another step.
        """
        for worker, each in enumerate(said, start=1):
            self._check_one(each, worker, step, mine)

    def wait_for_decisions(self, ids: set[str]) -> None:
        """What was proposed before the training went on is in the journal before the checkpoint is there.

        A restarted script does not come to those lines again.
        """
        ends = time.monotonic() + self._member.patience.decide_secs
        while not self._member.outcomes.are_decided(ids):
            if self._member.threads.stopping.wait(0.01):
                raise JobFailed(ENDED)
            if time.monotonic() > ends:
                logger.warning("the checkpoint does not wait any longer for proposals: %s", ", ".join(ids))
                return

    def _hear_one(self, number: int, worker: int) -> Said:
        timeout_secs = self._member.patience.begin_secs
        ends = time.monotonic() + timeout_secs
        while True:
            left = ends - time.monotonic()
            text = self._member.channel.hear(f"save/{number}/{worker}", max(0.001, min(LOOK_SECS, left)))
            if text is not None:
                said: Said = json.loads(text)
                return said
            if self._member.threads.stopping.is_set():
                raise JobFailed(ENDED)
            if left <= 0:
                raise JobFailed(
                    f"worker {worker} did not come to checkpoint {number} within {timeout_secs:.0f} s",
                    worker=worker,
                )

    def _check_one(self, said: Said, worker: int, step: int, mine: Mapping[str, str]) -> None:
        if said["step"] != step:
            raise CheckpointError(
                "The workers save at different steps",
                step=step,
                expected=f"step {step} on all workers",
                received=f"worker {worker} at step {said['step']}",
                remedy="Call save() on all workers at the same place of the script",
            )
        may_differ = self._member.examiner.declared
        differing = [
            name
            for name, digest in mine.items()
            if name not in may_differ and said["digests"].get(name) != digest
        ]
        if differing:
            raise ReplicasDiverged(
                f"The state is not saved: at step {step} worker {worker} differs from worker 0 in "
                f"{', '.join(differing[:5])}{' and others' if len(differing) > 5 else ''}. "
                f"{what_follows(self._member.examiner.policy)}",
                worker=worker,
                step=step,
            )
