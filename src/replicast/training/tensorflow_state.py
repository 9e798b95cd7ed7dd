"""The state on this worker: the variables of what a user gives to `Replicas`, and how edits change them.

Each variable has a stable name:

    a Keras 3 model or layer          the variables' paths
    a tf_keras model or layer         the variables' names
    tf.Module, tf.train.Checkpoint    the attributes on the shortest way to a variable: `encoder/layers/0/w`.
                                      Models and optimizers on the way add the names that they give
    a dict                            its keys

The variables of the optimizer are `optimizer/...`, whatever its own name is; those of an optimizer in another
attribute have the name of that attribute as their prefix. A duplicate name gets a number: `optimizer/kernel`,
`optimizer/kernel#2`.

What is not part of the state, and why, is in the schema's hints. An update that names it is refused with
the hint: constants, a learning rate that a schedule of tf_keras computes, sums to which each replica adds
its part.

A variable of a strategy has one component per local replica, each on its device; any other one is its only
component. An edit changes every component. What is read, saved and sent is that of the first replica, or the
mean of a variable of which each replica keeps its own value (`local`). What is digested is every component:
the digest of a variable whose components differ has one part for each, with commas between them, and equals
no other digest (`update/audit_report.py`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from replicast.errors import NotSupported
from replicast.mapped_memory import ALIGNMENT
from replicast.training.rows import is_written_by_rows
from replicast.training.variables import (
    ReplicatedVariable,
    components,
    global_seed_generator,
    held_optimizers,
    is_distributed,
    tf_variable,
    unused_name,
)
from replicast.update.digest import begun_digest, digest_array, digest_state, name_of
from replicast.update.edits import DTYPES, FLOAT_DTYPES, Edit, EditKind, Kind, Variable, factor_as, grouped
from replicast.update.schema import Arrays, Held, Schema, State, of_replicas, touched_parts

_NO_MOMENT = "average"  # what an optimizer keeps with `use_ema`: weights, not moments of gradients
_LOOK_SHARE = 1000  # looking for changes of the model takes at most this part of the time of a training
_RATE_SECS = 0.25
# Dtypes for which Python's buffer protocol has no format.
_NOT_IN_BUFFERS = frozenset({tf.bfloat16.as_numpy_dtype, tf.float16.as_numpy_dtype})
_SLICE_ELEMENTS = 2**20  # of a table, at a time

GLOBAL_SEED = "keras_random/seed_generator_state"  # exists once a step draws without a seed


class Changes(NamedTuple):
    new: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    optimizers: bool = False


class NamedVariable(NamedTuple):
    """A variable of the state. `variable` is one of Keras 3, of TensorFlow, or of one of its strategies."""

    name: str
    variable: Any
    kind: Kind
    slots: tuple[tuple[str, float], ...] = ()


class Source:
    """What a user gave to `Replicas`. For the training thread."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model = model
        self._optimizer = optimizer
        self.is_keras_3 = isinstance(model, keras.layers.Layer)
        self.is_tf_keras = not self.is_keras_3 and isinstance(model, _tf_keras("layers.Layer"))
        problem, remedy = "", "Pass a Keras model, a tf.Module, a tf.train.Checkpoint, or a dict of variables"
        if isinstance(model, Mapping):
            named = (keras.Variable, tf.Variable, tf.Tensor)
            if not model or not all(isinstance(k, str) and isinstance(v, named) for k, v in model.items()):
                problem = "a dict that does not map names to variables"
                remedy = "Pass one such as {'w': variable}; for nested ones, a tf.Module"
        elif not (self.is_keras_3 or self.is_tf_keras or isinstance(model, tf.Module | tf.train.Checkpoint)):
            problem = f"a {type(model).__name__}"
        if problem:
            raise NotSupported(f"Replicas of {problem}", reason="its variables have no names", remedy=remedy)
        # Held, so that no other object can have the identity of one of them.
        self._known: dict[str, Any] = {}
        self._held: list[Any] = []
        self._look_at = 0.0
        self._rate_at, self._rate_after = 0.0, -1

    @property
    def is_built(self) -> bool:
        if self.is_keras_3 or self.is_tf_keras:
            # Keras' own `build` of a subclassed model says that it is built, and makes no variables.
            return bool(self.model.built and self.model.weights)
        return any(isinstance(variable, tf.Variable | keras.Variable) for _, variable in self._weights())

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope it was created."""
        if (self.is_keras_3 or self.is_tf_keras) and hasattr(self.model, "distribute_strategy"):
            found = self.model.distribute_strategy
        else:
            behind = (tf_variable(variable) for _, variable in self._weights())
            distributed = (one for one in behind if isinstance(one, tf.distribute.DistributedValues))
            found = next((one.distribute_strategy for one in distributed), None)
        return tf.distribute.get_strategy() if found is None else found

    def optimizers(self) -> dict[str, Any]:
        first = getattr(self.model, "optimizer", None) if self._optimizer is None else self._optimizer
        held: Mapping[str, Any] = {}
        if self.is_keras_3:
            held = held_optimizers(self.model)
        elif not self.is_tf_keras and not isinstance(self.model, Mapping):
            held = {path: one for path, one in _parts(self.model) if _is_optimizer(one)}
        named = {"optimizer": first, **{name: one for name, one in held.items() if one is not first}}
        return {name: one for name, one in named.items() if _is_optimizer(one)}

    def build_optimizers(self) -> None:
        """Creates the variables of optimizers that have none yet. All workers call it, in the scope."""
        trainable = [variable for _, variable in self._weights() if getattr(variable, "trainable", False)]
        for optimizer in self.optimizers().values():
            if hasattr(optimizer, "build"):
                if not getattr(optimizer, "built", False):  # that of tf_keras looks itself
                    optimizer.build(trainable)
            else:
                optimizer._create_all_weights(trainable)  # private: a legacy one of tf_keras has no `build`
            steered = isinstance(optimizer, keras.optimizers.Optimizer) and steer(optimizer)
            if steered and hasattr(self.model, "train_function"):
                self.model.train_function = None  # one that was traced before does not read the variable

    def variables(self) -> tuple[list[NamedVariable], dict[str, str]]:
        """All variables of the state, weights first; and hints, about names that are not variables of it."""
        hints: dict[str, str] = {}
        found: dict[str, NamedVariable] = {}
        slots: dict[int, list[tuple[str, float]]] = {}
        weights = list(self._weights())
        for prefix, optimizer in self.optimizers().items():
            owned = _slots([variable for _, variable in weights], optimizer)
            for own_name, variable in _optimizer_variables(prefix, optimizer):
                name = unused_name(own_name, found)
                found[name] = NamedVariable(name, variable, "optimizer")
                if id(variable) in owned:
                    owner, fill = owned[id(variable)]
                    slots.setdefault(owner, []).append((name, fill))
            rate, steered = f"{prefix}/learning_rate", steered_rate(optimizer)
            if steered is not None:
                found[rate] = NamedVariable(rate, steered.variable, "optimizer")
            if steered is not None or rate not in found:
                hints[rate] = "The learning rate is computed by a schedule, not stored"
        of_optimizers = list(found.values())
        for own_name, variable in weights:
            if why_not := _outside_of_state(variable):
                hints[own_name] = why_not
                continue
            name = unused_name(own_name, found)
            kind: Kind = "trainable" if variable.trainable else "non_trainable"
            found[name] = NamedVariable(name, variable, kind, tuple(slots.get(id(variable), ())))
        self._known, self._held = dict(weights), list(self.optimizers().values())
        of_weights = list(found.values())[len(of_optimizers) :]
        return [*of_weights, *of_optimizers], hints

    def changes(self, now: float | None = None) -> Changes:
        """What is different from when `variables` was called.

        Looking takes the longer the more layers a model has. With a time, it looks only if that takes at most
        a thousandth of the time since it has last looked.
        """
        if now is not None and now < self._look_at:
            return Changes()
        started = time.monotonic()
        optimizers, weights = list(self.optimizers().values()), dict(self._weights())
        known = {id(variable) for variable in self._known.values()}
        there = {id(variable) for variable in weights.values()}
        new = (name for name, one in weights.items() if id(one) not in known and name != GLOBAL_SEED)
        lost = (name for name, one in self._known.items() if id(one) not in there)
        same = list(map(id, optimizers)) == list(map(id, self._held))
        self._look_at = started + _LOOK_SHARE * (time.monotonic() - started)
        return Changes(tuple(new), tuple(lost), not same)

    def rate(self, now: float, updates: int) -> float | None:
        """The learning rate of the first optimizer, for the metrics; None if it has none.

        To read it takes 20 µs, and that of a schedule ten times as long. So it is read after each update, and
        otherwise only if that takes at most a thousandth of the time since it was last read; else None.
        """
        if now < self._rate_at and updates == self._rate_after:
            return None
        # Not by the clock: on a busy machine the thread may wait in between, and the curve would have gaps.
        found, began = None, time.thread_time()
        with contextlib.suppress(Exception):  # of a user's schedule: training raises it, and says where
            rate = self._held[0].learning_rate
            found = float(np.asarray(rate(self._held[0].iterations) if callable(rate) else rate))
        self._rate_at = now + max(_RATE_SECS, _LOOK_SHARE * (time.thread_time() - began))
        self._rate_after = updates
        return found

    def _weights(self) -> Iterator[tuple[str, Any]]:
        """The names and variables, without those of optimizers; constants too, if they have a name."""
        if isinstance(self.model, Mapping):
            yield from self.model.items()
        elif self.is_keras_3 or self.is_tf_keras:
            yield from _of_keras(self.model)
        else:
            seen: set[int] = set()
            for path, part in _parts(self.model):
                own = [("", part)] if isinstance(part, tf.Variable) else []
                for name, variable in _of_keras(part) if _is_keras(part) else own:
                    if id(variable) not in seen:
                        seen.add(id(variable))
                        yield "/".join(filter(None, (path, name))), variable
            for name, value in vars(self.model).items():
                if isinstance(value, tf.Tensor):
                    yield name, value


def own_name(variable: Any) -> str:
    name = variable.path if isinstance(variable, keras.Variable) else variable.name.partition(":")[0]
    return str(name)


def _of_keras(layer: Any) -> Iterator[tuple[str, Any]]:
    for variable in {id(v): v for v in layer.variables}.values():
        yield own_name(variable), variable
    generator = global_seed_generator() if isinstance(layer, keras.layers.Layer) else None
    if generator is not None and is_distributed(generator.state):  # like the generators of layers
        yield GLOBAL_SEED, generator.state


def _parts(root: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a tf.Module or a Checkpoint, the nearest first, each once; Keras objects as a whole."""
    view, seen, row = tf.train.TrackableView(root), {id(root)}, [("", root)]
    while row:
        path, part = row.pop(0)
        if part is not root:
            yield path, part
        if part is root or not (_is_keras(part) or _is_optimizer(part) or isinstance(part, tf.Variable)):
            for name, child in view.children(part).items():
                if id(child) not in seen:
                    seen.add(id(child))
                    row.append((f"{path}/{name}" if path else name, child))


