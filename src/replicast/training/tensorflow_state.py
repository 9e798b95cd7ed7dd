"""The state on this worker: named variables of TensorFlow, and how edits change them.

A variable of a strategy has one component per local replica, each on its device; any other one is its only
component. An edit changes every component. What is read, saved and sent is that of the first replica, or the
mean of a variable of which each replica keeps its own value (`local`). What is digested is every component:
the digest of a variable whose components differ has one part for each, with commas between them, and equals
no other digest (`update/audit_report.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from replicast.mapped_memory import ALIGNMENT
from replicast.training.named_variables import NamedVariable
from replicast.training.rows import is_written_by_rows
from replicast.training.variables import ReplicatedVariable, components, tf_variable
from replicast.update.digest import begun_digest, digest_array, digest_state, name_of
from replicast.update.edits import FLOAT_DTYPES, Edit, EditKind, factor_as
from replicast.update.schema import Schema, Variable
from replicast.update.state import Arrays, Held, State, of_replicas, touched_parts

# Dtypes for which Python's buffer protocol has no format.
_NOT_IN_BUFFERS = frozenset({tf.bfloat16.as_numpy_dtype, tf.float16.as_numpy_dtype})
_SLICE_ELEMENTS = 2**20  # of a table, at a time


class TensorFlowState(State):
    """The named variables of one worker, with all its replicas."""

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
        self.schema = Schema([_describe(one, self._components[one.name][0]) for one in named], hints)
        longest = max(self._components.values(), key=len, default=())
        self.devices = tuple(one.device.rpartition("device:")[2] for one in longest if len(longest) > 1)
        # Of which each replica keeps its own value, because the variable says so.
        self.local = frozenset(one.name for one in named if _is_local(one.variable))
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
        self._on_accelerator = any(
            "CPU" not in one.device for each in self._components.values() for one in each
        )

    def apply(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            _change(self._components[edit.variable], edit)

    def digest(self, edits: Sequence[Edit]) -> str:
        return self.digest_later(edits)()

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
        return (
            {name: of_replicas(digest.split(",")) for name, digest in found.items()}
            if self.devices
            else found
        )

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
            if name in by_rows:
                if name not in buffers:
                    shape = [int(size) for size in self._components[name][place].shape]
                    buffers[name] = np.empty(shape, dtype.as_numpy_dtype)
                for part, rows in self._slices(name, place):
                    np.copyto(buffers[name][part], as_array(rows))
                continue
            value = as_array(self._joint(name) if replica is None else self._value(name, place))
            if name in buffers:
                np.copyto(buffers[name], value)
            else:
                buffers[name] = np.array(value)

    def restore_snapshot(self, buffers: Arrays, replica: int = 0) -> None:
        for name, value in buffers.items():
            # Copy one at a time: assigning may take over the memory, which training would then change.
            _change(
                self._components[name][replica : replica + 1],
                Edit(EditKind.ASSIGN, name, {"value": np.array(value)}),
            )

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
        # an optimizer changes single rows (sparse gradients) may some rows be a step older than others.
        if not devices:
            return {name: np.array(as_array(self._joint(name))) for name in names}
        places = [self.devices.index(device) for device in devices]
        return {
            name: np.array(as_array(self._value(name, at))) for name, at in zip(names, places, strict=True)
        }

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


def _describe(named: NamedVariable, component: tf.Variable) -> Variable:
    shape = tuple(int(size) for size in component.shape)
    return Variable(named.name, shape, component.dtype.name, named.kind, named.slots)


def _is_local(variable: Any) -> bool:
    return bool(tf_variable(variable).synchronization == tf.VariableSynchronization.ON_READ)
