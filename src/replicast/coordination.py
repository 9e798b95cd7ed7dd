"""A small key-value store that all workers of the job share, and what all of them say, told to all.

MultiWorkerMirroredStrategy already runs such a service, in worker 0; `ServiceCoordination` is the only place
that calls it. `MemoryCoordination` is its in-memory twin, for tests in which threads act as workers.

`DirectExchange.agree` is how every answer of all workers is gathered: worker 0 reads each value once and
publishes all of them together. If every worker read the value of every other one, the number of reads would
grow with the square of the workers, and all of them go to worker 0. Its keys:

    KEY/RANK    by each worker: its value
    KEY/all     by worker 0: the values of all workers, or which of them is missing
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from replicast.errors import ClusterError, JobFailed
from replicast.processes import Deadline

# After this many timed-out waits of a worker for one key, the service is made to release them.
MAX_TIMED_OUT_WAITS = 20
CLEANUP_SECS = 30.0  # Longer than a worker may be silent before TensorFlow considers it dead.
# To learn whether a key exists. TensorFlow's client gives up after this time whether or not the service has
# answered, so a shorter one would only tell that the machine is busy.
PEEK_SECS = 0.3
_NO_VALUE = "replicast: nothing"
_RETRY_SECS = 0.005
# Nobody waits any more for a key that was not read for this long: a worker polls each key more often.
FORGET_SECS = 60.0
# A longer wait is made of several calls: during a call to the service, no signal handler of Python runs.
LOOK_SECS = 1.0
# The others wait longer than worker 0, which may have come later and has to find out who is missing.
LIST_SECS = 5.0
MOST_NAMED = 10  # How many missing workers an error names: each takes worker 0 a third of a second to find.

_TASK = r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)"
_NO_HEARTBEATS = re.compile(rf"stopped sending heartbeats\)?:?\s+{_TASK}")
_NO_ANSWER = re.compile(r"RPC: /tensorflow\.CoordinationService/Heartbeat")
_UNAVAILABLE = 14
_BROKEN = re.compile(
    rf"remote target {_TASK} while calling (?:(?!remote target).)*?grpc_status:{_UNAVAILABLE}\b", re.DOTALL
)


class Loss(NamedTuple):
    """A worker that was lost, and how TensorFlow noticed."""

    worker: int
    how: str


def lost_worker(message: str, chiefs: int = 0) -> Loss | None:
    """Returns which worker was lost, if an error message of TensorFlow says so.

    TensorFlow reports it only in the text of the message. `tests/faults/test_frozen.py` notices when that
    changes. An error that was passed on from worker to worker names all of them: the last one is its origin.
    """
    found = _NO_HEARTBEATS.search(message)
    if found is not None:
        return Loss(_rank(found, chiefs), "it sent no heartbeats")
    if _NO_ANSWER.search(message):
        return Loss(0, "it does not answer heartbeats")
    broken = list(_BROKEN.finditer(message))
    return Loss(_rank(broken[-1], chiefs), "its connection broke") if broken else None


def unregistered_workers(message: str, chiefs: int = 0) -> list[int]:
    """The workers that did not register with the service, if an error message of TensorFlow says so."""
    _, _, late = message.partition("timed out task names:")
    tasks = re.finditer(_TASK, late.partition("Additional GRPC error")[0])
    return sorted({_rank(task, chiefs) for task in tasks}) or [0]


def lost_text(lost: Loss) -> str:
    return (
        f"worker {lost.worker} was lost: {lost.how}. It has crashed, is stopped (SIGSTOP), or its host is "
        "unreachable. See its log for the first error"
    )


def _rank(task: re.Match[str], chiefs: int) -> int:
    return int(task[2]) + (0 if task[1] == "chief" else chiefs)


class Coordination(abc.ABC):
    """A put-if-absent key-value store. All methods may be called from any thread.

    A call may block without limit while worker 0, which hosts the service, is stopped (SIGSTOP).
    """

    chiefs = 0

    @abc.abstractmethod
    def put(self, key: str, value: str) -> bool:
        """Writes `value` unless the key exists; returns whether it was written."""

    @abc.abstractmethod
    def get(self, key: str, timeout_secs: float) -> str | None:
        """Blocks until the key exists, at most `timeout_secs`; returns None on timeout."""

    def peek(self, key: str) -> str | None:
        """Returns the value of a key; None if it does not exist, which takes `PEEK_SECS` to find out."""
        return self.get(key, PEEK_SECS)

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Deletes a key; no-op if it does not exist."""

    @abc.abstractmethod
    def find_lost(self, size: int) -> Loss | None:
        """Returns the first of `size` workers that the service has lost. Only on worker 0, which hosts it."""

    @abc.abstractmethod
    def abort(self, message: str) -> None:
        """Makes every current and later transfer of this worker fail with `message`."""


