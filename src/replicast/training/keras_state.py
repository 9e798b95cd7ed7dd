"""The state of a Keras model on this worker: its variables by name, and how edits change them.

Names are Keras paths. The variables of the optimizer are `optimizer/...`, whatever its own name is; those of
an optimizer in another attribute of the model have the name of that attribute as their prefix. A duplicate
path gets a number: `optimizer/kernel`, `optimizer/kernel#2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
import xxhash

from replicast.mapped_memory import ALIGNMENT
from replicast.training.rows import is_written_by_rows
from replicast.training.variables import (
    component,
    global_seed_generator,
    held_optimizers,
    is_distributed,
    unused_name,
)
from replicast.update.digest import begun_digest, digest_array, digest_state, name_of
from replicast.update.edits import Edit, EditKind, factor_as
from replicast.update.schema import Schema, Variable
from replicast.update.state import Arrays, Held, State, touched_parts

# Dtypes for which Python's buffer protocol has no format.
_NOT_IN_BUFFERS = frozenset({tf.bfloat16.as_numpy_dtype, tf.float16.as_numpy_dtype})
_NO_MOMENT = (
    "average"  # averaged weights, which an optimizer keeps with `use_ema`: weights, not moments of gradients
)
# See "Digests on an accelerator" below.
_SLICE_ELEMENTS = 2**20  # of a table, at a time
CHUNK = 2**20  # elements at a time, so that the integers of a large variable take only a few megabytes
STEP = 0x9E3779B97F4A7C15
OFFSETS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
ODDS = (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
MIXINGS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_AS_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


class KerasState(State):
    """Weights, other variables and optimizer variables of a built model."""

    def __init__(self, model: keras.Model, optimizers: dict[str, keras.optimizers.Optimizer]) -> None:
        self._variables: dict[str, keras.Variable] = {}
        described: list[Variable] = []
        slots: dict[int, list[tuple[str, float]]] = {}
        hints: dict[str, str] = {}
        for prefix, optimizer in optimizers.items():
            owned = _slots(model, optimizer)
            for name, variable in _optimizer_variables(prefix, optimizer):
                name = self._add(name, variable)
                described.append(_describe(name, variable, "optimizer"))
                if id(variable) in owned:
                    owner, fill = owned[id(variable)]
                    slots.setdefault(owner, []).append((name, fill))
            if f"{prefix}/learning_rate" not in self._variables:
                hints[f"{prefix}/learning_rate"] = "The learning rate is computed by a schedule, not stored"
        weights = []
        for variable in {id(v): v for v in model.variables}.values():
            name = self._add(variable.path, variable)
            kind = "trainable" if variable.trainable else "non_trainable"
            weights.append(_describe(name, variable, kind, tuple(slots.get(id(variable), ()))))
        generator = global_seed_generator()
        if generator is not None and is_distributed(generator.state):  # like the generators of layers
            name = self._add("keras_random/seed_generator_state", generator.state)
            weights.append(_describe(name, generator.state, "non_trainable"))
        self.schema = Schema([*weights, *described], hints)
        components = {name: component(variable) for name, variable in self._variables.items()}
        self._handles = {name: (one.handle, one.dtype) for name, one in components.items()}
        self._begun = {
            name: begun_digest(np.dtype(one.dtype.as_numpy_dtype), one.shape)
            for name, one in components.items()
        }
        self.on_accelerator = any("CPU" not in one.device for one in components.values())
        self.fingerprints_on_device = self.on_accelerator  # the same on all workers of a job

    def _add(self, path: str, variable: keras.Variable) -> str:
        name = unused_name(path, self._variables)
        self._variables[name] = variable
        return name

    def apply(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            _change(component(self._variables[edit.variable]), edit)

    def digest(self, edits: Sequence[Edit]) -> str:
        return self.digest_later(edits)()

    def digest_later(self, edits: Sequence[Edit]) -> Callable[[], str]:
        # As in `hold`: what was read stays as it is.
        whole, rows = touched_parts(edits)
        parts = {name: self._value(name) for name in whole}
        for name, indices in rows.items():
            parts[f"{name}[rows]"] = self._rows(name, indices)

        def digest() -> str:
            arrays = {name: as_array(tensor) for name, tensor in parts.items()}
            parts.clear()  # training needs no other memory for a variable that nobody holds any more
            return digest_state(arrays)

        return digest

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        if self.on_accelerator:  # copied to the host one at a time
            return {name: digest_array(as_array(self._value(name))) for name in names}
        # Prepare everything before the first byte is hashed: hashing megabytes evicts all other code and data
        # from the processor's cache, which would be fetched again for each variable.
        by_rows = self.written_by_rows()
        begun = [
            (name, self._begun[name].copy(), None if name in by_rows else bytes_of(self._value(name)))
            for name in names
        ]
        for name, hasher, content in begun:
            if content is not None:
                hasher.update(content)
                continue
            for _, rows in self._slices(name):
                hasher.update(bytes_of(rows))
        return {name: hasher.hexdigest() for name, hasher, _ in begun}

    def written_by_rows(self) -> frozenset[str]:
        return frozenset(name for name, variable in self._variables.items() if is_written_by_rows(variable))

    def _slices(self, name: str) -> Iterator[tuple[slice, tf.Tensor]]:
        """All rows of a table, slice by slice: a table that is written by rows is copied by every read."""
        table = component(self._variables[name])
        size = int(table.shape[0])
        rows = max(1, _SLICE_ELEMENTS * size // max(1, table.shape.num_elements()))
        for start in range(0, size, rows):
            part = slice(start, min(size, start + rows))
            yield part, self._rows(name, np.arange(part.start, part.stop))

    def fingerprints(self, names: Iterable[str]) -> dict[str, str]:
        if not self.fingerprints_on_device:
            return self.digests(names)
        return device_digests({name: self._value(name) for name in names})

    def fingerprint_of(self, value: npt.NDArray[Any]) -> str:
        if not self.fingerprints_on_device:
            return digest_array(value)
        return device_digests({"value": tf.constant(value)})["value"]

    def snapshot(self, buffers: Arrays) -> None:
        by_rows = self.written_by_rows()
        for name, variable in self._variables.items():
            if name in by_rows:
                if name not in buffers:
                    dtype = component(variable).dtype.as_numpy_dtype
                    buffers[name] = np.empty([int(size) for size in variable.shape], dtype)
                for part, rows in self._slices(name):
                    np.copyto(buffers[name][part], as_array(rows))
            elif name in buffers:
                np.copyto(buffers[name], as_array(self._value(name)))
            else:
                buffers[name] = np.array(as_array(self._value(name)))

    def _value(self, name: str) -> tf.Tensor:
        # `read_value` returns the same tensor, but takes five times as long.
        handle, dtype = self._handles[name]
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)

    def _rows(self, name: str, indices: npt.NDArray[np.int64]) -> tf.Tensor:
        return component(self._variables[name]).sparse_read(tf.constant(indices))

    def read(self, names: Iterable[str]) -> Arrays:
        # Other threads may call this while a step runs: TensorFlow reads a variable under its lock, and the
        # result is its value between two assignments, because the next assignment uses other memory. Only if
        # an optimizer changes single rows (sparse gradients) may some rows be a step older than others.
        return {name: np.array(as_array(self._value(name))) for name in names}

    def read_rows(self, name: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.array(as_array(self._rows(name, indices)))

    def hold(self, whole: Iterable[str], rows: Mapping[str, npt.NDArray[np.int64]]) -> Held:
        # No copy of whole variables: as in `read`, a tensor that was read keeps its memory, and assignments
        # use other memory from then on.
        tensors = {name: self._value(name) for name in whole}
        parts = {name: self._rows(name, indices) for name, indices in rows.items()}
        return lambda: (
            {name: as_array(tensor) for name, tensor in tensors.items()},
            {name: as_array(tensor) for name, tensor in parts.items()},
        )


def optimizers_by_name(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None
) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model, by the prefix of their variables' names."""
    named = {"optimizer": optimizer if optimizer is not None else getattr(model, "optimizer", None)}
    named.update({name: one for name, one in held_optimizers(model).items() if one is not named["optimizer"]})
    return {name: one for name, one in named.items() if one is not None}


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


