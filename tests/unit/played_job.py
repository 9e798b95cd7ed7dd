"""A run directory without a job, a job that is played, and the command line: for the tests of commands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy
from click.testing import CliRunner, Result

from replicast import inbox
from replicast.cli import main
from replicast.errors import UpdateRefused
from replicast.fence import Fence
from replicast.journal import Journal
from replicast.processes import this_process
from replicast.records import Receipt, Record, summarized
from replicast.runfiles import FORMAT, RunInfo, WorkerNote, write_run_info, write_worker_note
from replicast.schema import Schema, Variable
from replicast.core.stage import Stage
from replicast.update import Update
from replicast.validate import planned

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
    """Takes what is in the inbox, one stage further each time it is asked to do something."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.fate = Stage.VERIFIED
        self.stops_at: Stage | None = None
        self._acts: Iterator[None] | None = None
        self._journal = Journal(run, Fence(run, attempt=0))

    def act(self, _secs: float = 0.0) -> None:
        if self._acts is None:
            self._acts = self._take()
        next(self._acts, None)

    def act_all(self) -> None:
        for _ in self._take():
            pass

    def withdraw(self, update_id: str) -> None:
        """What a job does that is asked to take an update back, and can."""
        for record in self._journal.records():
            if record.id == update_id:
                self._journal.withdraw(record.sequence)
        inbox.note_stage(self.run, update_id, Stage.WITHDRAWN)
        inbox.done(self.run / "inbox" / f"{update_id}.safetensors")

    def _take(self) -> Iterator[None]:
        for waiting in inbox.waiting(self.run):
            taken = inbox.take(self.run, waiting.path)
            assert taken is not None
            update, at_step = taken.update, taken.at_step
            yield
            if self.fate is Stage.REFUSED:
                error = UpdateRefused("Worker 1 has no room", worker=1, received="28 bytes free")
                inbox.refuse(self.run, waiting.path, error)
                return
            step = 7 if at_step is None else at_step
            for stage in (Stage.STAGED, Stage.COMMITTED, Stage.APPLIED):
                if stage is Stage.COMMITTED:
                    sequence = self._commit(planned(update, SCHEMA), step, scheduled=at_step is not None)
                known_step = None if stage is Stage.STAGED else step
                inbox.note_stage(self.run, update.id, stage, step=known_step, taken_by=this_process())
                yield
                if stage is self.stops_at:
                    return
            receipt = self._receipt(update.id, sequence, step)
            self._journal.write_receipt(receipt)
            if self.fate is Stage.VERIFIED:
                inbox.note_stage(self.run, update.id, self.fate, receipt=receipt.to_json())
            else:
                inbox.note_stage(self.run, update.id, self.fate, reason="worker 1 differs")
            inbox.done(waiting.path)

    def _commit(self, update: Update, step: int, *, scheduled: bool) -> int:
        journal = self._journal
        payload = journal.stage(update)
        sequence = len(journal.records()) + 1
        record = Record(
            sequence,
            update.id,
            step,
            payload.sha256,
            payload.nbytes,
            update.author,
            update.note,
            summarized(update.edits),
            "0" * 32,
            2,
            0,
            scheduled,
            time.time(),
        )
        journal.commit(payload, record)
        return sequence

    def _receipt(self, update_id: str, sequence: int, step: int) -> Receipt:
        digests = {0: "a" * 32, 1: ("a" if self.fate is Stage.VERIFIED else "b") * 32}
        return Receipt(sequence, update_id, step, digests, 0.25, 0.003, time.time(), self.fate)


def heard_of(run: Path, secs_ago: float = 0.0, waiting_for: str = "") -> None:
    for rank in range(2):
        at, training = time.time() - secs_ago, not waiting_for
        note = WorkerNote(rank, 100 + rank, "box", 5, 0, at, training=training, waiting_for=waiting_for)
        write_worker_note(run, note)


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def tensors(name: str, **values: np.ndarray) -> Path:
    path = Path(f"{name}.safetensors")
    safetensors.numpy.save_file({key.replace("__", "/"): value for key, value in values.items()}, path)
    return path


def pushed(run: Path) -> tuple[Update, int | None]:
    (waiting,) = inbox.waiting(run)
    submitted = inbox.read(waiting.path)
    return submitted.update, submitted.at_step


def made_run(path: Path = Path("run")) -> Path:
    """A run directory, seen from its parent, whose two workers have just written their notes."""
    write_run_info(Fence(path, attempt=0), RunInfo(FORMAT, SCHEMA, 2, 0, time.time()))
    heard_of(path)
    return path
