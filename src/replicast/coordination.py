"""Words between workers: a small key-value store that every worker of the job sees.

MultiWorkerMirroredStrategy already runs such a service, in worker 0; `ServiceCoordination` is the only place
that calls it. `MemoryCoordination` is its twin for N threads that play N workers.
"""

from __future__ import annotations

import abc
import re
import threading
import time
from collections import OrderedDict
from typing import Any

from replicast.errors import JobFailed

GIVEN_UP_AT_MOST = 20
"""So many questions for one key that were given up are kept by the service for each worker, then answered."""
TIDY_SECS = 30.0
"""Longer than a worker may be silent before TensorFlow takes it for dead."""
_NOTHING = "replicast: nothing"
_AGAIN_SECS = 0.005
_KEYS_COUNTED = 100


_LOST = re.compile(r"stopped sending heartbeats\)?:?\s+/job:\w+/(?:replica:\d+/)?task:(\d+)")


def lost_worker(said: str) -> int | None:
    """The worker whose heartbeats are missing, if that is what an error of TensorFlow says.

    TensorFlow tells it in words only. `tests/faults/test_frozen.py` notices when they change.
    """
    found = _LOST.search(said)
    return None if found is None else int(found[1])


class Coordination(abc.ABC):
    """A put-if-absent key-value store. All methods may be called from any thread."""

    @abc.abstractmethod
    def put(self, key: str, value: str) -> bool:
        """Writes `value` unless the key is there already; says whether it was written."""

    @abc.abstractmethod
    def get(self, key: str, timeout_secs: float) -> str | None:
        """Blocks until the key is there, at most `timeout_secs`; None when the time is up."""

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Removes a key; one that is not there is no error."""

    @abc.abstractmethod
    def abort(self, message: str) -> None:
        """Makes every transfer that is under way on this worker, or starts later, fail with `message`."""


class ServiceCoordination(Coordination):
    """The coordination service that MultiWorkerMirroredStrategy runs.

    Private TensorFlow API: `tensorflow.python.eager.context`. There is no public way to reach the service;
    TensorFlow's own PreemptionCheckpointHandler uses the same calls. `tests/workers/test_private_apis.py`
    notices when they change.

    The service keeps every question that was given up until its key is there, some 15 kB each, in worker 0:
    threads that wait for a word by asking once a second would fill its memory within days. So after some such
    questions a key is written and removed again, which answers all of them; whoever meets that value, asking
    or writing, knows that it is none.

    Args:
        context: TensorFlow's, unless given.
        tidy_secs: After so long, whoever should have removed that value must be dead.
    """

    def __init__(self, context: Any = None, tidy_secs: float = TIDY_SECS) -> None:
        import tensorflow as tf

        if context is None:
            from tensorflow.python.eager import context as eager

            context = eager.context()
        self._errors = tf.errors
        self._context = context
        self._tidy_secs = tidy_secs
        self._given_up: OrderedDict[str, int] = OrderedDict()
        self._counting = threading.Lock()

    def put(self, key: str, value: str) -> bool:  # noqa: D102
        ends = time.monotonic() + self._tidy_secs
        while not self._insert(key, value):
            there = self._ask(key, _AGAIN_SECS)
            if there is not None and there != _NOTHING:
                return False
            if there == _NOTHING and time.monotonic() > ends:
                self.delete(key)  # whoever wrote it has died since
        return True

    def get(self, key: str, timeout_secs: float) -> str | None:  # noqa: D102
        ends = time.monotonic() + timeout_secs
        value = self._ask(key, timeout_secs)
        while value == _NOTHING:  # another worker has answered all, and removes it at once
            self._count(key, given_up=False)
            time.sleep(_AGAIN_SECS)
            value = self._ask(key, ends - time.monotonic()) if time.monotonic() < ends else None
        if self._count(key, given_up=value is None) and self._insert(key, _NOTHING):
            self.delete(key)
        return value

    def delete(self, key: str) -> None:  # noqa: D102
        try:
            self._context.delete_config_key_value(key)
        except self._errors.NotFoundError:
            return
        except self._errors.OpError as error:
            raise self._service_gone(error) from error

    def _count(self, key: str, *, given_up: bool) -> bool:
        """Counts the questions for a key that were given up in a row; says whether it is one too many."""
        with self._counting:
            count = self._given_up.pop(key, 0) + 1
            if given_up and count <= GIVEN_UP_AT_MOST:
                self._given_up[key] = count
            if len(self._given_up) > _KEYS_COUNTED:
                self._given_up.popitem(last=False)  # nobody asks for it any more
            return given_up and count > GIVEN_UP_AT_MOST

    def _insert(self, key: str, value: str) -> bool:
        try:
            self._context.set_config_key_value(key, value)
        except self._errors.AlreadyExistsError:
            return False
        except self._errors.OpError as error:
            raise self._service_gone(error) from error
        return True

    def _ask(self, key: str, timeout_secs: float) -> str | None:
        milliseconds = max(1, int(timeout_secs * 1000))  # 0 would mean: for ever
        try:
            return str(self._context.get_config_key_value(key, timeout_in_ms=milliseconds))
        except self._errors.DeadlineExceededError:
            return None
        except self._errors.OpError as error:
            raise self._service_gone(error) from error

    def abort(self, message: str) -> None:  # noqa: D102
        self._context.abort_collective_ops(self._errors.ABORTED, message)

    @staticmethod
    def _service_gone(error: Exception) -> JobFailed:
        lost = lost_worker(str(error))
        if lost is not None:
            return JobFailed(
                f"worker {lost} was lost: it sent no heartbeats. It has crashed, is stopped (SIGSTOP), or "
                "its host cannot be reached. Look for the first error in its log.",
                worker=lost,
            )
        return JobFailed(
            f"The coordination service, which runs in worker 0, does not answer: {error}. "
            "Look for the first error in worker 0's log.",
            worker=0,
        )


class MemoryCoordination(Coordination):
    """The same in one process: share one `Store` among the threads that play the workers."""

    class Store:
        """What the twins of one job have in common."""

        def __init__(self) -> None:
            self.values: dict[str, str] = {}
            self.changed = threading.Condition()

    def __init__(self, store: Store) -> None:
        self._store = store
        self.aborted: list[str] = []

    def put(self, key: str, value: str) -> bool:  # noqa: D102
        with self._store.changed:
            if key in self._store.values:
                return False
            self._store.values[key] = value
            self._store.changed.notify_all()
            return True

    def get(self, key: str, timeout_secs: float) -> str | None:  # noqa: D102
        with self._store.changed:
            self._store.changed.wait_for(lambda: key in self._store.values, timeout_secs)
            return self._store.values.get(key)

    def delete(self, key: str) -> None:  # noqa: D102
        with self._store.changed:
            self._store.values.pop(key, None)

    def abort(self, message: str) -> None:  # noqa: D102
        self.aborted.append(message)
