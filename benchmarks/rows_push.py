"""The contestants of the `push-rows` table: an author outside of a job that trains, and what it waits for."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorflow as tf

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
    """The time of the author, from the update, which is made already, to its receipt; without the boundary.

    That is from the moment at which the update is stored to the one at which all workers have stopped.
    """

    pause_secs = 0.0  # In each step, without using a core.

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
            self.loop.run(self._boundary, lambda _: False)
            return lasted(0)  # the author has the time
        with ThreadPoolExecutor(1, thread_name_prefix="author") as thread:
            told = thread.submit(self._pushed)
            self.loop.run(self._boundary, lambda _: told.done())
            return lasted(int(self.figure(*told.result())))

    def _boundary(self) -> None:
        if self.pause_secs:
            time.sleep(self.pause_secs)
        self.replicas.boundary()

    def figure(self, author_ns: float, boundary_ns: float) -> float:
        return author_ns - boundary_ns

    def _pushed(self) -> tuple[float, float]:
        self.author.stdin.write(f"{self.task.directory / 'update.safetensors'}\n")
        self.author.stdin.flush()
        author_ns, boundary_ns = map(float, self.author.stdout.readline().split())
        return author_ns, boundary_ns


class Whole(Push):
    """The same with the wait for the boundary."""

    def figure(self, author_ns: float, boundary_ns: float) -> float:
        return author_ns


class PushIdle(Push):
    """While the workers wait in their steps, as for an accelerator: each core is free half of the time."""

    pause_secs = 0.004


class Handed(Push):
    """The floor: what an update needs, done by as few lines as possible.

    The same files and syncs, the same hand-overs between processes and threads, the same boundary of the
    same training, the same rows written by TensorFlow. No checks, digests, effects, ids or notes.
    """

    def setup(self) -> None:
        training = Training(self.group, STEP)
        with self.group.scope():
            self.model = weights_of(self.task, training.model)
        name = type(self).__name__
        self.loop = Loop(training, self.task.directory / f"last-{name}", self.is_source)
        self.table = self.model.parts[0].value.values[0]
        self.inbox = self.task.directory / f"{name}.inbox"
        self.events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.lane: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.gate: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.came, self.passed, self.stop_at = list[str](), 0, sys.maxsize
        self.lock = threading.Lock()
        for tasks in (self.events, self.lane):
            threading.Thread(target=self._run, args=(tasks,), daemon=True).start()
        address = f"{self.task.directory / name}"
        if self.is_source:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                author = [sys.executable, "-m", __name__, "--floor", address, str(self.inbox)]
                self.author = subprocess.Popen(
                    [sys.executable, bootstrap.__file__, str(os.getpid()), *author],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                found = [listener.accept()[0] for _ in range(2)]
            by_name = {one.recv(1): one for one in found}
            self.other, self.asking = by_name[b"w"], by_name[b"a"]
            threading.Thread(target=self._asked, daemon=True).start()
        else:
            self.other = socket.socket(socket.AF_UNIX)
            while self.other.connect_ex(address):
                time.sleep(0.01)
            self.other.sendall(b"w")
        threading.Thread(target=self._read, daemon=True).start()

    def check(self, rounds: int) -> None:
        """There is nothing to compare."""

    def arrange(self, index: int) -> None:
        self.loop.reset()
        self.came.clear()
        self.stop_at = sys.maxsize
        if self.is_source:
            self.update(index).save(self.task.directory / "update.safetensors")
        self.indices = tf.constant(self.task.indices(index))
        self.rows = tf.constant(self.task.rows(index))

    def _boundary(self) -> None:
        if self.pause_secs:
            time.sleep(self.pause_secs)
        with self.lock:
            self.passed += 1
            step, stops = self.passed, self.passed >= self.stop_at
        if stops:
            self.events.put(lambda: self._tell(f"stands {step}"))
            if self.gate.get():  # Otherwise the other worker has passed this boundary: this one follows it.
                self.table.scatter_add(tf.IndexedSlices(self.rows, self.indices))
                self.stop_at = sys.maxsize
                self.lane.put(lambda: self.events.put(lambda: self._tell("applied")))

    def _run(self, tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            tasks.get()()

    def _tell(self, word: str) -> None:
        """Tells the coordinator, which is in the loop of the source."""
        if self.is_source:
            self._came(word)
        else:
            self.other.sendall(word.ljust(32).encode())

    def _read(self) -> None:
        while word := self.other.recv(32, socket.MSG_WAITALL).decode().strip():
            self.events.put(lambda word=word: (self._came if self.is_source else self._told)(word))  # type: ignore[misc]

    def _asked(self) -> None:
        while self.asking.recv(1):
            self.content = self.inbox.read_bytes()
            self.events.put(lambda: self._order("prepare"))

    def _order(self, word: str) -> None:
        self.other.sendall(word.ljust(32).encode())
        self._told(word)

    def _told(self, word: str) -> None:
        """An order, in the loop of each worker."""
        if word == "prepare":
            self.lane.put(self._prepare)
        elif word == "stop":
            with self.lock:
                self.stop_at = self.passed + 1
            self._tell(f"at {self.stop_at}")
        elif word == "go":
            self.gate.put(True)
        else:
            with self.lock:
                is_early = self.stop_at <= self.passed < int(word.removeprefix("meet "))
                self.stop_at = int(word.removeprefix("meet "))
            if is_early:
                self.gate.put(False)

    def _prepare(self) -> None:
        if not self.is_source:
            self.inbox.read_bytes()
        self.events.put(lambda: self._tell("prepared"))

    def _came(self, word: str) -> None:
        """An answer, in the loop of the source: what both have said is done, and the next thing follows."""
        self.came.append(word)
        if word.startswith("at "):
            steps = [int(one.removeprefix("at ")) for one in self.came if one.startswith("at ")]
            if len(steps) == 2:
                self._order(f"meet {max(steps)}")
        elif self.came.count(word) < 2:
            return
        elif word == "prepared":
            self.lane.put(lambda: self._written(self._write_payload, lambda: self._order("stop")))
        elif word.startswith("stands "):
            self.boundary_ns += time.monotonic_ns()
            self.lane.put(lambda: self._written(self._write_line, lambda: self._order("go")))
        elif word == "applied":
            self.lane.put(lambda: self.asking.sendall(f"{self.boundary_ns:>20}".encode()))

    def _written(self, write: Callable[[], None], then: Callable[[], None]) -> None:
        write()
        self.events.put(then)

    def _write_payload(self) -> None:
        write_durably(self.task.directory / "payload.safetensors", [self.content])
        self.boundary_ns = -time.monotonic_ns()

    def _write_line(self) -> None:
        with (self.task.directory / "log.jsonl").open("ab") as file:
            file.write(b"x" * 500)
            file.flush()
            os.fsync(file.fileno())


class HandedIdle(Handed):
    """The same while the workers wait in their steps."""

    pause_secs = PushIdle.pause_secs


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
    """The author: pushes the file of each line, and prints how long it and the workers waited, in ns."""
    run = replicast.connect(run_dir)
    for line in sys.stdin:
        update = replicast.Update.load(Path(line.strip()))
        start = time.monotonic_ns()
        run.push(update).result(RESULT_SECS)
        waited = time.monotonic_ns() - start
        timings = run.show(update.id).timings
        print(waited, int(1e9 * (timings["apply"][0] - timings["prepare"][1])), flush=True)


def floor(address: str, inbox: Path) -> None:
    """The author of `Handed`."""
    with socket.socket(socket.AF_UNIX) as job:
        job.connect(address)
        job.sendall(b"a")
        for line in sys.stdin:
            content = Path(line.strip()).read_bytes()
            start = time.monotonic_ns()
            write_durably(inbox, [content])
            job.sendall(b"x")
            boundary_ns = job.recv(20, socket.MSG_WAITALL).decode()
            print(time.monotonic_ns() - start, boundary_ns, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--floor":
        floor(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1])
