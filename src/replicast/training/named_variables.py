"""The variables of what a user gives to `Replicas`, each with a stable name.

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
"""

from __future__ import annotations

import contextlib
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from replicast.errors import NotSupported
from replicast.training.variables import (
    global_seed_generator,
    held_optimizers,
    is_distributed,
    tf_variable,
    unused_name,
)
from replicast.update.edits import DTYPES
from replicast.update.schema import Kind

_NO_MOMENT = (
    "average"  # averaged weights, which an optimizer keeps with `use_ema`: weights, not moments of gradients
)
_LOOK_SHARE = 1000  # looking for changes of the model takes at most this part of the time of a training
_RATE_SECS = 0.25

GLOBAL_SEED = "keras_random/seed_generator_state"  # exists once a step draws without a seed


class Changes(NamedTuple):
    """What has changed in a model: new variables, lost ones, and whether it has new optimizers."""

    new: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    optimizers: bool = False


_UNCHANGED = Changes()


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
        """Whether its variables exist."""
        if self.is_keras_3 or self.is_tf_keras:
            return bool(self.model.built)
        return any(isinstance(variable, tf.Variable | keras.Variable) for _, variable in self._weights())

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope it was created."""
        if isinstance(self.model, keras.Model):
            found = [self.model.distribute_strategy] if self.model.distribute_strategy is not None else []
        elif self.is_tf_keras and hasattr(self.model, "distribute_strategy"):
            found = [self.model.distribute_strategy]
        else:
            behind = (tf_variable(variable) for _, variable in self._weights())
            found = [
                one.distribute_strategy for one in behind if isinstance(one, tf.distribute.DistributedValues)
            ]
        return found[0] if found else tf.distribute.get_strategy()

    def optimizers(self) -> dict[str, Any]:
        """The optimizers, by the prefix of their variables' names."""
        named: dict[str, Any] = {"optimizer": self._optimizer}
        if self._optimizer is None:
            named["optimizer"] = getattr(self.model, "optimizer", None)
        held: Mapping[str, Any] = {}
        if self.is_keras_3:
            held = held_optimizers(self.model)
        elif not self.is_tf_keras and not isinstance(self.model, Mapping):
            held = {path: one for path, one in _parts(self.model) if _is_optimizer(one)}
        named.update({name: one for name, one in held.items() if one is not named["optimizer"]})
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
        of_optimizers: list[NamedVariable] = []
        slots: dict[int, list[tuple[str, float]]] = {}
        weights = list(self._weights())
        for prefix, optimizer in self.optimizers().items():
            owned = _slots([variable for _, variable in weights], optimizer)
            for own_name, variable in _optimizer_variables(prefix, optimizer):
                name = unused_name(own_name, found)
                found[name] = NamedVariable(name, variable, "optimizer")
                of_optimizers.append(found[name])
                if id(variable) in owned:
                    owner, fill = owned[id(variable)]
                    slots.setdefault(owner, []).append((name, fill))
            rate, steered = f"{prefix}/learning_rate", steered_rate(optimizer)
            if steered is not None:
                found[rate] = NamedVariable(rate, steered.variable, "optimizer")
                of_optimizers.append(found[rate])
            elif rate not in found:
                hints[rate] = "The learning rate is computed by a schedule, not stored"
        named = []
        for own_name, variable in weights:
            if why_not := _outside_of_state(variable):
                hints[own_name] = why_not
                continue
            name = unused_name(own_name, found)
            kind: Kind = "trainable" if variable.trainable else "non_trainable"
            found[name] = NamedVariable(name, variable, kind, tuple(slots.get(id(variable), ())))
            named.append(found[name])
        self._known, self._held = dict(weights), list(self.optimizers().values())
        return [*named, *of_optimizers], hints

    def changes(self, now: float | None = None) -> Changes:
        """What is different from when `variables` was called.

        Looking takes the longer the more layers a model has. With a time, it looks only if that takes at most
        a thousandth of the time since it has last looked.
        """
        if now is not None and now < self._look_at:
            return _UNCHANGED
        started = time.monotonic()
        optimizers, weights = list(self.optimizers().values()), dict(self._weights())
        known = {id(variable) for variable in self._known.values()}
        there = {id(variable) for variable in weights.values()}
        new = [
            name for name, variable in weights.items() if id(variable) not in known and name != GLOBAL_SEED
        ]
        lost = [name for name, variable in self._known.items() if id(variable) not in there]
        same = len(optimizers) == len(self._held) and all(map(operator.is_, optimizers, self._held))
        self._look_at = started + _LOOK_SHARE * (time.monotonic() - started)
        return Changes(tuple(new), tuple(lost), not same) if new or lost or not same else _UNCHANGED

    def rate(self, now: float, updates: int) -> float | None:
        """The learning rate of the first optimizer, for the metrics; None if it has none.

        To read it takes 20 µs, and that of a schedule ten times as long. So it is read after each update, and
        otherwise only if that takes at most a thousandth of the time since it was last read; else None.
        """
        if now < self._rate_at and updates == self._rate_after:
            return None
        found = None
        with contextlib.suppress(
            Exception
        ):  # Of an own schedule: the training itself raises it, and says where.
            rate = self._held[0].learning_rate
            found = float(np.asarray(rate(self._held[0].iterations) if callable(rate) else rate))
        self._rate_at = now + max(_RATE_SECS, _LOOK_SHARE * (time.monotonic() - now))
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
                of_part = (
                    _of_keras(part)
                    if _is_keras(part)
                    else [("", part)]
                    if isinstance(part, tf.Variable)
                    else []
                )
                for name, variable in of_part:
                    if id(variable) not in seen:
                        seen.add(id(variable))
                        yield "/".join(filter(None, (path, name))), variable
            for name, value in vars(self.model).items():
                if isinstance(value, tf.Tensor):
                    yield name, value


def own_name(variable: Any) -> str:
    """The name that Keras or TensorFlow gave to a variable."""
    return (
        str(variable.path) if isinstance(variable, keras.Variable) else str(variable.name).partition(":")[0]
    )


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
    if not isinstance(
        optimizer, keras.optimizers.Optimizer
    ):  # tf_keras: the learning rate, the scale of a loss
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
    named: dict[str, list[Any]] = {}
    for variable in weights:
        if getattr(variable, "trainable", False):
            named.setdefault(own_name(variable).replace("/", "_"), []).append(variable)
    longest_first = sorted(named, key=len, reverse=True)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = float(getattr(inner, "initial_accumulator_value", 0.0))
    seen: Counter[str] = Counter()
    owned: dict[int, tuple[int, float]] = {}
    for _, variable in _optimizer_variables("", inner):
        last = _name_in(inner, variable).replace("/", "_")
        for flat in longest_first:
            # Keras 3: kernel_momentum, a legacy optimizer: kernel/m, tf_keras: m/kernel.
            kind = (
                last.removeprefix(f"{flat}_")
                if last.startswith(f"{flat}_")
                else last.removesuffix(f"_{flat}")
            )
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