def _change(variable: tf.Variable, edit: Edit) -> None:
    """Applies one edit with TensorFlow operations that give the same bits as `apply_edit`."""
    arrays = {name: as_tensor(array) for name, array in edit.arrays.items() if name != "indices"}
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
            indices = tf.constant(edit.arrays["indices"].astype(np.int64))
            added = variable.sparse_read(indices) + arrays["rows"]
            variable.scatter_update(tf.IndexedSlices(added, indices))
        case EditKind.ASSIGN_ROWS:
            indices = tf.constant(edit.arrays["indices"].astype(np.int64))
            variable.scatter_update(tf.IndexedSlices(arrays["rows"], indices))
        case EditKind.ADD_LOW_RANK:
            a, b = arrays["a"], arrays["b"]
            for rank in range(a.shape[1]):
                variable.assign_add(a[:, rank : rank + 1] * b[rank : rank + 1, :], read_value=False)
        case EditKind.RESET:
            variable.assign(tf.fill(variable.shape, _number(variable, edit)), read_value=False)
        case EditKind.RESET_ROWS:
            indices = tf.constant(edit.arrays["indices"].astype(np.int64))
            rows = tf.fill((len(edit.arrays["indices"]), *variable.shape[1:]), _number(variable, edit))
            variable.scatter_update(tf.IndexedSlices(rows, indices))


