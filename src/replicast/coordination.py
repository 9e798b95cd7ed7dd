"""Words between workers: a small key-value store that every worker of the job sees.

MultiWorkerMirroredStrategy already runs such a service, in worker 0; `ServiceCoordination` is the only place
that calls it. `MemoryCoordination` is its twin for N threads that play N workers.
"""

from __future__ import annotations

import abc
import threading
from typing import Any

from replicast.errors import JobFailed


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
    """

    def __init__(self) -> None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        self._errors = tf.errors
        self._context: Any = context.context()

    def put(self, key: str, value: str) -> bool:  # noqa: D102
        try:
            self._context.set_config_key_value(key, value)
        except self._errors.AlreadyExistsError:
            return False
        except self._errors.OpError as error:
            raise self._service_gone(error) from error
        return True

    def get(self, key: str, timeout_secs: float) -> str | None:  # noqa: D102
        milliseconds = max(1, int(timeout_secs * 1000))  # 0 would mean: for ever
        try:
            return str(self._context.get_config_key_value(key, timeout_in_ms=milliseconds))
        except self._errors.DeadlineExceededError:
            return None
        except self._errors.OpError as error:
            raise self._service_gone(error) from error

    def delete(self, key: str) -> None:  # noqa: D102
        try:
            self._context.delete_config_key_value(key)
        except self._errors.NotFoundError:
            return
        except self._errors.OpError as error:
            raise self._service_gone(error) from error

    def abort(self, message: str) -> None:  # noqa: D102
        self._context.abort_collective_ops(self._errors.ABORTED, message)

    @staticmethod
    def _service_gone(error: Exception) -> JobFailed:
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
