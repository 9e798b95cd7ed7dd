"""The variables of a job: TensorFlow's, with the conversions of a variable of one process.

TensorFlow's distributed variables do not support `float()` or `int()` and have no handle between steps,
because they may have several values in one process. Here each worker has one value, so these operations are
well defined. They are local: reading a variable never waits for another worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

# Private: Keras keeps the generator of unseeded draws under a name of its global state, which no public
# function reads or sets.
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

# Private: the classes of a strategy's variables, how one is saved, and whether a model without them is being
# exported; there is no public way to subclass them or to ask.
from tensorflow.python.distribute import values_util
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable, _SyncOnReadSaveable

# Private: a variable that bypasses creators; in a scope, `tf.Variable` would create one of the strategy.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from replicast.errors import NotSupported, ReplicastError, logger
from replicast.training.graphs import per_worker

_ARGUMENTS = ("trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")
_LONGEST = 1000  # a longer list or dict holds data, not optimizers; a step that uses one in it is refused


class _Converted:
    """The conversions to Python and NumPy types that TensorFlow's variables of one process have.

    Except `bool()`, which TensorFlow itself applies to distributed variables instead of `is not None`.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]


class ReplicatedVariable(_Converted, MirroredVariable):
    """A variable with the same value on every worker: weights, optimizer variables, seeds."""

    @property
    def handle(self) -> Any:
        """The resource on this worker; TensorFlow has none between steps, so a gradient tape fails there."""
        return self._primary.handle

    written_by_rows = False  # whether an optimizer writes single rows of it: see `rows.py`

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """These rows, without reading the others. Unlike a gather from a tensor, it takes no int16."""
        indices = tf.convert_to_tensor(indices)
        indices = tf.cast(indices, tf.int32) if indices.dtype == tf.int16 else indices
        return self._primary.sparse_read(indices, name)


