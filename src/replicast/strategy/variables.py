"""The state of a Keras model on this worker: its variables by name, and how edits change them.

Names are Keras paths. What belongs to the optimizer is `optimizer/...` whatever the optimizer is called; an
optimizer that the model holds under another name has that name in front. A path that occurs twice gets a
number: `optimizer/kernel`, `optimizer/kernel#2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from replicast.digest import begun_digest, digest_array, digest_state
from replicast.edits import Edit, Operation, factor_as
from replicast.mapping import ALIGNMENT
from replicast.schema import Schema, Variable
from replicast.state import Arrays, State, touched_parts
from replicast.strategy.device_digest import device_digests
from replicast.strategy.optimizers import held_optimizers
from replicast.strategy.writes import component

_NOT_IN_BUFFERS = frozenset({tf.bfloat16.as_numpy_dtype, tf.float16.as_numpy_dtype})
"""What Python's buffers have no format for."""
_NO_MOMENT = "average"
"""The averaged weights that an optimizer keeps with `use_ema` are weights, not memory of gradients."""


class KerasState(State):
    """Weights, other variables and optimizer variables of a built model.

    Args:
        model: Built, with built optimizers.
        optimizers: Those that change it, by the name they have in front of their variables.
    """

    def __init__(self, model: keras.Model, optimizers: dict[str, keras.optimizers.Optimizer]) -> None:
        self._variables: dict[str, keras.Variable] = {}
        described: list[Variable] = []
        slots: dict[int, list[tuple[str, float]]] = {}
        hints: dict[str, str] = {}
        for prefix, optimizer in optimizers.items():
            owned = _slots(model, optimizer)
            for name, variable in _optimizer_variables(prefix, optimizer):
                name = self._keep(name, variable)
                described.append(_describe(name, variable, "optimizer"))
                if id(variable) in owned:
                    owner, fill = owned[id(variable)]
                    slots.setdefault(owner, []).append((name, fill))
            if f"{prefix}/learning_rate" not in self._variables:
                hints[f"{prefix}/learning_rate"] = "The learning rate is computed by a schedule, not stored"
        weights = []
        for variable in {id(v): v for v in model.variables}.values():
            name = self._keep(variable.path, variable)
            kind = "trainable" if variable.trainable else "non_trainable"
            weights.append(_describe(name, variable, kind, tuple(slots.get(id(variable), ()))))
        self.schema = Schema([*weights, *described], hints)
        components = {name: component(variable) for name, variable in self._variables.items()}
        self._handles = {name: (one.handle, one.dtype) for name, one in components.items()}
        self._begun = {
            name: begun_digest(np.dtype(one.dtype.as_numpy_dtype), one.shape)
            for name, one in components.items()
        }
        self.on_accelerator = any("CPU" not in one.device for one in components.values())
        """Whether a variable is elsewhere than in the memory of the host."""
        self.fingerprints_on_device = self.on_accelerator
        """Whether fingerprints are computed where the variables are; the same on all workers of a job."""

    def _keep(self, path: str, variable: keras.Variable) -> str:
        name, number = path, 1
        while name in self._variables:
            number += 1
            name = f"{path}#{number}"
        self._variables[name] = variable
        return name

    def apply(self, edits: Sequence[Edit]) -> None:  # noqa: D102
        for edit in edits:
            _change(component(self._variables[edit.variable]), edit)

    def digest(self, edits: Sequence[Edit]) -> str:  # noqa: D102
        whole, rows = touched_parts(edits)
        parts = {name: as_array(self._value(name)) for name in whole}
        for name, indices in rows.items():
            touched = component(self._variables[name]).sparse_read(tf.constant(indices))
            parts[f"{name}[rows]"] = as_array(touched)
        return digest_state(parts)

    def digests(self, names: Iterable[str]) -> dict[str, str]:  # noqa: D102
        if self.on_accelerator:  # each is copied to the host: one at a time
            return {name: digest_array(as_array(self._value(name))) for name in names}
        # All is prepared before the first byte is hashed: megabytes that go through the processor's cache
        # throw out the code and data of everything else, which would be fetched again for each variable.
        begun = [(name, self._begun[name].copy(), bytes_of(self._value(name))) for name in names]
        for _, hasher, content in begun:
            hasher.update(content)
        return {name: hasher.hexdigest() for name, hasher, _ in begun}

    def fingerprints(self, names: Iterable[str]) -> dict[str, str]:  # noqa: D102
        if not self.fingerprints_on_device:
            return self.digests(names)
        return device_digests({name: self._value(name) for name in names})

    def fingerprint_of(self, value: npt.NDArray[Any]) -> str:  # noqa: D102
        if not self.fingerprints_on_device:
            return digest_array(value)
        return device_digests({"value": tf.constant(value)})["value"]

    def snapshot(self, buffers: Arrays) -> None:  # noqa: D102
        for name in self._variables:
            value = as_array(self._value(name))
            if name in buffers:
                np.copyto(buffers[name], value)
            else:
                buffers[name] = np.array(value)

    def _value(self, name: str) -> tf.Tensor:
        # `read_value` gives the same tensor, and takes five times as long on its way there.
        handle, dtype = self._handles[name]
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)

    def read(self, names: Iterable[str]) -> Arrays:  # noqa: D102
        # Also for other threads, while a step runs: TensorFlow reads a variable under its lock, and what was
        # read is its value between two assignments, since whoever assigns next takes other memory. Only of
        # rows that an optimizer changes one by one (sparse gradients) some may be a step older than others.
        return {name: np.array(as_array(self._value(name))) for name in names}


