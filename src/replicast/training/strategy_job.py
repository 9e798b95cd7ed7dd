"""The job that a strategy makes, as `Replicas` needs it: who the workers are, and how they reach each other.

replicast.Strategy                     is a `StrategyJob` itself, and offers what only its `fit` can
a stock MultiWorkerMirroredStrategy    is given a `StockJob`: its coordination service runs already
MirroredStrategy, no strategy          are given one too: a job of one worker
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from replicast.config import HEARTBEAT_SECS, Cluster, is_evaluator, read_cluster
from replicast.coordination import Coordination, MemoryCoordination, ServiceCoordination
from replicast.errors import NotSupported
from replicast.lifetime import Lifetime

_USE = (
    "Use tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.MirroredStrategy or replicast.Strategy, "
    "whose replicas all have every variable"
)
# By the name of a class: why its variables cannot be served.
_NOT_SERVED = {
    "ParameterServerStrategy": "its variables have one value, on parameter servers, which workers change at "
    "different times: there are no replicas, and no boundary between two steps of all workers",
    "TPUStrategy": "the values of its variables are in the memory of TPU cores, which cannot be changed bit "
    "for bit from the host",
    "CentralStorageStrategy": "its variables have one value, on the CPU: there is nothing to keep equal",
}


class StrategyJob:
    """The workers of a job, seen from one of them. `join` makes it one."""

    # Whether moving statistics are the same on all workers, or each replica keeps its own.
    statistics: Literal["mean", "local"] = "local"
    # How long this worker has waited for others within steps, if that is known.
    waited_secs: Callable[[], float] | None = None
    # The current epoch of `fit`, if it is known: the shuffle of arrays follows from it.
    epoch: int | None = None

    def join(
        self,
        cluster: Cluster | None,
        transfers_started: Callable[[], int],
        *,
        heartbeat_secs: float = HEARTBEAT_SECS,
        trained_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._size = (0, 1) if cluster is None else (cluster.rank, cluster.size)
        # Whether this process is the evaluator in `TF_CONFIG`, and no worker: see `Replicas.follow`.
        self.is_evaluator = is_evaluator(os.environ)
        # How many transfers this worker has started: the same on all workers at the same line of the script.
        self.transfers_started = transfers_started
        # For each open `Replicas`, the part that lets the job leave; in the same order on all workers.
        self.leavings: list[Any] = []
        # Called at the start of every `fit` with its model, and with the callbacks as they were passed.
        self.on_fit: list[Callable[[Any, Any], None]] = []
        self._named: Counter[str] = Counter()
        # The key-value store that all workers of this job share.
        self.coordination: Coordination = MemoryCoordination(MemoryCoordination.Store())
        if cluster is not None and cluster.size > 1:
            self.coordination = ServiceCoordination(chiefs=cluster.chiefs)
        # Whether the job has failed, who has left it, and where each worker is in the script.
        self.lifetime = Lifetime(
            self.coordination,
            self._rank,
            self._size,
            transfers_started,
            heartbeat_secs=heartbeat_secs,
            trained_alone=trained_alone,
        )
        if self._size > 1:
            # Before any other code can make a call of the service, which may hang: the watcher then ends this
            # worker.
            self.lifetime.begin()

    @property
    def rank(self) -> int:
        """The rank of this worker, from 0. Worker 0 coordinates and writes the files."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._size

    def next_name(self, kind: str) -> str:
        """The next name of this kind: the same on every worker at the same line of the script."""
        self._named[kind] += 1
        return f"{kind}-{self._named[kind]}"

    def before_leaving(self, act: Callable[[], None], always: Callable[[], None]) -> None:
        """At the end of the script, calls `act`, unless the job has failed, and then `always`, in any case.

        `act` may wait for the other workers, `always` must not.
        """
        if self._size > 1:
            self.lifetime.before_leaving(act)
            self.lifetime.at_exit(always)
        else:
            atexit.register(always)
            atexit.register(act)  # the last one registered is the first one called

    scope: Any  # that of the strategy

    def wait_for_device(self) -> None:
        """Blocks until the devices have finished all operations; a CPU has when a call returns."""
        raise NotImplementedError


class StockJob(StrategyJob):
    """The job of a strategy of TensorFlow."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        cluster = _cluster_of(strategy) if several else None
        self._on_cpu = not tf.config.list_logical_devices("GPU")
        self.join(cluster, self._keys_drawn if cluster is not None else lambda: 0)

    def _keys_drawn(self) -> int:
        # Private: the counters from which TensorFlow draws a key for each transfer, when a step is called.
        table = self.strategy.extended._collective_keys._instance_key_table
        return sum(count for devices in list(table.values()) for count in list(devices.values()))

    def scope(self) -> Any:
        # The default strategy has a scope too, but entering it inside another one is refused.
        is_default = self.strategy is tf.distribute.get_strategy()
        return contextlib.nullcontext() if is_default else self.strategy.scope()

    def wait_for_device(self) -> None:
        if not self._on_cpu:
            tf.test.experimental.sync_devices()


def _cluster_of(strategy: Any) -> Cluster | None:
    """The workers that a stock strategy has connected, whatever told it of them: TF_CONFIG, Slurm."""
    resolver = strategy.cluster_resolver
    tasks = {} if resolver is None else resolver.cluster_spec().as_dict()
    chiefs, workers = tasks.get("chief", []), tasks.get("worker", [])
    if len(chiefs) + len(workers) < 2:
        return None
    first = 0 if resolver.task_type == "chief" else len(chiefs)
    return Cluster((*chiefs, *workers), first + resolver.task_id, len(chiefs))


def job_of(strategy: tf.distribute.Strategy) -> StrategyJob:
    """The job of a strategy: always the same one."""
    if isinstance(strategy, StrategyJob):
        return strategy
    for name, reason in _NOT_SERVED.items():
        if any(name in kind.__name__ for kind in type(strategy).__mro__):
            raise NotSupported(f"A {type(strategy).__name__}", reason=reason, remedy=_USE)
    cluster = read_cluster(os.environ)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and cluster and cluster.size > 1:
        is_default = "Default" in type(strategy.extended).__name__
        raise NotSupported(
            f"A model that was created {'outside the scope of a strategy' if is_default else 'in the scope'}"
            f"{'' if is_default else f' of a {type(strategy).__name__}'}, in a job of {cluster.size} workers",
            reason="its variables are not the same on every worker",
            remedy="Create it inside 'with strategy.scope():' of a replicast.Strategy or a "
            "tf.distribute.MultiWorkerMirroredStrategy",
        )
    return _stock_job(strategy)


_stock_job = functools.cache(StockJob)
