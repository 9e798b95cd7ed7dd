"""The contestants of the `push-rows` table: an author outside of a job that trains, and what it waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import replicast
from benchmarks.rows_replicast import AddRows
from benchmarks.runner import Times, lasted
from benchmarks.step_task import StepTask
from benchmarks.training import Loop, Training
from benchmarks.update_replicast import weights_of
from replicast.files import write_durably
from replicast.launcher import bootstrap

STEP = StepTask(steps=1, batch=4, units=(8,), features=8)
RESULT_SECS = 60.0


class Push(AddRows):
    """The whole time of the author: from the update, which is made already, to its receipt."""

    def setup(self) -> None:
        training = Training(self.group, STEP)
        with self.group.scope():
            self.model = weights_of(self.task, training.model)
        run_dir = self.task.directory / type(self).__name__
        self.replicas = replicast.Replicas(self.model, optimizer=training.optimizer, run_dir=run_dir)
        self.loop = Loop(training, self.task.directory / f"last-{type(self).__name__}", self.is_source)
        self.author: Any = None
        if self.is_source:
            command = [sys.executable, bootstrap.__file__, str(os.getpid()), sys.executable, "-m", __name__]
            self.author = subprocess.Popen(
                [*command, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )

    def arrange(self, index: int) -> None:
        self.loop.reset()
        if self.is_source:
            self.update(index).save(self.task.directory / "update.safetensors")

    def round(self, index: int) -> Times:
        if not self.is_source:
            self.loop.run(self.replicas.boundary, lambda _: False)
            return lasted(0)  # the author has the time
        with ThreadPoolExecutor(1, thread_name_prefix="author") as thread:
            told = thread.submit(self._pushed)
            self.loop.run(self.replicas.boundary, lambda _: told.done())
            return lasted(int(self.figure(*told.result())))

    def figure(self, author_ns: float, applied_ns: float) -> float:
        return author_ns

    def _pushed(self) -> tuple[float, float]:
        self.author.stdin.write(f"{self.task.directory / 'update.safetensors'}\n")
        self.author.stdin.flush()
        author_ns, applied_ns = map(float, self.author.stdout.readline().split())
        return author_ns, applied_ns


class Applied(Push):
    """The part after worker 0 has taken the update from the inbox, from its receipt."""

    def figure(self, author_ns: float, applied_ns: float) -> float:
        return applied_ns


class Durable(AddRows):
    """The update written for the inbox and for the journal, and two lines of the log, each with fsync."""

    def setup(self) -> None:
        self.content = b""

    def check(self, rounds: int) -> None:
        """There are no weights."""

    def arrange(self, index: int) -> None:
        path = self.task.directory / "floor.safetensors"
        if self.is_source:
            self.update(index).save(path)
            self.content = path.read_bytes()

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        if not self.is_source:
            return lasted(0)
        for name in ("inbox", "journal"):
            write_durably(self.task.directory / f"{name}.safetensors", [self.content])
        for _ in range(2):
            with (self.task.directory / "log.jsonl").open("ab") as file:
                file.write(b"x" * 500)
                file.flush()
                os.fsync(file.fileno())
        return lasted(time.monotonic_ns() - start)


def main(run_dir: str) -> None:
    """The author: pushes the file of each line, and prints the nanoseconds of its wait and of the receipt."""
    run = replicast.connect(run_dir)
    for line in sys.stdin:
        update = replicast.Update.load(Path(line.strip()))
        start = time.monotonic_ns()
        receipt = run.push(update).result(RESULT_SECS)
        waited = time.monotonic_ns() - start
        print(waited, int(receipt.propose_to_applied_secs * 1e9), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