def optimizers_by_name(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None
) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model by the name that goes in front of their variables.

    Args:
        model: The model.
        optimizer: One that the model does not know, of an own loop.
    """
    named = {"optimizer": optimizer if optimizer is not None else getattr(model, "optimizer", None)}
    named.update({name: one for name, one in held_optimizers(model).items() if one is not named["optimizer"]})
    return {name: one for name, one in named.items() if one is not None}


def as_array(tensor: tf.Tensor) -> npt.NDArray[Any]:
    """The values of a tensor; those of one on the CPU are not copied, so do not write to them."""
    dtype = tensor.dtype.as_numpy_dtype  # comparing these is quick; comparing TensorFlow's is not
    if "CPU" not in tensor.device or dtype is np.bool_:
        return np.asarray(tensor.numpy())
    if dtype in _NOT_IN_BUFFERS:  # of two bytes each
        tensor = tf.bitcast(tensor, tf.uint16)
    if tensor.shape.num_elements() == 0:
        return np.empty(tensor.shape, dtype)
    return np.asarray(memoryview(tensor)).view(dtype)


def bytes_of(tensor: tf.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in place where they can be."""
    if tensor.dtype.as_numpy_dtype in _NOT_IN_BUFFERS or not tensor.shape.num_elements():
        return as_array(tensor).reshape(-1).view(np.uint8).data
    return memoryview(tensor).cast("B")


