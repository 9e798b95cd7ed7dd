"""`replicast.Strategy`: MultiWorkerMirroredStrategy as Keras 3 needs it.

Keras asks three things of a strategy, and a model's `fit` is otherwise Keras' own code:

    experimental_distribute_dataset   this worker's rows of every batch          `feeding`
    run                               the step, with the result of the batch     `step`
    reduce                            the value, which is that of the job then   `reduce`
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import keras
import tensorflow as tf

from replicast import rendezvous
from replicast.config import (
    HEARTBEAT_SECS,
    Cluster,
    heartbeat_timeout_secs,
    is_evaluator,
    read_cluster,
    start_timeout_secs,
)
from replicast.coordination import Coordination, MemoryCoordination, ServiceCoordination, unregistered_workers
from replicast.errors import ClusterError, NotSupported
from replicast.lifetime import Lifetime
from replicast.port_filter import port_limit
from replicast.training import feeding
from replicast.training.collectives import REGISTER_SECS, ReplicatedExtended, sum_through_shared_memory
from replicast.training.graphs import Functions, Step
from replicast.training.keras_call import (
    Trainer,
    keras_call,
    keras_scales_a_loss,
    model_to_build,
    only_looks_at_shapes,
    predicting_model,
)
from replicast.training.rows import read_by_rows
from replicast.training.step import Agreed, KerasStep, fed_as_by_keras
from replicast.training.variables import (
    SummedVariable,
    creating_in_scope,
    held_optimizers,
    is_built,
    may_fail,
    take_over,
    trace_once,
)
from replicast.training.writing import Callbacks, Writing, report_from_first_worker, write_once

_SIGACTION_BYTES = 512  # more than a `struct sigaction` has anywhere


# The job of a strategy, as `Replicas` needs it: who the workers are, and how they reach each other.
#
#     replicast.Strategy                     is a `StrategyJob` itself, and offers what only its `fit` can
#     a stock MultiWorkerMirroredStrategy    is given a `StockJob`: its coordination service runs already
#     MirroredStrategy, no strategy          are given one too: a job of one worker

_NOT_SERVED = ("ParameterServerStrategy", "TPUStrategy", "CentralStorageStrategy")


class StrategyJob:
    """The workers of a job, seen from one of them. `join` makes it one."""

    # How long this worker has waited for others within steps, if that is known.
    waited_secs: Callable[[], float] | None = None
    # The current epoch of `fit`, if it is known: the shuffle of arrays follows from it.
    epoch: int | None = None

    def join(self, cluster: Cluster | None, transfers_started: Callable[[], int], **watched: Any) -> None:
        """`watched` is for its `Lifetime`."""
        self._rank, self._size = (0, 1) if cluster is None else (cluster.rank, cluster.size)
        # Whether this process is the evaluator in `TF_CONFIG`, and no worker: see `Replicas.follow`.
        self.is_evaluator = is_evaluator(os.environ)
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
        self.lifetime = Lifetime(self.coordination, self._rank, self._size, transfers_started, **watched)
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
            self.lifetime.before_leaving(act, always)
        else:
            atexit.register(always)
            atexit.register(act)  # the last one registered is the first one called

    scope: Any  # that of the strategy

    @staticmethod
    def wait_for_device() -> None:
        """Blocks until the devices have finished all operations; a CPU has when a call returns."""
        if tf.config.list_logical_devices("GPU"):
            tf.test.experimental.sync_devices()


class StockJob(StrategyJob):
    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        # The workers that it has connected, whatever told it of them: TF_CONFIG, Slurm.
        resolver: Any = strategy.cluster_resolver if several else None
        tasks = {} if resolver is None else resolver.cluster_spec().as_dict()
        chiefs, workers = tasks.get("chief", []), tasks.get("worker", [])
        if len(chiefs) + len(workers) < 2:
            self.join(None, lambda: 0)
            return
        rank = resolver.task_id + (0 if resolver.task_type == "chief" else len(chiefs))
        self.join(Cluster((*chiefs, *workers), rank, len(chiefs)), self._keys_drawn)

    def _keys_drawn(self) -> int:
        # Private: the counters from which TensorFlow draws a key for each transfer, when a step is called.
        table = self.strategy.extended._collective_keys._instance_key_table
        return sum(count for devices in list(table.values()) for count in list(devices.values()))

    def scope(self) -> Any:
        # The default strategy has a scope too, but entering it inside another one is refused.
        is_default = self.strategy is tf.distribute.get_strategy()
        return contextlib.nullcontext() if is_default else self.strategy.scope()


def job_of(strategy: tf.distribute.Strategy) -> StrategyJob:
    """The job of a strategy: always the same one."""
    if isinstance(strategy, StrategyJob):
        return strategy
    if any(name in kind.__name__ for name in _NOT_SERVED for kind in type(strategy).__mro__):
        raise NotSupported(
            f"A {type(strategy).__name__}",
            reason="the workers hold no copy of its variables that they can change bit for bit",
            remedy="Use tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.MirroredStrategy or "
            "replicast.Strategy, whose replicas all have every variable",
        )
    cluster = read_cluster(os.environ)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and cluster and cluster.size > 1:
        raise NotSupported(
            f"A model of a strategy of one process, or of none, in a job of {cluster.size} workers",
            reason="its variables are not the same on every worker",
            remedy="Create it inside 'with strategy.scope():' of a replicast.Strategy or a "
            "tf.distribute.MultiWorkerMirroredStrategy",
        )
    return _stock_job(strategy)


_stock_job = functools.cache(StockJob)


def _connect(
    strategy: tf.distribute.Strategy,
    cluster: Cluster | None,
    options: tf.distribute.experimental.CommunicationOptions | None,
) -> tuple[ReplicatedExtended, float]:
    """Meets the other workers, and lets TensorFlow connect them; returns the heartbeat timeout too.

    Afterwards TensorFlow's port accepts only trusted networks.
    """
    limit_port = port_limit(cluster, os.environ)
    heartbeat_secs = HEARTBEAT_SECS
    if cluster is not None and cluster.size > 1:
        timeout_secs, own_heartbeat = start_timeout_secs(os.environ), heartbeat_timeout_secs(os.environ)
        heartbeat_secs = rendezvous.meet(cluster, timeout_secs, sys.stderr.write, own_heartbeat)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if is_evaluator(os.environ):  # that one would connect it with the workers
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    options = options or tf.distribute.experimental.CommunicationOptions()
    # TensorFlow connects the workers in one call that holds Python's lock until all of them are connected: no
    # thread and no signal handler of Python runs meanwhile. It takes less than a second, unless a worker or
    # its host is lost just then. Before it connects, TensorFlow installs a handler of SIGTERM of its own,
    # which ends nothing. So what SIGTERM did before is put back; not with the module `signal`, which can do
    # this in the main thread only, and only for its own handlers. And Ctrl-C ends the process at once: Python
    # would only hear of it when the call has failed, in the middle of making TensorFlow's error.
    libc = ctypes.CDLL(None)
    old_sigterm, old_sigint = (ctypes.create_string_buffer(_SIGACTION_BYTES) for _ in range(2))
    libc.sigaction(signal.SIGTERM, None, old_sigterm)
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    default = bytes(_SIGACTION_BYTES) if python_handles and cluster is not None and cluster.size > 1 else None
    libc.sigaction(signal.SIGINT, None, old_sigint)
    try:
        libc.sigaction(signal.SIGINT, default, None)  # SIG_DFL is 0; None changes nothing
        extended = ReplicatedExtended(strategy, resolver, options, heartbeat_secs)
    except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError) as error:
        if cluster is None:
            raise
        missing = [one for one in unregistered_workers(str(error), cluster.chiefs) if one < cluster.size]
        names = ", ".join(f"worker {worker} ({cluster.addresses[worker]})" for worker in missing)
        raise ClusterError(
            f"All workers had met, but TensorFlow could not connect worker {cluster.rank} with {names} "
            f"within {REGISTER_SECS:.0f} s",
            remedy="A process or a host was lost or stopped just then: start all workers again",
        ) from error
    finally:
        libc.sigaction(signal.SIGTERM, old_sigterm, None)
        libc.sigaction(signal.SIGINT, old_sigint, None)
    limit_port()
    return extended, heartbeat_secs


class Strategy(StrategyJob, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers, one replica each, with Keras 3 or a custom training loop.

    Reads the workers from `TF_CONFIG`; without it, the same script runs as a job with one worker. Create the
    strategy before you use anything else of TensorFlow. Blocks until all workers have created it, at most
    `REPLICAST_START_TIMEOUT` seconds (an hour), and says after 10 s which workers are missing. Later, a
    worker that sends no heartbeat for `REPLICAST_HEARTBEAT_TIMEOUT` seconds (10) is lost, and the job ends.

    Example:
        strategy = replicast.Strategy()
        with strategy.scope():
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=128)

    `batch_size` is the global batch size: each worker takes its rows of every batch. Give all workers the
    same data.
    """

    def __init__(
        self,
        *,
        all_reduce: Literal["auto", "tensorflow"] = "auto",
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
    ) -> None:
        """Joins the job.

        Args:
            all_reduce: How steps sum gradients and metrics over the workers. "auto": through shared memory if
                all workers are on one host and compute on CPUs, otherwise with TensorFlow's collectives.
                "tensorflow": always with those.
            communication_options: As for `tf.distribute.MultiWorkerMirroredStrategy`.
        """
        if all_reduce not in ("auto", "tensorflow"):
            raise ValueError(f'all_reduce must be "auto" or "tensorflow". Received: {all_reduce!r}')
        if keras.backend.backend() != "tensorflow":
            raise ClusterError(
                "replicast needs Keras on the TensorFlow backend",
                received=f"backend {keras.backend.backend()!r}",
                remedy="Set KERAS_BACKEND=tensorflow before you import keras",
            )
        cluster = read_cluster(os.environ)
        extended, heartbeat_secs = _connect(self, cluster, communication_options)
        # Skips MultiWorkerMirroredStrategy's constructor, which would create its own `extended`.
        super(tf.distribute.MultiWorkerMirroredStrategy, self).__init__(extended)
        read_by_rows()
        # How steps sum over the workers: the same on all of them.
        self.all_reduce: Literal["shared memory", "tensorflow"] = "tensorflow"
        self.join(
            cluster,
            extended.transfers_started,
            heartbeat_secs=heartbeat_secs,
            trained_alone=_a_model_was_trained,
        )
        self._writing = Writing(self.lifetime)
        self._callbacks = Callbacks(self._writing)
        self._inputs = feeding.Inputs(self)
        self._functions = Functions(self.lifetime, extended.keys)
        if self.size > 1:
            write_once(self._writing)
            report_from_first_worker(self.rank)
            extended.next_turn = self.lifetime.take_turn
            exchange = sum_through_shared_memory(extended, self.lifetime, wanted=all_reduce == "auto")
            if exchange is not None:
                self.all_reduce = "shared memory"
                self.waited_secs = lambda: exchange.waited_secs

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of workers; 1 inside a step of a Keras model, because the step itself combines them.

        Keras divides a loss by it, but not every loss: one that a function returns as a scalar, or that a
        custom `train_step` computes, would be multiplied by the number of workers. Outside of steps, a loss
        is one scalar for all workers, and Keras gets 1 as well.
        """
        between_steps = tf.distribute.in_cross_replica_context() and keras_scales_a_loss()
        return 1 if self.extended.alone or between_steps else int(self.extended._num_replicas_in_sync)

    def scope(self) -> Any:
        """As in TensorFlow. Keras also enters it to build a model, which may fail: see `may_fail`."""
        scope, model = super().scope(), model_to_build()
        if model is None:
            return scope
        take_over(self, model)
        return may_fail(scope)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on this worker's replica; see `tf.distribute.Strategy.run`.

        A step of a Keras model has the result of the whole batch: see `replicast.training.step`.
        """
        # The step of a model that a script has decorated with `tf.function`: Keras compiles it anyway.
        method: Any = getattr(getattr(fn, "python_function", None), "__wrapped__", None)
        owner = getattr(getattr(method, "__self__", None), "target", None)  # TensorFlow's stand-in for `self`
        if isinstance(owner, Trainer):
            fn = types.MethodType(method.__func__, owner)
        model, predicting = getattr(fn, "__self__", None), predicting_model()
        step, is_step = fn, predicting is None and isinstance(model, Trainer)
        compared = fn if predicting is None else predicting.predict_step
        traced = self._traced(compared, args) if self.size > 1 else None
        if is_step:
            self._refuse_what_cannot_work(model)
            if self.size == 1:
                step = fed_as_by_keras(model, fn)
            else:
                if not is_built(model):
                    trace_once(functools.partial(super().run, creating_in_scope(self, fn)), (args,))
                step = KerasStep(self.extended, model, fn)
        elif predicting is not None and self.size > 1:
            step = feeding.predicting_all_rows(fn)
        if is_step or predicting is not None:
            step = creating_in_scope(self, step)
        outputs = super().run(step, args, kwargs, options)
        self._functions.compare(traced, outputs)
        return keras.tree.map_structure(Agreed, outputs) if is_step and self.size > 1 else outputs

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def _traced(self, fn: Any, args: Any) -> Step | None:
        """The step that is traced from here on; None if it is executed."""
        model, name = getattr(fn, "__self__", None), getattr(fn, "__name__", type(fn).__name__)
        if not isinstance(model, Trainer):
            return Step.begin(f"function {name!r} in strategy.run", getattr(fn, "__qualname__", name), args)
        # Keras keeps what it makes of `train_step` in `train_function`, until the model is compiled again.
        function = getattr(model, f"{name.removesuffix('_step')}_function", None)
        return Step.begin(f"{name} of {getattr(model, 'name', type(model).__name__)!r}", function, args)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces over the workers; see `tf.distribute.Strategy.reduce`.

        If Keras reduces a whole batch only to get its shapes, returns the local part.
        """
        if isinstance(value, Agreed):
            return value.value
        if isinstance(value, SummedVariable):
            return value.total(functools.partial(super().reduce, reduce_op, value, axis))
        if isinstance(value, (tuple, list, dict)) and only_looks_at_shapes():
            return keras.tree.map_structure(lambda part: self.experimental_local_results(part)[0], value)
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns this worker's share of every batch of `dataset`.

        If the options of a dataset ask for sharding by file or by hint, TensorFlow distributes it. If they
        turn sharding off, the user has divided the data, and Keras trains on its batches as they are.
        """
        call = keras_call()
        if call is not None:
            self._refuse_what_cannot_work(call.model)
            self._warn_of_losses(call.model)
            if self.size > 1:
                self._callbacks.prepare(call.callbacks, call.method)
            for tell in self.on_fit if call.method == "fit" else ():
                tell(call.model, call.callbacks)
        if isinstance(dataset, feeding.Share):
            return dataset
        if call is not None and (arrays := self._inputs.share_of_arrays(call)) is not None:
            return arrays
        policies = tf.data.experimental.AutoShardPolicy
        policy = dataset.options().experimental_distribute.auto_shard_policy
        divided = policy == policies.OFF
        if policy in (policies.FILE, policies.HINT) or (divided and call is None):
            return super().experimental_distribute_dataset(dataset, options)
        if call is None:
            return self._inputs.share_of_loop(dataset)
        # Not distributed by TensorFlow: it splits every batch, while Keras counts the user's batches, so
        # `fit` would use only a part of the data.
        return self._inputs.share_of_batches(dataset, call, divided=divided)

    def see_compiled(self, model: keras.Model) -> None:
        """Called at least once with each model that is compiled in the scope."""
        # Private: a model stores the scope of its creation here; there is no argument for it. A model that
        # was created outside, such as a clone, and is compiled inside joins the job.
        if model._distribute_strategy is None:
            model._distribute_strategy = self
        self._warn_of_losses(model)

    def _warn_of_losses(self, model: Any) -> None:
        if self.size > 1 and self.rank == 0:
            for name, warning in feeding.losses_that_mix_rows(getattr(model, "loss", None)).items():
                self._inputs.warn_once(model, name, warning)

    def _refuse_what_cannot_work(self, model: Any) -> None:
        on_cpus = self.size > 1 and self.extended._local_device_type == "CPU"
        if getattr(model, "jit_compile", False) is True and on_cpus:
            raise NotSupported(
                "jit_compile=True",
                reason="XLA has no transfers between CPU workers",
                remedy='Compile the model with jit_compile=False (the default, "auto", does)',
            )
        take_over(self, model)


def _a_model_was_trained() -> bool:
    """Whether a model has been trained in this process.

    A model created and compiled outside the scope never reaches the strategy: it is only found afterwards.
    """
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), keras.Model)]
    return any(int(o.iterations.numpy()) > 0 for model in models for o in held_optimizers(model).values())