class SummedVariable(_Converted, SyncOnReadVariable):
    """A variable to which each worker adds separately: the state of a metric.

    It is either whole (each worker holds the total of all workers) or in parts (whose sum is the total). A
    Keras step and an assignment between steps leave it whole, so reading it is local; a custom step leaves
    parts, and reading it is a transfer. Which of the two applies is stored in a variable too, because the
    graph of a step runs many times after its trace, with other steps in between.
    """

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None) -> None:
        super().__init__(strategy, values, aggregation, var_policy)
        self.in_keras_step = False  # a step that sums what the workers add to this variable, is traced or run
        with tf.init_scope(), tf.device(self._primary.device):
            self._whole = ResourceVariable(True, trainable=False, name="whole")

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self._between_steps():
            self.mark_whole()
            return self._primary.assign(value, *args, **kwargs)
        return super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which refuses it between steps; here the value is added to the total once."""
        if self._between_steps():
            return self._primary.assign_add(self._once(value), *args, **kwargs)
        return super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which refuses it between steps; here it is subtracted from the total once."""
        if self._between_steps():
            return self._primary.assign_sub(self._once(value), *args, **kwargs)
        return super().assign_sub(value, *args, **kwargs)

    def mark_whole(self) -> None:
        self._whole.assign(True, read_value=False)

    def zero_unless_whole(self, value: tf.Tensor) -> tf.Tensor:
        """The value if each worker holds the total; zeros if each holds a part."""
        return tf.where(self._whole, value, tf.zeros_like(value))

    def refuse_parts(self, owner: str) -> None:
        """Fails if each worker holds a part: only a sum of parts is the state of the job."""
        message = (
            f"{owner} was updated in strategy.run and then in a Keras step: call its reset_state() between."
        )
        tf.debugging.Assert(self._whole.read_value(), [message])

    def total(self, sum_parts: Callable[[], Any]) -> Any:
        """The value if it is whole; else the sum of the parts, which is a transfer."""
        if tf.executing_eagerly() or values_util.is_saving_non_distributed():
            with tf.init_scope():
                whole = bool(self._whole.numpy())
            return self._primary.read_value() if whole else sum_parts()
        return tf.cond(self._whole, self._primary.read_value, sum_parts)

    def _between_steps(self) -> bool:
        in_step = self._distribute_strategy.extended.in_run()
        return not in_step and not values_util.is_saving_non_distributed()

    def _in_custom_step(self) -> bool:
        strategy = self._distribute_strategy
        return strategy.size > 1 and strategy.extended.in_run() and not self.in_keras_step

    def _once(self, value: Any) -> Any:
        """The value to add on this worker; if the variable is in parts, zeros except on worker 0."""
        if self.aggregation != tf.VariableAggregation.SUM or self._distribute_strategy.rank == 0:
            return value
        return self.zero_unless_whole(tf.convert_to_tensor(value, self.dtype))

    def _part(self) -> tf.Tensor:
        """This worker's part. A total is divided equally as in TensorFlow; integers go to worker 0."""
        value, strategy = self._primary.read_value(), self._distribute_strategy
        if self.aggregation != tf.VariableAggregation.SUM:
            return value
        if self.dtype.is_floating:
            share = value / tf.cast(strategy.size, self.dtype)
        else:
            share = tf.where(per_worker(strategy.rank == 0), value, tf.zeros_like(value))
        return tf.where(self._whole, share, value)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if self._in_custom_step():
            # Only once the data exists: a step that finds no data left must change nothing.
            with tf.control_dependencies([value] if tf.is_symbolic_tensor(value) else []):
                self._primary.assign(self._part(), read_value=False)
                self._whole.assign(False, read_value=False)
        return super()._update_replica(update_fn, value, **kwargs)

    def _get(self) -> Any:
        return self._part() if self._in_custom_step() else super()._get()

    def value(self) -> Any:
        return self._part() if self._in_custom_step() else super().value()

    def _get_cross_replica(self) -> Any:
        return self.total(super()._get_cross_replica)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        def saveable(name: str = self.name) -> _Total:
            return _Total(self, name)

        return dict.fromkeys(super()._gather_saveables_for_checkpoint(), saveable)


class _Total(_SyncOnReadSaveable):
    """Saves and restores the total of a `SummedVariable`. TensorFlow would restore a part on each worker."""

    def __init__(self, variable: SummedVariable, name: str) -> None:
        super().__init__(variable, name)
        self._variable = variable

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        return self._variable.assign(restored_tensors[0])


def replicated(variable: Any) -> Any:
    """Converts a variable of a strategy to our class; returns any other variable unchanged."""
    kind = {MirroredVariable: ReplicatedVariable, SyncOnReadVariable: SummedVariable}.get(type(variable))
    if kind is None:
        return variable
    return kind(variable.distribute_strategy, variable.values, variable.aggregation)


# Variables that a model creates while its step is traced.
#
# Under a strategy, Keras builds a model by calling it on a symbolic batch. That fails for a model without
# `call`, and for one whose `train_step` calls it on something other than the data. Without a strategy,
# Keras does not try: the first step creates what is missing. Here, Keras' attempt may fail, and variables
# that the first step then creates become variables of the job, as if they had been created in
# `strategy.scope()`.


@contextlib.contextmanager
def may_fail(scope: Any) -> Iterator[None]:
    """Wraps the scope in which Keras tries to build a model; if that fails, the first step builds it.

    A mistake in the model or the data is raised again when the step is traced, as in plain Keras.
    """
    try:
        with scope:
            yield
    except (ReplicastError, tf.errors.OpError):
        raise  # the job has failed, not the attempt
    except Exception as error:
        logger.debug("The first step will build the model: %s", error)