def as_tensor(array: npt.NDArray[Any]) -> tf.Tensor:
    """A tensor with these values, in the same memory where TensorFlow can use it.

    `assign` then takes the memory over: it must be nobody else's.
    """
    if array.size == 0 or array.dtype == bool or not _can_be_shared(array):
        return tf.constant(array)
    if array.dtype.name == "bfloat16":  # unknown to numpy, whose arrays are taken over
        return tf.bitcast(as_tensor(array.view(np.uint16)), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _can_be_shared(array: npt.NDArray[Any]) -> bool:
    return bool(array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0)


def _change(variable: tf.Variable, edit: Edit) -> None:
    """One edit, by operations of TensorFlow that give the bits of `replicast.edits.apply_edit`."""
    arrays = {name: as_tensor(array) for name, array in edit.arrays.items() if name != "indices"}
    match edit.operation:
        case Operation.ADD:
            variable.assign_add(arrays["value"], read_value=False)
        case Operation.ASSIGN:
            variable.assign(arrays["value"], read_value=False)
        case Operation.SCALE:
            variable.assign(variable.read_value() * _number(variable, edit), read_value=False)
        case Operation.BLEND:
            current = variable.read_value()
            step = (arrays["value"] - current) * _number(variable, edit)
            variable.assign(current + step, read_value=False)
        case Operation.ADD_ROWS:
            indices = tf.constant(edit.arrays["indices"].astype(np.int64))
            added = variable.sparse_read(indices) + arrays["rows"]
            variable.scatter_update(tf.IndexedSlices(added, indices))
        case Operation.ASSIGN_ROWS:
            indices = tf.constant(edit.arrays["indices"].astype(np.int64))
            variable.scatter_update(tf.IndexedSlices(arrays["rows"], indices))
        case Operation.ADD_LOW_RANK:
            a, b = arrays["a"], arrays["b"]
            for rank in range(a.shape[1]):
                variable.assign_add(a[:, rank : rank + 1] * b[rank : rank + 1, :], read_value=False)
        case Operation.RESET:
            variable.assign(tf.fill(variable.shape, _number(variable, edit)), read_value=False)
        case Operation.RESET_ROWS:
            indices = tf.constant(edit.arrays["indices"].astype(np.int64))
            rows = tf.fill((len(edit.arrays["indices"]), *variable.shape[1:]), _number(variable, edit))
            variable.scatter_update(tf.IndexedSlices(rows, indices))


def _number(variable: tf.Variable, edit: Edit) -> tf.Tensor:
    # Not from the Python number: TensorFlow keeps tensors of those it has seen, and takes -0.0 for 0.0.
    return tf.constant(factor_as(0.0 if edit.factor is None else edit.factor, variable.dtype.as_numpy_dtype))


def _describe(
    name: str, variable: keras.Variable, kind: Any, slots: tuple[tuple[str, float], ...] = ()
) -> Variable:
    shape = tuple(int(size) for size in variable.shape)
    return Variable(name, shape, component(variable).dtype.name, kind, slots)


def _optimizer_variables(prefix: str, optimizer: Any) -> Iterator[tuple[str, keras.Variable]]:
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None:
        for variable in optimizer.variables:
            yield f"{prefix}/{variable.path.rpartition('/')[2]}", variable
        return
    yield from _optimizer_variables(prefix, inner)
    theirs = {id(v) for v in inner.variables}
    for variable in optimizer.variables:
        if id(variable) not in theirs:
            yield f"{prefix}/loss_scale/{variable.path.rpartition('/')[2]}", variable


def _slots(model: keras.Model, optimizer: Any) -> dict[int, tuple[int, float]]:
    """For each optimizer variable that remembers something of a weight: whose, and what it began with.

    Keras names them after the weight's path and says so nowhere else.
    """
    weights: dict[str, list[keras.Variable]] = {}
    for variable in model.trainable_variables:
        weights.setdefault(variable.path.replace("/", "_"), []).append(variable)
    longest_first = sorted(weights, key=len, reverse=True)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = float(getattr(inner, "initial_accumulator_value", 0.0))
    met: Counter[str] = Counter()
    owned: dict[int, tuple[int, float]] = {}
    for variable in optimizer.variables:
        last = variable.path.rpartition("/")[2]
        for flat in longest_first:
            if last.startswith(f"{flat}_"):
                kind = last[len(flat) + 1 :]
                # Weights of one path: the optimizer has gone through them in their order.
                weight = weights[flat][met[last] % len(weights[flat])]
                met[last] += 1
                if kind != _NO_MOMENT:
                    owned[id(variable)] = (id(weight), accumulated if kind == "accumulator" else 0.0)
                break
    return owned