def _number(variable: tf.Variable, edit: Edit) -> tf.Tensor:
    # Not from the Python number: TensorFlow caches tensors of Python numbers, and confuses -0.0 with 0.0.
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
    """The weight that each slot variable of an optimizer belongs to, and its initial value.

    Only the names of the slot variables, which contain the weight's path, tell which weight that is.
    """
    weights: dict[str, list[keras.Variable]] = {}
    for variable in model.trainable_variables:
        weights.setdefault(variable.path.replace("/", "_"), []).append(variable)
    longest_first = sorted(weights, key=len, reverse=True)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = float(getattr(inner, "initial_accumulator_value", 0.0))
    seen: Counter[str] = Counter()
    owned: dict[int, tuple[int, float]] = {}
    for variable in optimizer.variables:
        last = variable.path.rpartition("/")[2]
        for flat in longest_first:
            if last.startswith(f"{flat}_"):
                kind = last[len(flat) + 1 :]
                # If several weights have the same path, their slots are in the same order.
                weight = weights[flat][seen[last] % len(weights[flat])]
                seen[last] += 1
                if kind != _NO_MOMENT:
                    owned[id(variable)] = (id(weight), accumulated if kind == "accumulator" else 0.0)
                break
    return owned


# Digests on an accelerator: 16 bytes per variable are copied to the host.
#
# The bits of each element, as an integer w, and its index i in row-major order give two 64-bit numbers:
#
#     x = (w + offset) * (2 * i * step + odd)        every index has a different odd multiplier
#     x = (x ^ x >>> 32) * mixing; x = x ^ x >>> 29
#
# Each is a bijection of w, so a change of one element always changes the digest, and a change of several
# almost certainly does. The numbers are summed with wrap-around, so the result does not depend on the order
# in which the hardware adds. The name of the dtype and the shape are mixed in as in `update/digest.py`. These
# digests are not xxh3: workers of one job compare them with each other; they are not for files.


def device_digests(tensors: Mapping[str, tf.Tensor]) -> dict[str, str]:
    """Digests each tensor on its device. Equal bits give equal digests on all devices."""
    lanes = {name: _lanes(tensor) for name, tensor in tensors.items()}
    found = dict.fromkeys(tensors, "")
    # All computations start before the first result is read, and each device copies its results at once.
    for device in sorted({each.device for each in lanes.values()}):
        names = [name for name, each in lanes.items() if each.device == device]
        with tf.device(device):
            together = tf.stack([lanes[name] for name in names])
        for name, sums in zip(names, together.numpy(), strict=True):
            head = f"{tensors[name].dtype.name}{tensors[name].shape.as_list()}".encode()
            found[name] = xxhash.xxh3_128(head + sums.astype("<i8").tobytes()).hexdigest()
    return found


def _lanes(tensor: tf.Tensor) -> tf.Tensor:
    """The two sums of a tensor, as a tensor of shape [2] on the same device."""
    with tf.device(tensor.device):
        flat = tf.reshape(tensor, [-1])
        length = int(flat.shape[0])
        places = _places(tensor.device)
        sums = tf.zeros([2], tf.int64)
        for start in range(0, length, CHUNK):
            chunk = flat if length <= CHUNK else flat[start : start + CHUNK]
            begin = tf.constant(_wrapped(2 * start * STEP), tf.int64)
            # The bits of each element as a signed integer: accelerators lack operations for unsigned ones.
            bits = chunk if chunk.dtype == tf.bool else tf.bitcast(chunk, _AS_INTEGERS[chunk.dtype.size])
            sums += _lanes_of_chunk(tf.cast(bits, tf.int64), places, begin)
        return sums


@cache
def _places(device: str) -> tf.Tensor:
    """What each index of a chunk adds to the multiplier. Cached, because `tf.range` computes on the host."""
    with np.errstate(over="ignore"):
        steps = np.arange(CHUNK, dtype=np.int64) * np.int64(_wrapped(2 * STEP))
    with tf.device(device):
        return tf.identity(tf.constant(steps))


def _sums(words: tf.Tensor, places: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
    multipliers = places[: tf.size(words)] + begin
    sums = []
    for offset, odd, mixing in zip(OFFSETS, ODDS, MIXINGS, strict=True):
        mixed = (words + _wrapped(offset)) * (multipliers + _wrapped(odd))
        mixed = _shifted(mixed, 32) * tf.constant(_wrapped(mixing), tf.int64)
        sums.append(tf.reduce_sum(_shifted(mixed, 29)))
    return tf.stack(sums)


_lanes_of_chunk = tf.function(
    _sums,
    input_signature=[tf.TensorSpec(shape, tf.int64) for shape in ([None], [None], [])],
    autograph=False,
)


def _shifted(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Each number xor itself shifted right, without the sign bits that an arithmetic shift copies."""
    shifted = tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64))
    return tf.bitwise.bitwise_xor(
        numbers, tf.bitwise.bitwise_and(shifted, tf.constant((1 << (64 - bits)) - 1, tf.int64))
    )


def _wrapped(number: int) -> int:
    """A number as a signed 64-bit integer, wrapped around."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