def creator_in_scope(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A variable creator that creates variables in the strategy's scope, also while tracing."""

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if tf.executing_eagerly() and tf.distribute.has_strategy():
            return next_creator(**kwargs)
        initial_value = kwargs["initial_value"]
        if isinstance(initial_value, tf.Tensor) and not hasattr(initial_value, "numpy"):
            initial_value = tf.get_static_value(initial_value)
        given = {name: kwargs[name] for name in _ARGUMENTS if kwargs.get(name) is not None}
        with tf.init_scope():
            inside = tf.distribute.has_strategy()
            with contextlib.nullcontext() if inside else strategy.scope():
                return tf.Variable(initial_value, **given)

    return create


def creating_in_scope(strategy: tf.distribute.Strategy, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a replica function so that it creates variables in the strategy's scope."""

    def creating(*args: Any, **kwargs: Any) -> Any:
        with tf.variable_creator_scope(creator_in_scope(strategy)):
            return function(*args, **kwargs)

    return creating


def is_built(model: Any) -> bool:
    """Whether all variables of the model and its metrics exist, as far as can be told."""
    # Private: Keras checks the same three before it builds a model: without `call`, only its layers are.
    own = type(model).call not in (keras.layers.Layer.call, keras.Model.call)
    parts = [*model._flatten_layers(include_self=own), model._compile_metrics, model._compile_loss]
    return all(part is None or part.built for part in parts)


def trace_once(step: Callable[..., Any], args: Any) -> None:
    """Traces a step once and discards the graph, so that the variables it creates exist.

    The real trace needs to know the metrics and statistics before it starts. Nothing is computed here. A step
    that runs eagerly may not be traceable; it then creates its variables when it runs.
    """
    try:
        tf.function(step, autograph=False).get_concrete_function(*args)
    except Exception as error:
        if not tf.executing_eagerly():
            raise
        logger.debug("The step will create its variables when it runs: %s", error)


def tf_variable(variable: Any) -> Any:
    """TensorFlow's variable, or that of a strategy, behind a variable of Keras 3; any other one itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def components(variable: Any) -> tuple[Any, ...]:
    """The TensorFlow variables behind a variable on this worker: one for each local replica."""
    value = tf_variable(variable)
    return tuple(value.values) if isinstance(value, tf.distribute.DistributedValues) else (value,)


def component(variable: keras.Variable) -> tf.Variable:
    """The first one of them."""
    return components(variable)[0]


def local(variable: keras.Variable) -> tf.Tensor:
    """The value of a variable on this worker; never a transfer."""
    return component(variable).read_value()


# The optimizers of a model: its attributes, and those in its layers, lists and dicts.


def held_optimizers(model: Any) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model and of all of its layers, each once, by name.

    The one that `compile` sets is "optimizer". Others are named after their attribute, with the name of the
    layer before it, and the index in a list or the key in a dict after it: "critic_optimizer",
    "dense_1/optimizer", "optimizers/0". A duplicate name gets a number: "optimizer#2".
    """
    found: dict[str, keras.optimizers.Optimizer] = {}
    seen: dict[int, Any] = {}

    def look_inside(name: str, value: Any) -> None:
        if id(value) in seen:
            return
        if isinstance(value, keras.optimizers.Optimizer):
            seen[id(value)] = value
            found[unused_name(name, found)] = value
        elif isinstance(value, Mapping | list | tuple) and len(value) <= _LONGEST:
            seen[id(value)] = value
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                look_inside(f"{name}/{key}", item)

    look_inside("optimizer", getattr(model, "optimizer", None))
    # Private: all layers at any depth; the public `layers` are those of the first level.
    layers = [("", model), *((f"{one.name}/", one) for one in model._flatten_layers(include_self=False))]
    for prefix, holder in layers:
        for name, value in list(vars(holder).items()):
            look_inside(prefix + name.lstrip("_"), value)
    return found


def unused_name(name: str, used: Mapping[str, Any]) -> str:
    """The name, or the name with a number if it is used already: kernel, kernel#2, kernel#3."""
    unused, number = name, 1
    while unused in used:
        number += 1
        unused = f"{name}#{number}"
    return unused


# Variables created outside `strategy.scope()`: moved into the job where that is safe, else refused.


def take_over(strategy: tf.distribute.Strategy, model: Any) -> None:
    """Moves all variables of a model that were created outside the scope into the job.

    Before the first step nothing depends on the identity of these variables, so they can still become
    variables of the job, with worker 0's values. All workers call this: each moved variable is a transfer.
    """
    for optimizer in held_optimizers(model).values():
        for one in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
            if one._distribution_strategy is strategy:
                continue
            if one.built:
                raise NotSupported(
                    f"An optimizer ({type(one).__name__}) that was built outside strategy.scope()",
                    reason="it would not be the same on every worker",
                    remedy="Build it inside 'with strategy.scope():', or let fit build it",
                )
            move(strategy, one.variables)
            # Private: an optimizer stores the scope of its creation here; there is no argument for it.
            one._distribution_strategy = strategy
    move(strategy, model.metrics_variables)
    move(strategy, model.variables)


def move(strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable]) -> None:
    """Moves those of these variables into the job that are not in it, with worker 0's values."""
    for variable in variables:
        if not is_distributed(variable):
            with tf.init_scope():
                value = variable.numpy()
            with tf.variable_creator_scope(creator_in_scope(strategy)):
                # Private: Keras' constructor calls this to create the TensorFlow variable behind this one.
                variable._initialize(value)


def write_rows(handles: Iterable[Any], indices: tf.Tensor, rows: Iterable[tf.Tensor]) -> None:
    """Writes the same rows of some variables in place, which are not copied by every read from then on."""
    for handle, values in zip(handles, rows, strict=True):
        tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=indices, updates=values)
        tf.raw_ops.DisableCopyOnRead(resource=handle)


