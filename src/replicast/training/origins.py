"""What a tensor of a step comes from: rows of the batch, values that all workers share, constants, a call.

A worker computes from its own rows, and what it computes has to become what one process computes from the
whole batch. How depends on where a tensor comes from. Its value does not tell, because the rows of two
workers may happen to be equal; the graph does, while the step is traced and before anything is computed:

    gradients of a custom `train_step`   computed from this worker's rows, from gradients that were combined
                                         before, or from both: `CommonTensors`
    row-sparse gradients                 how many slices there would be for a batch of two rows, and of three:
                                         `kind_of`, which asks TensorFlow's shape inference
    what a graph takes from outside      `outside`, for the comparison of the workers' functions

All of them walk the graph backwards with `upstream`. A function that is called (a `tf.function` of the
script, a loop) is a source: what happens inside cannot be told from here, and then the values have to decide.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import tensorflow as tf

_CONDITIONALS = frozenset({"If", "StatelessIf"})
_CALLS = _CONDITIONALS | {"PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"}
_CLIPS = frozenset({"ClipByValue", "Minimum", "Maximum", "L2Loss", "Sqrt", "Rsqrt"})
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_CASTS = frozenset({"Cast", "Identity"})
_DISTINCT = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
# The gradient of `tf.nn.embedding_lookup_sparse` has one slice for each index.
_DISTINCT |= {"SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2"}
_INPUTS = frozenset({"Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "OptionalGetValue"})
_BATCH = _INPUTS | _CONDITIONALS  # `at_least_one_row` replaces an empty batch with a conditional
_ROWS_TRIED = (2, 3)
_LENGTH_TRIED = 5  # for every other unknown dimension, such as the length of a sequence


def upstream(
    tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], bool] = lambda tensor: False
) -> Iterator[tf.Tensor]:
    """These tensors and those they are computed from, each once, but nothing beyond one that `ends` the walk.

    A placeholder in a branch or loop leads to the tensor outside for which it stands.
    """
    seen, waiting = set(), [*tensors]
    while waiting:
        tensor = waiting.pop()
        place = id(tensor.graph), tensor.name
        if place not in seen:
            seen.add(place)
            yield tensor
            if not ends(tensor):
                outer = _outer(tensor)
                waiting += tensor.op.inputs if outer is None else [outer]


def in_vectorized_map() -> bool:
    """Whether the body of a `tf.vectorized_map` is traced: it has no graph of its own, but a name scope."""
    scopes = [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope().split("/")
    return any(scope.startswith("loop_body") for scope in scopes)


def outside(tensor: Any) -> Any:
    """The tensor outside of all graphs that a graph has captured, also through graphs around it."""
    while tensor is not None and tf.is_symbolic_tensor(tensor):
        tensor = _captured(tensor)
    return tensor


def tensors_in(values: Any) -> list[tf.Tensor]:
    return [tensor for tensor in tf.nest.flatten(values, expand_composites=True) if tensor is not None]


def _captured(tensor: tf.Tensor) -> Any:
    if tensor.op.type != "Placeholder":
        return None
    captures = getattr(tensor.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is tensor), None)


def _outer(tensor: tf.Tensor) -> tf.Tensor | None:
    outer = _captured(tensor)
    return outer if outer is not None and tf.is_symbolic_tensor(outer) else None


def _may_differ(tensor: tf.Tensor) -> bool:
    """Whether an operation may give each worker another value from the same inputs: data, stateful ones.

    Weights are equal on all workers.
    """
    if tensor.op.type == "Placeholder":
        return tensor.dtype != tf.resource and _outer(tensor) is None
    return tensor.op.op_def.is_stateful and tensor.op.type not in ("ReadVariableOp", "ResourceGather")


class CommonTensors:
    """The gradients of the whole batch in one step, and what was computed from them.

    Eagerly there is no graph: what an optimizer gets counts as mixed, and is averaged once more, which does
    not change a common value.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []  # so that no id and no name is used again
        self._names: set[tuple[int, str]] = set()

    def add(self, gradients: list[Any]) -> None:
        self._kept += gradients
        if not tf.executing_eagerly():
            self._names.update((id(tensor.graph), tensor.name) for tensor in tensors_in(gradients))

    def _is_common(self, tensor: tf.Tensor) -> bool:
        return (id(tensor.graph), tensor.name) in self._names

    def origin(self, gradient: Any, from_tape: bool) -> Literal["common", "mixed", "local"]:
        """What a gradient was computed from: common tensors, this worker's rows ("local"), or both."""
        if gradient is None or any(gradient is kept for kept in self._kept):
            return "common"
        if tf.executing_eagerly():
            return "local" if from_tape or not self._kept else "mixed"
        found = list(upstream(tensors_in([gradient]), self._is_common))
        from_common = [self._is_common(tensor) for tensor in found]
        if not any(_may_differ(one) for one, common in zip(found, from_common, strict=True) if not common):
            return "common"
        return "mixed" if any(from_common) else "local"

    def misses_clipping(self, gradient: Any) -> bool:
        """Whether a script has clipped what a function, loop or branch returned, and that is local."""
        near = list(upstream(tensors_in([gradient]), lambda tensor: tensor.op.type in _CALLS))
        calls = [tensor for tensor in near if tensor.op.type in _CALLS]
        if not calls or not any(tensor.op.type in _CLIPS for tensor in near):
            return False
        if any(tensor.op.type == "Placeholder" for tensor in near):  # the gradient was computed here
            return False
        behind = upstream(tensor for call in calls for tensor in call.op.inputs)
        return not any(map(self._is_common, [*near, *behind]))