def _tf_keras(name: str) -> Any:
    """A class of tf_keras; an empty tuple, which nothing is an instance of, if the script does not use it."""
    found: Any = sys.modules.get("tf_keras")
    for part in name.split("."):
        found = getattr(found, part, None)
    return () if found is None else found


def _is_keras(part: Any) -> bool:
    return isinstance(part, (keras.layers.Layer, _tf_keras("layers.Layer")))


def _is_optimizer(one: Any) -> bool:
    kinds = (_tf_keras("optimizers.Optimizer"), _tf_keras("optimizers.legacy.Optimizer"))
    return isinstance(one, keras.optimizers.Optimizer) or any(isinstance(one, kind) for kind in kinds)


def _outside_of_state(value: Any) -> str:
    """Why something with a name is not a variable of the state; empty if it is one."""
    if not isinstance(value, keras.Variable | tf.Variable):
        return "it is a constant, which nothing can change; make it a tf.Variable"
    behind = tf_variable(value)
    if behind.dtype.name not in DTYPES or not behind.shape.is_fully_defined():
        return f"updates cannot change a variable of dtype {behind.dtype.name} and shape {behind.shape}"
    on_read = behind.synchronization == tf.VariableSynchronization.ON_READ
    if on_read and behind.aggregation == tf.VariableAggregation.SUM:
        return (
            "it is a sum to which each replica adds its part, as the state of a metric; such parts differ "
            "from replica to replica, and are not part of the state"
        )
    return ""


