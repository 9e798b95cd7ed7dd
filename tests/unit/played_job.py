"""A run directory without a job, a fake job, and the command line: for the tests of commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from replicast.cli import main
from replicast.core.entries import Committed, Decided, Payload, Receipt, Scheduled, Stage, Withdrawn
from replicast.errors import UpdateRefused
from replicast.processes import this_process
from replicast.storage import inbox
from replicast.storage.claims import Fence
from replicast.storage.inbox import InboxAnswer
from replicast.storage.journal import FileJournal, undo
from replicast.storage.run_files import FORMAT, RunInfo, WorkerNote, write_run_info, write_worker_note
from replicast.update.edits import Variable
from replicast.update.schema import Schema, planned
from replicast.update.trial import Effect, Histogram, TrialOutcome
from replicast.update.update import Update

LONG_AGO = 2 * 86_400.0
"""A job that was heard from so many seconds ago is dead, and no clock is so wrong that one would listen."""
START = {
    "command": ("train.py", "--lr", "0.1"),
    "versions": {"python": "3.12.3", "keras": "3.10.0"},
    "commit": "0123456789abcdef0123456789abcdef01234567-dirty",
}
BIAS = np.arange(3, dtype=np.float32)
SCHEMA = Schema(
    [
        Variable("model/dense/kernel", (4, 3), "float32", "trainable", (("optimizer/kernel_momentum", 0.0),)),
        Variable("model/dense/bias", (3,), "float32", "trainable"),
        Variable("model/table/embeddings", (10, 2), "bfloat16", "trainable"),
        Variable("optimizer/kernel_momentum", (4, 3), "float32", "optimizer"),
        Variable("optimizer/learning_rate", (), "float32", "optimizer"),
        Variable("optimizer/iteration", (), "int64", "optimizer"),
    ]
)


class PlayedJob:
    """Takes what is in the inbox, one stage further each time it is asked to do something.

    Attributes:
        fate: How updates end.
        stops_at: The stage at which it leaves an update.
        outcome: How trials end.
        step: Where updates are applied.
    """

    def __init__(self, run: Path, attempt: int = 0, *, stops_at: Stage | None = None) -> None:
        self.schema = SCHEMA
        self.run, self.attempt, self.stops_at = run, attempt, stops_at
        self.fate = Stage.VERIFIED
        self.outcome: TrialOutcome | None = None
        self.step = 7
        self._acts: Iterator[None] | None = None
        self.fence = Fence(run, attempt, START)
        self._journal = FileJournal(run, self.fence)

    def act(self, _secs: float = 0.0) -> None:
        if self._acts is None:
            self._acts = self.take()
        next(self._acts, None)

    def act_all(self) -> None:
        """Takes everything as far as it goes; `act` begins again behind it."""
        self._acts = None
        for _ in self.take():
            pass

    def withdraw(self) -> None:
        """What a job does that is asked to withdraw updates, and can."""
        for path in inbox.requests(self.run):
            request = inbox.read_request(path)
            update = path.with_name(f"{request.name}.safetensors")
            inbox.note_end(self.run, update, Stage.WITHDRAWN, withdrawn_by=request.author)
            self.withdraw_one(request.name)
            inbox.answer(self.run, inbox.id_of(path), InboxAnswer(Stage.WITHDRAWN, time.time(), 7))

    def withdraw_one(self, update_id: str) -> None:
        self._journal.write(Withdrawn(update_id))
        inbox.note_stage(self.run, update_id, Stage.WITHDRAWN)
        (self.run / "inbox" / f"{update_id}.safetensors").unlink(missing_ok=True)

    def replay(self, sequence: int = 1) -> None:
        """What a restarted job does at the step of an update."""
        record = self._journal.history().committed[sequence]
        self._journal.write(self.receipt(record.id, sequence, record.step))

    def receipt(self, update_id: str, sequence: int, step: int) -> Receipt:
        digests = {0: "a" * 32, 1: ("b" if self.fate is Stage.FAILED else "a") * 32}
        times = 0.25, 0.003, time.time()
        done = (
            Effect("optimizer/learning_rate", (), before=0.001, after=0.0005),
            Effect("dense/bias", (3,), norm=2.0, change=1.0, histogram=Histogram(-1.0, 2.0, (1, 0, 2))),
        )
        applied = sequence, update_id, step, digests, *times, self.fate, self.outcome, self.attempt
        return Receipt(*applied, effects=done)

    def take(self) -> Iterator[None]:
        """Takes everything that waits now, one stage further with each item."""
        for waiting in inbox.waiting(self.run):
            taken = inbox.take(self.run, waiting.path)
            assert taken is not None
            yield
            if self.fate is Stage.REFUSED:
                error = UpdateRefused("Worker 1 has no room", worker=1, received="28 bytes free")
                inbox.refuse(self.run, waiting.path, error)
                return
            given, step = taken.update, self.step if taken.at_step is None else taken.at_step
            if taken.reverts is not None:
                given = given.replaced(undo(self.run, taken.reverts, forced=True).update.edits)
            update = planned(given, self.schema)
            id_, digest, sequence = update.id, update.content_digest(), 0
            self._journal.write(Payload(id_, digest, None, update.author, update.note), update)
            for stage in (Stage.PREPARED, Stage.SCHEDULED, Stage.COMMITTED, Stage.APPLIED):
                if stage is Stage.SCHEDULED:
                    if taken.at_step is None:
                        continue
                    self._journal.write(Scheduled(id_, digest, step, taken.trial))
                if stage is Stage.COMMITTED:
                    sequence, before = self._journal.history().next_sequence, 0.5 if taken.trial else None
                    fields = (sequence, id_, digest, step, self.attempt, taken.trial, before)
                    self._journal.write(Committed(*fields, workers=2, reverts=taken.reverts))
                known_step = None if stage is Stage.PREPARED else step
                ends = step + taken.trial.steps if taken.trial and stage is Stage.APPLIED else None
                until = {"trial_until": ends}
                inbox.note_stage(self.run, id_, stage, step=known_step, taken_by=this_process(), **until)
                yield
                if stage is self.stops_at:
                    return
            self._end(id_, sequence, step)
            waiting.path.unlink(missing_ok=True)

    def _end(self, id_: str, sequence: int, step: int) -> None:
        outcome = self.outcome
        if outcome is not None:
            kept = outcome.outcome == "kept"
            self._journal.write(
                Decided(sequence, kept, outcome.step, sequence, outcome.reason, outcome.during)
            )
        receipt = self.receipt(id_, sequence, step)
        self._journal.write(receipt)
        if self.fate is Stage.FAILED:
            inbox.note_stage(self.run, id_, self.fate, problem="worker 1 differs")
        else:
            inbox.note_stage(self.run, id_, self.fate, receipt=receipt)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[float], object]) -> list[float]:
    """Lets something happen in each moment in which a command waits; nobody waits in fact.

    Returns:
        How long these moments were.
    """
    moments: list[float] = []

    def sleep(secs: float) -> None:
        moments.append(secs)
        act(secs)

    monkeypatch.setattr("replicast.client.directory.LISTEN_SECS", 3.0)
    monkeypatch.setattr("replicast.storage.inbox.Arrivals.wait", lambda _, secs: sleep(secs))
    for module in ("directory", "run"):
        monkeypatch.setattr(f"replicast.client.{module}.sleep", sleep)
        monkeypatch.setattr(f"replicast.client.{module}.monotonic", lambda: sum(moments))
    return moments


def heard_of(run: Path, secs_ago: float = 0.0, waiting_for: str = "") -> None:
    for rank in range(2):
        at, training = time.time() - secs_ago, not waiting_for
        note = WorkerNote(rank, 100 + rank, "box", 5, 0, at, training=training, waiting_for=waiting_for)
        write_worker_note(run, note)


@contextmanager
def heard_of_always(run: Path) -> Iterator[None]:
    """The workers write their notes as those of a real job do, however long another process takes."""
    is_over = threading.Event()

    def write() -> None:
        while True:  # in real time, also where that of the test stands still
            heard_of(run, secs_ago=time.time() - time.clock_gettime(time.CLOCK_REALTIME))
            if is_over.wait(0.2):
                return

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield
    finally:
        is_over.set()
        writing.join()


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def output_of(code: int, *arguments: object) -> str:
    """Runs a command that must end with this exit code, and gives its output."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return result.output


def flat(output: str) -> str:
    return " ".join(output.split())


def tensors(name: str, **values: np.ndarray) -> Path:
    path = Path(f"{name}.safetensors")
    safetensors.numpy.save_file({key.replace("__", "/"): value for key, value in values.items()}, path)
    return path


def pushed(run: Path) -> tuple[Update, int | None]:
    (waiting,) = inbox.waiting(run)
    submitted = inbox.read(waiting.path)
    return submitted.update, submitted.at_step


def made_run(path: Path = Path("run"), schema: Schema = SCHEMA) -> Path:
    """A run directory, seen from its parent, whose two workers have just written their notes."""
    write_run_info(Fence(path, attempt=0), RunInfo(FORMAT, schema, 2, 0, time.time()))
    heard_of(path)
    return path


def has(output: str, *texts: str) -> bool:
    """Whether all texts are in the output, however it is broken into lines; names those that are not."""
    missing = [text for text in texts if flat(text) not in flat(output)]
    assert not missing, (missing, output)
    return True