def is_of_some_rows(target: Any) -> bool:
    """Whether a loss comes from a part of the rows only: of one row, or of a few, in a loop of Python."""
    found = list(
        upstream(tensors_in([target]), lambda one: one.op.type in _SHAPES or _takes_some_rows(one.op))
    )
    return any(_takes_some_rows(tensor.op) for tensor in found) and not any(map(_may_differ, found))


def _takes_some_rows(operation: tf.Operation) -> bool:
    if operation.type == "StridedSlice":
        masks = [operation.get_attr(name) & 1 for name in ("ellipsis_mask", "new_axis_mask")]
        whole = operation.get_attr("begin_mask") & 1 and operation.get_attr("end_mask") & 1
        return not any(masks) and not whole
    if operation.type == "Unpack":
        return bool(operation.get_attr("axis") == 0)
    axis = {"Split": 0, "SplitV": 2}.get(operation.type)
    return axis is not None and tf.get_static_value(operation.inputs[axis]) == 0


class SliceKind(enum.Enum):
    """How to combine the slices of several workers into those of the whole batch (`sum_over_workers`)."""

    ROWS = enum.auto()
    SHARED = enum.auto()
    UNIQUE = enum.auto()
    UNKNOWN = enum.auto()


def lookups_of(indices: tf.Tensor) -> list[tf.Tensor]:
    """The indices of each lookup that these are joined from: a step may use a table more than once."""
    origin = _without_casts(indices)
    return list(origin.op.inputs)[:-1] if origin.op.type == "ConcatV2" else [origin]


def kind_of(indices: tf.Tensor) -> SliceKind:
    """The kind of the gradient of a lookup with these indices."""
    origin = _without_casts(indices, also=("Reshape", "SelectV2"))
    if origin.op.type in _DISTINCT:
        return SliceKind.UNIQUE
    lengths = {_length(indices, rows) for rows in _ROWS_TRIED}
    if None in lengths or len(lengths) > 1:
        return SliceKind.UNKNOWN if _calls_function(origin.op) else SliceKind.ROWS
    sources = _sources(origin, through_shapes=False)
    if any(_calls_function(source.op) for source in sources):
        return SliceKind.UNKNOWN
    return SliceKind.ROWS if any(map(_is_batch, sources)) or _has_batch_size(origin) else SliceKind.SHARED


def _without_casts(tensor: tf.Tensor, also: tuple[str, ...] = ()) -> tf.Tensor:
    while tensor.op.type in _CASTS or tensor.op.type in also:
        # The last input of a selection: Keras' lookups replace negative indices.
        tensor = tensor.op.inputs[-1 if tensor.op.type == "SelectV2" else 0]
    return tensor


def _has_batch_size(indices: tf.Tensor) -> bool:
    """Whether these are constants that are repeated for each row of a batch of known size, as with `tile`."""
    if indices.shape.rank is None:
        return True
    # The batch sizes that are known while tracing may be constants in the user's code. Without 1, which is
    # ambiguous: positions are often one row for the whole batch, and other workers may have more rows.
    given = [t for op in indices.graph.get_operations() if op.type in _BATCH for t in op.outputs]
    sizes = {t.shape[0] for t in given if t.shape.rank and _is_batch(t)} - {None, 1}
    if indices.shape.rank < 2 or indices.shape[0] not in sizes:
        return False
    if _sources(indices, through_shapes=True):
        return True
    with tf.init_scope(), tf.device("CPU:0"):
        rows = tf.compat.v1.wrap_function(functools.partial(_imported, indices, {}), [])().numpy()
    return bool((rows == rows[:1]).all())


def _is_batch(tensor: tf.Tensor) -> bool:
    return tensor.op.type in _BATCH and _captured(tensor) is None


def _is_source(operation: tf.Operation) -> bool:
    """Whether the copied graph has a placeholder for this operation: an input, variable or function call."""
    return operation.type in _BATCH or operation.type == "ReadVariableOp" or _calls_function(operation)


def _calls_function(operation: tf.Operation) -> bool:
    attributes = operation.node_def.attr.values()
    return operation.type not in _CONDITIONALS and any(each.HasField("func") for each in attributes)


def _sources(tensor: tf.Tensor, *, through_shapes: bool) -> list[tf.Tensor]:
    def ends(one: tf.Tensor) -> bool:
        return _is_source(one.op) or (not through_shapes and one.op.type in _SHAPES)

    return [one for one in upstream([tensor], ends) if _is_source(one.op)]


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


def _shape(source: tf.Tensor, rows: int) -> list[int | None] | None:
    if source.shape.rank is None:
        return None
    sizes = [_LENGTH_TRIED if size is None else size for size in source.shape]
    if sizes and (source.shape[0] is None or _is_batch(source)):
        sizes[0] = rows
    return sizes


def _imported(tensor: tf.Tensor, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
    """The same tensor in another graph, computed from these inputs instead of its sources."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.CopyFrom(tensor.graph.graph_def_versions)
    sources = {name.partition(":")[0] for name in inputs}
    walked = upstream([tensor], lambda one: one.op.name in sources)
    for operation in {one.op.name: one.op for one in walked if one.op.name not in sources}.values():
        node = graph_def.node.add()
        node.CopyFrom(operation.node_def)
        data = [name for name in node.input if not name.startswith("^")]  # `tf.function` adds control inputs
        del node.input[:]
        node.input.extend(data)
        node.attr.pop("_class", None)  # names operations that are not copied
        node.device = ""
    return tf.graph_util.import_graph_def(graph_def, inputs, [tensor.name])[0]