class ServiceCoordination(Coordination):
    """The coordination service that MultiWorkerMirroredStrategy runs.

    Private TensorFlow API: `tensorflow.python.eager.context`. There is no public way to reach the service;
    TensorFlow's own PreemptionCheckpointHandler uses the same calls. `tests/workers/test_private_apis.py`
    notices when they change.

    Timed-out waits do not leak memory on worker 0. The service keeps every timed-out wait until its key
    exists, about 15 kB each, so threads that poll a key once a second would fill its memory within days.
    After `MAX_TIMED_OUT_WAITS` of them, the key is written with a placeholder value and deleted at once,
    which releases all waits. A worker that reads the placeholder, or finds it when it writes, ignores it.
    """

    def __init__(self, context: Any = None, chiefs: int = 0) -> None:
        import tensorflow as tf

        if context is None:
            from tensorflow.python.eager import context as eager

            context = eager.context()
        self._errors = tf.errors
        self._context = context
        self.chiefs = chiefs
        self._timed_out: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: str, value: str) -> bool:
        deadline = Deadline(CLEANUP_SECS)
        while not self._insert(key, value):
            existing = self._wait_for(key, PEEK_SECS)
            if existing is not None and existing != _NO_VALUE:
                return False
            if existing == _NO_VALUE and deadline.has_passed():
                self.delete(key)  # the worker that wrote it has died
        return True

    def get(self, key: str, timeout_secs: float) -> str | None:
        deadline = Deadline(timeout_secs)
        value = self._wait_for(key, timeout_secs)
        while value == _NO_VALUE:  # another worker is releasing all waits, and deletes it at once
            self._count(key, timed_out=False)
            time.sleep(_RETRY_SECS)
            value = None if deadline.has_passed() else self._wait_for(key, deadline.left())
        if self._count(key, timed_out=value is None) and self._insert(key, _NO_VALUE):
            self.delete(key)
        return value

    def delete(self, key: str) -> None:
        with contextlib.suppress(self._errors.NotFoundError):
            self._ask(self._errors.NotFoundError, self._context.delete_config_key_value, key)

    def _count(self, key: str, *, timed_out: bool) -> bool:
        """Counts consecutive timed-out waits for a key; returns whether there are too many."""
        now = time.monotonic()
        with self._lock:
            count = self._timed_out.pop(key, (0, now))[0] + 1
            while self._timed_out and now - next(iter(self._timed_out.values()))[1] >= FORGET_SECS:
                self._timed_out.popitem(last=False)
            if timed_out and count <= MAX_TIMED_OUT_WAITS:
                self._timed_out[key] = (count, now)
            return timed_out and count > MAX_TIMED_OUT_WAITS

    def _insert(self, key: str, value: str) -> bool:
        with contextlib.suppress(self._errors.AlreadyExistsError):
            self._ask(self._errors.AlreadyExistsError, self._context.set_config_key_value, key, value)
            return True
        return False

    def _wait_for(self, key: str, timeout_secs: float) -> str | None:
        milliseconds = max(1, int(timeout_secs * 1000))  # 0 would wait without a timeout
        late = self._errors.DeadlineExceededError
        with contextlib.suppress(late):
            return str(self._ask(late, self._context.get_config_key_value, key, timeout_in_ms=milliseconds))
        return None

    def find_lost(self, size: int) -> Loss | None:
        # Elsewhere it could block for ever, and it may hold Python's lock meanwhile.
        jobs = [
            (job, tasks) for job, tasks in (("chief", self.chiefs), ("worker", size - self.chiefs)) if tasks
        ]
        states = self._ask((), self._context.get_task_states, jobs)  # by rank: None, or the task's error
        lost = (rank for rank, state in enumerate(states) if state is not None)
        return next((Loss(rank, "it sent no heartbeats") for rank in lost), None)

    def abort(self, message: str) -> None:
        self._context.abort_collective_ops(self._errors.ABORTED, message)

    def _ask(self, answer: Any, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls the service. Errors other than `answer` mean that it is gone."""
        try:
            return call(*arguments, **options)
        except answer:
            raise
        except self._errors.OpError as error:
            lost = lost_worker(str(error), self.chiefs)
            if lost is not None:
                raise JobFailed(lost_text(lost), worker=lost.worker) from error
            raise JobFailed(
                f"The coordination service, which runs in worker 0, does not answer: {error}. "
                "See worker 0's log for the first error.",
                worker=0,
            ) from error


class MemoryCoordination(Coordination):
    """The same within one process: share one `Store` among the threads that act as workers."""

    class Store:
        def __init__(self) -> None:
            self.values: dict[str, str] = {}
            self.lost: Loss | None = None
            self.changed = threading.Condition()

    def __init__(self, store: Store) -> None:
        self._store = store
        self.aborted: list[str] = []

    def put(self, key: str, value: str) -> bool:
        with self._store.changed:
            if key in self._store.values:
                return False
            self._store.values[key] = value
            self._store.changed.notify_all()
            return True

    def get(self, key: str, timeout_secs: float) -> str | None:
        with self._store.changed:
            self._store.changed.wait_for(lambda: key in self._store.values, timeout_secs)
            return self._store.values.get(key)

    def delete(self, key: str) -> None:
        with self._store.changed:
            self._store.values.pop(key, None)

    def find_lost(self, size: int) -> Loss | None:
        return self._store.lost

    def abort(self, message: str) -> None:
        self.aborted.append(message)


@dataclass(eq=False, repr=False)
class DirectExchange:
    """What workers that are all at the same line of the script say to each other. Any thread may call it.

    Every worker makes the same calls in the same order, under a name that only these calls have. Each wait
    has a deadline, and the error names the workers that are missing. About once a second it asks `has_left`
    about the worker that it waits for, which raises if the job has failed.
    """

    coordination: Coordination
    name: str
    rank: int
    size: int
    has_left: Callable[[int], bool] = lambda worker: False

    def tell(self, what: str, value: str) -> None:
        self.coordination.put(self._key(what), value)

    def hear(self, what: str, timeout_secs: float, worker: int = 0) -> str:
        """The value that a worker has told. Blocks at most `timeout_secs`."""
        value = self._value(self._key(what), worker, Deadline(timeout_secs))
        if value is None:
            raise self._late([worker], what, timeout_secs)
        return value

    def agree(self, what: str, value: str, timeout_secs: float) -> dict[int, str]:
        """Every worker gives its value and gets everyone's, by rank. Blocks until all have.

        Workers other than 0 wait some seconds longer for what worker 0 says about missing ones.
        """
        key = self._key(what)
        self.coordination.put(f"{key}/{self.rank}", value)
        if self.rank == 0:
            return self._publish(what, timeout_secs)
        told = self._value(f"{key}/all", 0, Deadline(timeout_secs + LIST_SECS))
        if told is not None:
            return _listed(told)
        # Worker 0 has not come, or came later and has not given up yet.
        deadline = Deadline(LIST_SECS)
        values: dict[int, str] = {}
        for worker in range(self.size):
            found = self.coordination.peek(f"{key}/{worker}")
            if found is None or deadline.has_passed():
                raise self._late([worker if found is None else 0], what, timeout_secs)
            values[worker] = found
        return values

    def require_same(self, what: str, value: str, timeout_secs: float, *, problem: str, remedy: str) -> None:
        """As `agree`; raises on all workers if one has another value than worker 0."""
        said = self.agree(what, value, timeout_secs)
        for worker, theirs in said.items():
            if theirs != said[0]:
                raise ClusterError(
                    f"{problem.format(worker)} worker 0",
                    remedy=remedy,
                    received=f"{theirs[:200]}, worker 0: {said[0][:200]}",
                )

    def forget_agreed(self, what: str) -> None:
        """Removes this worker's value, once all workers are known to have read it."""
        key = self._key(what)
        self.coordination.delete(f"{key}/{self.rank}")
        if self.rank == 0:
            self.coordination.delete(f"{key}/all")

    def check_nobody_left(self) -> None:
        """Raises if another worker has reached the end of its script and will not arrive here."""
        for worker in range(self.size):
            if worker != self.rank and self.has_left(worker):
                raise self._gone(worker)

    def _key(self, what: str) -> str:
        return f"replicast/{self.name}/{what}"

    def _value(self, key: str, worker: int, deadline: Deadline) -> str | None:
        while True:
            value = self.coordination.get(key, max(PEEK_SECS, deadline.left(LOOK_SECS)))
            if value is not None or deadline.has_passed():
                return value
            # What it wrote before it left has arrived by now.
            if self.has_left(worker) and self.coordination.get(key, LOOK_SECS) is None:
                raise self._gone(worker)

    def _publish(self, what: str, timeout_secs: float) -> dict[int, str]:
        """Worker 0: reads what each worker says, and tells all of them, or who is missing."""
        key, deadline, values = self._key(what), Deadline(timeout_secs), dict[int, str]()
        try:
            for worker in range(self.size):
                found = self._value(f"{key}/{worker}", worker, deadline)
                if found is None:
                    rest = range(worker + 1, self.size)
                    others = (w for w in rest if self.coordination.peek(f"{key}/{w}") is None)
                    raise self._late([worker, *itertools.islice(others, MOST_NAMED - 1)], what, timeout_secs)
                values[worker] = found
        except JobFailed as error:
            with contextlib.suppress(JobFailed):  # the service is gone
                said = json.dumps({"missing": error.worker, "problem": str(error)})
                self.coordination.put(f"{key}/all", said)
            raise
        if self.coordination.put(f"{key}/all", json.dumps({"values": list(values.values())})):
            return values
        told = self._value(f"{key}/all", 0, deadline)  # of an earlier call, which the others have read
        if told is None:
            raise self._late([0], what, timeout_secs)
        return _listed(told)

    def _late(self, missing: Sequence[int], what: str, timeout_secs: float) -> JobFailed:
        one = len(missing) == 1
        named = f"worker{'' if one else 's'} {', '.join(map(str, missing))}"
        more = " and perhaps more" if len(missing) == MOST_NAMED else ""
        return JobFailed(
            f"worker {self.rank} waited {timeout_secs:.0f} s for {named}{more}, which did not send "
            f"{'its' if one else 'their'} {what}. Every worker must make the same calls to replicast: see "
            f"{'its log' if one else 'their logs'} for the reason",
            worker=missing[0],
        )

    def _gone(self, worker: int) -> JobFailed:
        return JobFailed(
            f"worker {worker} reached the end of its script while worker {self.rank} waits for it. Every "
            "worker must make the same calls to replicast",
            worker=worker,
        )


def _listed(text: str) -> dict[int, str]:
    told = json.loads(text)
    if "missing" in told:
        raise JobFailed(told["problem"], worker=told["missing"])
    return dict(enumerate(told["values"]))