# The variables of optimizers, and to which weight each belongs.


def _optimizer_variables(prefix: str, optimizer: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(optimizer, "inner_optimizer", None)
    theirs = {} if inner is None else {id(v): v for _, v in _optimizer_variables(prefix, inner)}
    if inner is not None:
        yield from _optimizer_variables(prefix, inner)
    within = prefix if inner is None else f"{prefix}/loss_scale"
    given = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    named = [(_name_in(optimizer, variable), variable) for variable in given]
    if not isinstance(optimizer, keras.optimizers.Optimizer):  # tf_keras: its rate, the scale of a loss
        parts = ((path.rpartition("/")[2].lstrip("_"), part) for path, part in _parts(optimizer))
        named += [(name, part) for name, part in parts if isinstance(part, tf.Variable)]
    for name, variable in named:
        if id(variable) not in theirs:
            theirs[id(variable)] = variable
            yield f"{within}/{name}", variable


def _name_in(optimizer: Any, variable: Any) -> str:
    name = own_name(variable)
    if isinstance(variable, keras.Variable):
        return name.rpartition("/")[2]
    return name.rpartition(f"{optimizer.get_config().get('name')}/")[2]


def _slots(weights: Sequence[Any], optimizer: Any) -> dict[int, tuple[int, float]]:
    """The weight that each slot variable of an optimizer belongs to, and its initial value.

    Only the names of the slot variables, which contain the weight's, tell which weight that is.
    """
    trainable = (variable for variable in weights if getattr(variable, "trainable", False))
    named = grouped((own_name(variable).replace("/", "_"), variable) for variable in trainable)
    longest_first = sorted(named, key=len, reverse=True)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = float(getattr(inner, "initial_accumulator_value", 0.0))
    seen: Counter[str] = Counter()
    owned: dict[int, tuple[int, float]] = {}
    for _, variable in _optimizer_variables("", inner):
        last = _name_in(inner, variable).replace("/", "_")
        for flat in longest_first:
            # Keras 3: kernel_momentum, a legacy optimizer: kernel/m, tf_keras: m/kernel.
            kind = last.removeprefix(f"{flat}_")
            if kind == last:
                kind = last.removesuffix(f"_{flat}")
            if kind != last:
                # If several weights have the same name, their slots are in the same order.
                weight = named[flat][seen[last] % len(named[flat])]
                seen[last] += 1
                if kind != _NO_MOMENT:
                    owned[id(variable)] = (id(weight), accumulated if kind == "accumulator" else 0.0)
                break
    return owned


# A learning rate that a schedule or a function computes, as one variable of the state.
#
#     optimizer/learning_rate >= 0    this rate, in place of what the schedule computes
#     optimizer/learning_rate = -f    f times what the schedule computes; at the start -1, the schedule itself
#
# So `assign` replaces the schedule by a value, `scale` scales whichever of the two is in force, and a revert,
# or `assign` of -1, gives the schedule back. The variable is agreed, journaled, saved and restored like all
# others. It belongs to the job and not to the optimizer: files that Keras writes are as without replicast.
# The schema's hint of the same name says that there is a schedule: without one, a rate below 0 is refused.

THE_SCHEDULE = -1.0


class SteeredRate:
    """The learning rate of one optimizer, in place of its method: it reads the variable in every step."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self.variable = keras.Variable(THE_SCHEDULE, trainable=False, dtype="float32", name="learning_rate")

    def __call__(self) -> tf.Tensor:
        computed = tf.convert_to_tensor(self._compute())
        steered = tf.cast(self.variable.value, computed.dtype)
        return tf.where(steered < 0, -steered * computed, steered)  # 1 times a number has its bits


def steered_rate(optimizer: Any) -> SteeredRate | None:
    """The rate of an optimizer that `steer` was called with, if a schedule or a function computes it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = vars(inner).get("_get_current_learning_rate")
    return rate if isinstance(rate, SteeredRate) else None


def steer(optimizer: keras.optimizers.Optimizer) -> bool:
    """Makes a computed learning rate part of the state, once. Returns whether its steps must be traced again.

    All workers call it, in the scope of their strategy.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Private: there is no public way to ask whether a rate is stored, or to replace what computes it without
    # replacing the schedule, which would change the files that Keras writes.
    if isinstance(inner._learning_rate, keras.Variable) or steered_rate(inner) is not None:
        return False
    inner._get_current_learning_rate = SteeredRate(inner._get_current_learning_rate)
    return True


# The values of these variables on this worker, and how edits change them.


class TensorFlowState(State):
    def __init__(self, variables: Iterable[NamedVariable], hints: Mapping[str, str]) -> None:
        named = list(variables)
        # Of our own class: one of TensorFlow looks for an unknown attribute in its value, which may be a sum
        # over all workers.
        self._tables = {
            one.name: one.variable
            for one in named
            if isinstance(tf_variable(one.variable), ReplicatedVariable)
        }
        self._components = {one.name: components(one.variable) for one in named}
        described = []
        for name, _, kind, slots in named:
            one = self._components[name][0]
            described.append(Variable(name, tuple(map(int, one.shape)), one.dtype.name, kind, slots))
        self.schema = Schema(described, hints)
        longest = max(self._components.values(), key=len, default=())
        self.devices = tuple(one.device.rpartition("device:")[2] for one in longest if len(longest) > 1)
        # Of which each replica keeps its own value, because the variable says so.
        on_read = tf.VariableSynchronization.ON_READ
        self.local = frozenset(v.name for v in named if tf_variable(v.variable).synchronization == on_read)
        # By replica, then by name.
        self._handles = [
            {
                name: (each[place].handle, each[place].dtype)
                for name, each in self._components.items()
                if place < len(each)
            }
            for place in range(max(1, len(longest)))
        ]
        self._begun = {
            name: begun_digest(np.dtype(each[0].dtype.as_numpy_dtype), each[0].shape)
            for name, each in self._components.items()
        }
        every = [one for each in self._components.values() for one in each]
        self._on_accelerator = any("CPU" not in one.device for one in every)

    def apply(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            _change(self._components[edit.variable], edit)

    def digest_later(self, edits: Sequence[Edit]) -> Callable[[], str]:
        # As in `hold`: what was read stays as it is.
        whole, rows = touched_parts(edits)
        held = [
            {name: self._value(name, place) for name in whole if name in handles}
            | {f"{name}[rows]": self._rows(name, rows[name], place) for name in rows if name in handles}
            for place, handles in enumerate(self._handles)
        ]

        def digest() -> str:
            found: list[str] = []
            for parts in held:
                arrays = {name: as_array(tensor) for name, tensor in parts.items()}
                parts.clear()  # training needs no other memory for a variable that nobody holds any more
                found += [digest_state(arrays)] if arrays or not found else []
            return of_replicas(found)

        return digest

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        names = [*names]
        found = self._digests_of(names, 0)
        for place, handles in enumerate(self._handles[1:], 1):
            others = self._digests_of([name for name in names if name in handles], place)
            found.update({name: f"{found[name]},{other}" for name, other in others.items()})
        if not self.devices:
            return found
        return {name: of_replicas(digest.split(",")) for name, digest in found.items()}

    def _digests_of(self, names: Sequence[str], place: int) -> dict[str, str]:
        if self._on_accelerator:  # copied to the host one at a time
            return {name: digest_array(as_array(self._value(name, place))) for name in names}
        # Prepare everything before the first byte is hashed: hashing megabytes evicts all other code and data
        # from the processor's cache, which would be fetched again for each variable.
        by_rows = self.written_by_rows()
        begun = [
            (name, self._begun[name].copy(), None if name in by_rows else bytes_of(self._value(name, place)))
            for name in names
        ]
        for name, hasher, content in begun:
            if content is not None:
                hasher.update(content)
                continue
            for _, rows in self._slices(name, place):
                hasher.update(bytes_of(rows))
        return {name: hasher.hexdigest() for name, hasher, _ in begun}

    def written_by_rows(self) -> frozenset[str]:
        return frozenset(name for name, variable in self._tables.items() if is_written_by_rows(variable))

    def _slices(self, name: str, place: int) -> Iterator[tuple[slice, tf.Tensor]]:
        """All rows of a table, slice by slice: a table that is written by rows is copied by every read."""
        table = self._components[name][place]
        size = int(table.shape[0])
        rows = max(1, _SLICE_ELEMENTS * size // max(1, table.shape.num_elements()))
        for start in range(0, size, rows):
            part = slice(start, min(size, start + rows))
            yield part, self._rows(name, np.arange(part.start, part.stop), place)

    def snapshot(self, buffers: Arrays, replica: int | None = None) -> None:
        by_rows, place = self.written_by_rows(), replica or 0
        for name, (_, dtype) in self._handles[place].items():
            if name not in buffers:
                shape = [int(size) for size in self._components[name][place].shape]
                buffers[name] = np.empty(shape, dtype.as_numpy_dtype)
            if name in by_rows:
                for part, rows in self._slices(name, place):
                    np.copyto(buffers[name][part], as_array(rows))
            else:
                value = self._joint(name) if replica is None else self._value(name, place)
                np.copyto(buffers[name], as_array(value))

    def restore_snapshot(self, buffers: Arrays, replica: int = 0) -> None:
        for name, value in buffers.items():
            # Copy one at a time: assigning may take over the memory, which training would then change.
            edit = Edit(EditKind.ASSIGN, name, {"value": np.array(value)})
            _change(self._components[name][replica : replica + 1], edit)

    def _value(self, name: str, place: int = 0) -> tf.Tensor:
        # `read_value` returns the same tensor, but takes five times as long.
        handle, dtype = self._handles[place][name]
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)

    def _joint(self, name: str) -> tf.Tensor:
        """The value that stands for those of all local replicas."""
        each = self._components[name]
        if name in self.local and len(each) > 1 and each[0].dtype.name in FLOAT_DTYPES:
            return tf.reduce_mean(tf.stack([self._value(name, place) for place in range(len(each))]), 0)
        return self._value(name)

    def _rows(self, name: str, indices: npt.NDArray[np.int64], place: int = 0) -> tf.Tensor:
        return self._components[name][place].sparse_read(tf.constant(indices))

    def read(self, names: Iterable[str], devices: Sequence[str] = ()) -> Arrays:
        # Other threads may call this while a step runs: TensorFlow reads a variable under its lock, and the
        # result is its value between two assignments, because the next assignment uses other memory. Only if
        # an optimizer writes rows of a table (sparse gradients) may some rows be a step older than others.
        if not devices:
            return {name: np.array(as_array(self._joint(name))) for name in names}
        places = [self.devices.index(device) for device in devices]
        return {key: np.array(as_array(self._value(key, at))) for key, at in zip(names, places, strict=True)}

    def read_rows(self, name: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.array(as_array(self._rows(name, indices)))

    def hold(self, whole: Iterable[str], rows: Mapping[str, npt.NDArray[np.int64]]) -> Held:
        # No copy of whole variables: as in `read`, a tensor that was read keeps its memory, and assignments
        # use other memory from then on.
        tensors = {name: self._joint(name) for name in whole}
        parts = {name: self._rows(name, indices) for name, indices in rows.items()}
        return lambda: (
            {name: as_array(tensor) for name, tensor in tensors.items()},
            {name: as_array(tensor) for name, tensor in parts.items()},
        )


def as_array(tensor: tf.Tensor) -> npt.NDArray[Any]:
    """The values of a tensor. Those of a CPU tensor are not copied, so do not write to them."""
    dtype = tensor.dtype.as_numpy_dtype  # faster to compare than TensorFlow's dtypes
    if "CPU" not in tensor.device or dtype is np.bool_:
        return np.asarray(tensor.numpy())
    if dtype in _NOT_IN_BUFFERS:  # of two bytes each
        tensor = tf.bitcast(tensor, tf.uint16)
    if tensor.shape.num_elements() == 0:
        return np.empty(tensor.shape, dtype)
    return np.asarray(memoryview(tensor)).view(dtype)


def bytes_of(tensor: tf.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy if possible."""
    if tensor.dtype.as_numpy_dtype in _NOT_IN_BUFFERS or not tensor.shape.num_elements():
        return as_array(tensor).reshape(-1).view(np.uint8).data
    return memoryview(tensor).cast("B")


def as_tensor(array: npt.NDArray[Any]) -> tf.Tensor:
    """A tensor with these values, in the same memory if TensorFlow can use it.

    `assign` then takes ownership of the memory: nothing else may use it.
    """
    shared = array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if array.size == 0 or array.dtype == bool or not shared:
        return tf.constant(array)
    if name_of(array.dtype) == "bfloat16":  # numpy's DLPack export does not support it
        return tf.bitcast(as_tensor(array.view(np.uint16)), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _change(variables: Sequence[tf.Variable], edit: Edit) -> None:
    """Applies one edit to each, with TensorFlow operations that give the same bits as `apply_edit`.

    All share the memory of the edit's values: TensorFlow copies it before it writes to what two hold.
    """
    arrays = {name: as_tensor(array) for name, array in edit.arrays.items() if name != "indices"}
    for variable in variables:
        with tf.device(variable.device) if len(variables) > 1 else contextlib.nullcontext():
            _change_one(variable, edit, arrays)


def _change_one(variable: tf.Variable, edit: Edit, arrays: Mapping[str, tf.Tensor]) -> None:
    if "indices" in edit.arrays:
        indices = tf.constant(edit.arrays["indices"].astype(np.int64))
    match edit.operation:
        case EditKind.ADD:
            variable.assign_add(arrays["value"], read_value=False)
        case EditKind.ASSIGN:
            variable.assign(arrays["value"], read_value=False)
        case EditKind.SCALE:
            variable.assign(variable.read_value() * _number(variable, edit), read_value=False)
        case EditKind.BLEND:
            current = variable.read_value()
            step = (arrays["value"] - current) * _number(variable, edit)
            variable.assign(current + step, read_value=False)
        case EditKind.ADD_ROWS:
            added = variable.sparse_read(indices) + arrays["rows"]
            variable.scatter_update(tf.IndexedSlices(added, indices))
        case EditKind.ASSIGN_ROWS:
            variable.scatter_update(tf.IndexedSlices(arrays["rows"], indices))
        case EditKind.ADD_LOW_RANK:
            a, b = arrays["a"], arrays["b"]
            for rank in range(a.shape[1]):
                variable.assign_add(a[:, rank : rank + 1] * b[rank : rank + 1, :], read_value=False)
        case EditKind.RESET:
            variable.assign(tf.fill(variable.shape, _number(variable, edit)), read_value=False)
        case EditKind.RESET_ROWS:
            rows = tf.fill((len(edit.arrays["indices"]), *variable.shape[1:]), _number(variable, edit))
            variable.scatter_update(tf.IndexedSlices(rows, indices))


def _number(variable: tf.Variable, edit: Edit) -> tf.Tensor:
    # Not from the Python number: TensorFlow caches tensors of Python numbers, and confuses -0.0 with 0.0.
    return tf.constant(factor_as(0.0 if edit.factor is None else edit.factor, variable.dtype.as_numpy_dtype))