def is_distributed(variable: keras.Variable) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)


# The generator of unseeded draws, which all workers share.


def global_seed_generator() -> Any:
    """The generator of this thread from which Keras draws without a seed; None before the first draw."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


@contextlib.contextmanager
def sharing_seed_generator(strategy: Any) -> Iterator[Callable[[Callable[..., Any]], Any]]:
    """Yields a function that wraps a step, so that its unseeded draws come from the caller's generator.

    Keras has one generator for each thread, and TensorFlow runs a step in a new thread. Each trace of a step
    would make a generator of its own, which TensorFlow refuses from the second trace on.
    """
    shared = global_seed_generator()

    def wrap(step: Callable[..., Any]) -> Any:
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def drawing(*args: Any, **kwargs: Any) -> Any:
            nonlocal shared
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _Joining(strategy, shared))
            try:
                return step(*args, **kwargs)
            finally:
                found = global_seed_generator()
                shared = found.generator if isinstance(found, _Joining) else found

        return drawing

    try:
        yield wrap
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, shared)


class _Joining:
    """Stands for the generator until a step draws from it: only then must it be part of the job.

    All workers trace the same step, but perhaps only one of them has drawn before. As in plain Keras, a new
    generator takes its seed from Python's `random` at its first draw, not earlier: another order would give
    other initial weights.
    """

    def __init__(self, strategy: Any, generator: Any) -> None:
        self._strategy = strategy
        self.generator = generator

    def next(self, ordered: bool = True) -> Any:
        if self.generator is None or not is_distributed(self.generator.state):
            if self.generator is None:
                with tf.variable_creator_scope(creator_in_scope(self._strategy)):
                    self.generator = keras.random.SeedGenerator()
            move(self._strategy, [self.generator.state])
            if self._strategy.leavings and self._strategy.rank == 0:
                logger.warning(
                    "A step draws random numbers from keras.random without a seed. The state of Keras' "
                    "global seed generator is not in the checkpoints and audits of this job's Replicas, "
                    "because it was created later: after a restart, the step draws other numbers. Make a "
                    "keras.random.SeedGenerator an attribute of the model, and pass it as seed=."
                )
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self.generator)
        return self.generator.next(ordered=ordered)
