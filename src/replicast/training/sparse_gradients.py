"""Sums row-sparse gradients over the workers, with the slices that one process would have.

The gradient of a lookup is a list of slices: one for each index that was looked up, including repeats.
Clipping by norm, and optimizers that square gradients, use single slices. So the sum must have the slices
that one process has on the whole batch. Which slices those are depends on where the indices come from:

    ROWS      ids from the batch             the slices of all workers, concatenated
    SHARED    positions, constants           the same list on every worker, summed slice by slice
    UNIQUE    distinct ids from the batch    one slice for each index that any worker has

TensorFlow always does the first. The gradient itself does not tell these kinds apart, because ids from the
batch may happen to be equal on all workers. The graph does: how long would the list be for a batch of two
rows, and of three? TensorFlow's shape inference answers that while the step is traced, without computing
anything. Without a graph to inspect (`run_eagerly=True`, or a lookup inside the user's own `tf.function`),
the values decide: indices that are distinct, and equal on all workers, count as SHARED.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class SliceExchange:
    """How a worker exchanges tensors with all others."""

    workers: int
    all_reduce: Callable[[list[Any], list[bool]], list[Any]]
    all_gather: Callable[[tf.Tensor], tf.Tensor]


class Kind(enum.Enum):
    """How to combine the slices of several workers into those of the whole batch."""

    ROWS = enum.auto()
    SHARED = enum.auto()
    UNIQUE = enum.auto()
    UNKNOWN = enum.auto()


def one_list_if_equal(slices: tf.IndexedSlices, workers: int) -> tf.IndexedSlices:
    """Adds the workers' slices one by one if all workers have the same indices; otherwise returns them all.

    For custom training loops without `strategy.run`: the indices are equal if every worker computes the whole
    batch. Unlike `_same_on_all`, this accepts repeated indices, which a whole batch may have, and needs no
    transfer. All workers see all slices, so all decide alike.
    """
    length = tf.shape(slices.indices)[0] // workers

    def lists(parts: tf.Tensor) -> tf.Tensor:
        return tf.reshape(
            parts[: workers * length], tf.concat([[workers, length], tf.shape(parts)[1:]], axis=0)
        )

    table = lists(slices.indices)
    whole = workers * length == tf.shape(slices.indices)[0]
    values, indices = tf.cond(
        whole & tf.reduce_all(table == table[0]),
        lambda: (tf.reduce_sum(lists(slices.values), axis=0), table[0]),
        lambda: (slices.values, slices.indices),
    )
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def sum_over_workers(value: Any, exchange: SliceExchange, averaged: Sequence[bool] | None = None) -> Any:
    """The sum of a tensor, row-sparse gradient or structure of them over all workers."""
    flat = tf.nest.flatten(value)
    means = [False] * len(flat) if averaged is None else list(averaged)
    if not any(isinstance(leaf, tf.IndexedSlices) for leaf in flat):
        return tf.nest.pack_sequence_as(value, exchange.all_reduce(flat, means))
    parts = [[*_parts(leaf)] if isinstance(leaf, tf.IndexedSlices) else [(None, leaf)] for leaf in flat]
    sent = [part.values if kind is Kind.SHARED else part for leaf in parts for kind, part in leaf]
    means = [mean for leaf, mean in zip(parts, means, strict=True) for _ in leaf]
    received = iter(exchange.all_reduce(sent, means))
    sums = [[_whole(kind, part, next(received), exchange) for kind, part in leaf] for leaf in parts]
    return tf.nest.pack_sequence_as(value, [_joined(leaf) for leaf in sums])


def _parts(gradient: tf.IndexedSlices) -> Iterator[tuple[Kind, tf.IndexedSlices]]:
    """The slices of each lookup in a table that the step uses more than once."""
    if tf.executing_eagerly():
        yield Kind.UNKNOWN, gradient
        return
    origin = _without_casts(gradient.indices)
    lists = list(origin.op.inputs)[:-1] if origin.op.type == "ConcatV2" else [origin]
    if len(lists) == 1:
        yield _kind(lists[0]), gradient
        return
    lengths = [tf.size(indices) for indices in lists]
    values, indices = tf.split(gradient.values, lengths), tf.split(gradient.indices, lengths)
    for origin, own_values, own_indices in zip(lists, values, indices, strict=True):
        yield _kind(origin), tf.IndexedSlices(own_values, own_indices, gradient.dense_shape)


def _whole(kind: Kind | None, part: Any, total: Any, exchange: SliceExchange) -> Any:
    if kind is Kind.SHARED:
        return tf.IndexedSlices(total, part.indices, part.dense_shape)
    if kind is Kind.UNIQUE:
        return _one_for_each_index(total)
    if kind is Kind.UNKNOWN:
        same = _same_on_all(total.indices, tf.size(part.indices), exchange)
        values, indices = tf.cond(
            same,
            lambda: (_one_for_each_index(total).values, _one_for_each_index(total).indices),
            lambda: (total.values, total.indices),
        )
        return tf.IndexedSlices(values, indices, part.dense_shape)
    return total


def _one_for_each_index(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _same_on_all(everyones: tf.Tensor, length: tf.Tensor, exchange: SliceExchange) -> tf.Tensor:
    """Whether every worker has the same list of distinct indices; all workers get the same answer.

    Repeated indices may be ids from the batch that happen to be equal on all workers.
    """
    lengths = exchange.all_gather(tf.reshape(length, [1]))

    def lists_are_equal() -> tf.Tensor:
        lists = tf.reshape(everyones, [exchange.workers, -1])
        distinct = tf.size(tf.unique(lists[0])[0]) == tf.size(lists[0])
        return tf.reduce_all(lists == lists[0]) & distinct

    return tf.cond(tf.reduce_all(lengths == lengths[0]), lists_are_equal, lambda: tf.constant(False))


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    values, indices = (
        tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices")
    )
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


_CASTS = frozenset({"Cast", "Identity"})
_DISTINCT = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
_ASKS_FOR_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_INPUTS = frozenset({"Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "OptionalGetValue"})
_CONDITIONALS = frozenset({"If", "StatelessIf"})
_BATCH = _INPUTS | _CONDITIONALS
"""Where the rows of a batch come from: `rows.py` replaces an empty batch with a conditional."""
_ROWS_TRIED = (2, 3)
_LENGTH_TRIED = 5
"""Used for every other unknown dimension, such as the length of a sequence."""


def _kind(indices: tf.Tensor) -> Kind:
    origin = _without_casts(indices, also=("Reshape", "SelectV2"))
    if origin.op.type in _DISTINCT:
        return Kind.UNIQUE
    lengths = {_length(indices, rows) for rows in _ROWS_TRIED}
    if None in lengths or len(lengths) > 1:
        return Kind.UNKNOWN if _calls_function(origin.op) else Kind.ROWS
    sources = _sources(origin, through_shapes=False)
    if any(_calls_function(source.op) for source in sources):
        return Kind.UNKNOWN
    return Kind.ROWS if any(map(_is_batch, sources)) or _has_batch_size(origin) else Kind.SHARED


def _without_casts(tensor: tf.Tensor, also: tuple[str, ...] = ()) -> tf.Tensor:
    while tensor.op.type in _CASTS or tensor.op.type in also:
        # The last input of a selection: Keras' lookups replace negative indices.
        tensor = tensor.op.inputs[-1 if tensor.op.type == "SelectV2" else 0]
    return tensor


def _has_batch_size(indices: tf.Tensor) -> bool:
    """Whether these are constants that are repeated for each row of a batch of known size, as with `tile`."""
    if indices.shape.rank is None:
        return True
    if indices.shape.rank < 2 or indices.shape[0] not in _known_batch_sizes(indices.graph):
        return False
    if _sources(indices, through_shapes=True):
        return True
    with tf.init_scope(), tf.device("CPU:0"):
        rows = tf.compat.v1.wrap_function(functools.partial(_imported, indices, {}), [])().numpy()
    return bool((rows == rows[:1]).all())


def _known_batch_sizes(graph: Any) -> set[int]:
    """The batch sizes that are known while tracing, which user code may use as constants.

    Without 1, which is ambiguous: positions are often written as one row for the whole batch, and other
    workers may have more rows.
    """
    given = [t for op in graph.get_operations() if op.type in _BATCH for t in op.outputs if _is_batch(t)]
    return {t.shape[0] for t in given if t.shape.rank} - {None, 1}


def _is_batch(tensor: tf.Tensor) -> bool:
    captured = {id(inner) for _, inner in getattr(tensor.graph, "captures", ())}
    return tensor.op.type in _BATCH and id(tensor) not in captured


def _is_source(operation: tf.Operation) -> bool:
    """Whether the copied graph has a placeholder for this operation: an input, variable or function call."""
    return operation.type in _BATCH or operation.type == "ReadVariableOp" or _calls_function(operation)


def _calls_function(operation: tf.Operation) -> bool:
    attributes = operation.node_def.attr.values()
    return operation.type not in _CONDITIONALS and any(each.HasField("func") for each in attributes)


def _sources(tensor: tf.Tensor, *, through_shapes: bool) -> list[tf.Tensor]:
    """The tensors that a tensor is computed from."""
    found, seen, pending = [], set(), [tensor]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if _is_source(current.op):
            found.append(current)
        elif through_shapes or current.op.type not in _ASKS_FOR_SHAPES:
            pending.extend(current.op.inputs)
    return found


def _length(tensor: tf.Tensor, rows: int) -> int | None:
    """How many elements the tensor would have for a batch of `rows` rows; None if that depends on values."""
    sources = _sources(tensor, through_shapes=True)
    with tf.Graph().as_default():
        inputs = {t.name: tf.compat.v1.placeholder(t.dtype, _shape(t, rows)) for t in sources}
        try:
            copy = inputs[tensor.name] if tensor.name in inputs else _imported(tensor, inputs)
        except ValueError:  # TensorFlow cannot copy this part of the graph, so its shape is unknown
            return None
        return None if copy.shape.num_elements() is None else int(copy.shape.num_elements())


def _imported(tensor: tf.Tensor, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
    """The same tensor in another graph, computed from these inputs instead of its sources."""
    sources = {name.partition(":")[0] for name in inputs}
    return tf.graph_util.import_graph_def(_graph_def(tensor, sources), inputs, [tensor.name])[0]


def _shape(source: tf.Tensor, rows: int) -> list[int | None] | None:
    if source.shape.rank is None:
        return None
    sizes = [_LENGTH_TRIED if size is None else size for size in source.shape]
    if sizes and (source.shape[0] is None or _is_batch(source)):
        sizes[0] = rows
    return sizes


def _graph_def(tensor: tf.Tensor, sources: set[str]) -> tf.compat.v1.GraphDef:
    """The operations between the sources and a tensor, without the control inputs that `tf.function` adds."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.CopyFrom(tensor.graph.graph_def_versions)
    seen, pending = set(), [tensor.op]
    while pending:
        operation = pending.pop()
        if operation.name in seen or operation.name in sources:
            continue
        seen.add(operation.name)
        pending.extend(source.op for source in operation.inputs)
        node = graph_def.node.add()
        node.CopyFrom(operation.node_def)
        inputs = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        node.attr.pop("_class", None)  # names operations that are not copied
        node.device = ""
    return graph_def
