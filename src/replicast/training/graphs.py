"""What the graph of a step tells: what a tensor comes from, and whether all workers compute the same.

A worker computes from its own rows, and what it computes has to become what one process computes from the
whole batch. How depends on where a tensor comes from. Its value does not tell, because the rows of two
workers may happen to be equal; the graph does, while the step is traced and before anything is computed:

    gradients of a custom `train_step`   computed from this worker's rows, from gradients that were combined
                                         before, or from both: `CommonTensors`
    row-sparse gradients                 how many slices there would be for a batch of two rows, and of three:
                                         `kind_of`, which asks TensorFlow's shape inference
    the same model on all workers        operations, constants and captured tensors: `Functions`

The first two walk the graph backwards with `upstream`. A function that is called (a `tf.function` of the
script, a loop) is a source: what happens inside cannot be told from here, and then the values have to decide.
"""

from __future__ import annotations

import base64
import enum
import functools
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import tensorflow as tf
import xxhash

from replicast.errors import NotSupported, logger
from replicast.lifetime import Lifetime

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
MARK = "replicast_per_worker"
_WRITES = re.compile(r"Assign|Resource(Sparse)?Apply|ResourceScatter|ResourceStridedSliceAssign|Collective")
# Attributes that may differ: names, a function's number in its process, seeds.
_OF_ONE_WORKER = re.compile(r"_.*|seed2?|shared_name|container|token|config(_proto)?|executor_type|message")
_MAX_DIMENSIONS = 8


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
    """Whether an operation may give each worker another value from the same inputs: data, stateful ones."""
    if tensor.op.type == "Placeholder":
        return tensor.dtype != tf.resource and _outer(tensor) is None  # weights are equal on all workers
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
    found = list(upstream(tensors_in([target]), lambda t: t.op.type in _SHAPES or _takes_some_rows(t.op)))
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
        data = _inputs(node)
        del node.input[:]
        node.input.extend(data)
        node.attr.pop("_class", None)  # names operations that are not copied
        node.device = ""
    return tf.graph_util.import_graph_def(graph_def, inputs, [tensor.name])[0]


# What a step computes is compared over the workers when it is traced: equal weights are not the same model.
#
# A layer that draws a mask with an unseeded `np.random` has another one on each worker. Weights and losses
# stay equal, and `predict` joins the rows of two models. So the workers compare the graph of a trace:
#
#     structure   what is computed from what: operations, attributes, functions that are called
#     values      constants, and tensors that the graph takes from outside; not variables: audits compare them
#
# Only what a result or a write of a variable is computed from counts: worker 0 may print, or write a summary.
# Names, devices, the order of operations, keys of transfers and seeds of random operations do not count.
#
# All workers trace a function for the first time at the same line of the script: one that Keras has made, or
# one in `strategy.run` that has a transfer. So they meet there, before the first step. If they differ, all
# raise the same error; in a custom loop they warn, because there a worker's own data may be a constant. Later
# traces are not compared: only one worker may trace again, because its share has another shape (the last,
# uneven batch) where another's has not.
#
# Shares of different static shapes (5 rows on one worker, 6 on another) give different graphs. Then only
# values of the same shape are compared, and those of two or more elements.


def per_worker(value: Any) -> tf.Tensor:
    """Declares that a tensor may differ between the workers.

    The workers compare what they compute before the first step, and refuse constants that differ. Use this
    for a value that is meant to differ, for example `replicast.per_worker(strategy.rank)`, in eager code (the
    constructor of a layer) or in a `tf.function`.

    Args:
        value: Anything that TensorFlow converts to a tensor.

    Returns:
        The value as a tensor. Compute with this tensor: converting it to numpy loses the declaration.
    """
    tensor = tf.identity(tf.convert_to_tensor(value), name=MARK)
    if not tf.is_symbolic_tensor(tensor):
        tensor._replicast_per_worker = True
    return tensor


class Functions:
    def __init__(self, lifetime: Lifetime, counter: tf.Variable) -> None:
        self._lifetime = lifetime
        self._counter = counter
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._met_in_loops: set[str] = set()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def compare(self, step: Step | None, outputs: Any) -> None:
        """Compares a step that has just been traced, if it is the first trace of its function.

        Two rounds: the digests, and only if they differ everything.
        """
        if step is None:
            return
        in_loop = isinstance(step.function, str)
        if in_loop and all(outside(taken) is not self._counter.handle for taken, _ in step.graph.captures):
            return  # without a transfer, one worker may run it alone
        met: Any = self._met_in_loops if in_loop else self._met
        if step.function in met:
            return
        met.add(step.function)
        try:
            trace = _Reader.read(step, outputs)
        except Exception:  # a graph that cannot be read is not compared; the others must not wait for it
            logger.warning("Could not compare %s with the other workers'", step.name, exc_info=True)
            trace = None
        with tf.init_scope():
            own = "" if trace is None else _digest([trace.signature, trace.structure])
            digests = self._lifetime.meet(own)
            if len(set(filter(None, digests.values()))) < 2:
                return
            packed = b"" if trace is None else zlib.compress(msgspec.msgpack.encode(trace), 1)
            heard = self._lifetime.meet(base64.b85encode(packed).decode())
        unpacked = {each: zlib.decompress(base64.b85decode(text)) for each, text in heard.items() if text}
        traces = {each: msgspec.msgpack.decode(text, type=Trace) for each, text in unpacked.items()}
        first, *others = traces
        found = {worker: traces[first].difference(traces[worker]) for worker in others}
        differing = [worker for worker, difference in found.items() if difference]
        if not differing:
            return
        refusal = NotSupported(
            f"A {step.name} that is not the same on worker {first} and worker "
            f"{', '.join(map(str, differing))} (they differ in {found[differing[0]]})",
            reason="the workers would train and predict with different models",
            remedy="If it is drawn at random, call keras.utils.set_random_seed(n) with the same n on all "
            "workers before the model is built. If it depends on the rank, compute it alike on all workers. "
            "If it is meant to differ, or only rounded by another processor, pass it through "
            "replicast.per_worker(value)",
        )
        if not in_loop:
            raise refusal
        logger.warning(str(refusal).replace(" is not supported here", " was traced in a custom loop"))


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    function: Any  # that Keras has made; in a custom loop, its name
    args: Any
    graph: Any
    version: int

    @staticmethod
    def begin(name: str, function: Any, args: Any) -> Step | None:
        """The step that begins now; None if it is not traced but executed."""
        if tf.executing_eagerly():
            return None
        try:
            weakref.ref(function)
        except TypeError:  # a name, or an object of the user of which it cannot be told that it is new
            function = str(function)
        graph = tf.compat.v1.get_default_graph()
        return Step(name, function, args, graph, graph.version)


class Trace(msgspec.Struct, frozen=True, array_like=True):
    signature: str
    structure: str  # a digest of all from which results and written variables are computed
    operations: list[list[str]]  # the name and the digest of each, after those that it uses
    values: dict[str, list[str]]  # by its place: the type of a constant or captured tensor, and a digest

    def difference(self, other: Trace) -> str:
        """The first thing in which two traces differ; empty if there is none."""
        if self.signature != other.signature:
            for place, (kind, digest) in self.values.items():
                theirs = other.values.get(place, [kind, digest])
                if theirs[0] == kind and theirs[1] != digest:
                    return f"a constant that {place.rpartition(':')[0]!r} uses"
            return ""
        if self.structure == other.structure:
            return ""
        return self._other_operation(other) or other._other_operation(self) or "which results it returns"

    def _other_operation(self, other: Trace) -> str:
        known = {digest for _, digest in other.operations}
        names = (name for name, digest in self.operations if digest not in known)
        return next((f"the operation {name!r}, or a constant that it uses" for name in names), "")


class _Reader:
    """Reads the graph of a step.

    The digest of an operation covers its type, its attributes and the digests of its inputs, so it says what
    is computed, however the graph is ordered and named.
    """

    def __init__(self, definition: Any) -> None:
        self._library = {function.signature.name: function for function in definition.library.function}
        self._functions: dict[str, str] = {}
        self.operations: list[list[str]] = []
        self.values: dict[str, list[str]] = {}

    @staticmethod
    def read(step: Step, outputs: Any) -> Trace:
        definition = step.graph.as_graph_def(from_version=step.version)
        inputs = [tensor for tensor in tensors_in(step.args) if isinstance(tensor, tf.Tensor)]
        signature = " ".join(f"{tensor.dtype.name}{tensor.shape}" for tensor in inputs)
        results = [tensor for tensor in tensors_in(outputs) if isinstance(tensor, tf.Tensor)]
        named = [tensor.name for tensor in results if tensor.graph is step.graph]
        captured = {inside.op.name: outside(taken) for taken, inside in step.graph.captures}
        reader = _Reader(definition)
        structure = reader._body(definition.node, named, {}, captured)
        return Trace(signature, structure, reader.operations, reader.values)

    def _body(
        self,
        nodes: Iterable[Any],
        results: Sequence[str],
        digests: dict[str, str],
        captured: Mapping[str, Any],
    ) -> str:
        by_name = {node.name: node for node in nodes}
        values: dict[str, list[str]] = {}
        writes = [node.name for node in by_name.values() if self._writes(node)]
        for name in _inputs_first(by_name, [*map(_node_of, results), *writes]):
            node, origin = by_name.get(name), captured.get(name)
            if name in digests:
                continue
            if _is_declared(name, origin):
                digests[name] = _digest(["per worker"])
            elif node is None or node.op in ("Const", "Placeholder"):
                kind, digest, is_data = _value_of(node, origin)
                digests[name] = _digest(["value", kind, digest])
                if is_data:
                    values[name] = [kind, digest]
            else:
                inputs = _inputs(node)[:1] if node.op.startswith("Collective") else _inputs(node)
                sources = [f"{digests.get(_node_of(source))}:{source.partition(':')[2]}" for source in inputs]
                digests[name] = digest = _digest([node.op, *self._attributes(node), *sources])
                self.operations.append([name, digest[:12]])
                for index, source in enumerate(inputs):
                    if (used := values.pop(_node_of(source), None)) is not None:
                        self.values[f"{name}:{index}"] = used
        returned = [f"{digests.get(_node_of(name))}:{name.partition(':')[2]}" for name in results]
        return _digest([*returned, *sorted(digests[name] for name in writes)])

    def _attributes(self, node: Any) -> Iterator[str]:
        for name in sorted(node.attr):
            if _OF_ONE_WORKER.fullmatch(name):
                continue
            attribute = node.attr[name]
            functions = [attribute.func] if attribute.HasField("func") else list(attribute.list.func)
            if functions:
                yield f"{name} {[self._function(function.name) for function in functions]}"
            else:
                yield f"{name} {attribute.SerializeToString(deterministic=True)!r}"

    def _function(self, name: str) -> str:
        if name not in self._functions:
            self._functions[name] = ""  # of a function that calls itself
            function = self._library.get(name)
            if function is not None:
                given = [argument.name for argument in function.signature.input_arg]
                results = [function.ret[argument.name] for argument in function.signature.output_arg]
                arguments = {argument: _digest(["argument", str(i)]) for i, argument in enumerate(given)}
                self._functions[name] = self._body(function.node_def, results, arguments, {})
        return self._functions[name]

    def _writes(self, node: Any, inside: frozenset[str] = frozenset()) -> bool:
        """Whether an operation, or a function that it calls, writes a variable or sends something."""
        if _WRITES.match(node.op):
            return True
        functions = [a.func.name for a in node.attr.values() if a.HasField("func")]
        functions += [function.name for a in node.attr.values() for function in a.list.func]
        return any(
            self._writes(inner, inside | {name})
            for name in functions
            if name in self._library and name not in inside
            for inner in self._library[name].node_def
        )


def _is_declared(name: str, origin: Any) -> bool:
    # TensorFlow gives a step's own number in the job as a constant of this name.
    marked = name.rpartition("/")[2].startswith((MARK, "replica_id_in_sync_group"))
    return marked or getattr(origin, "_replicast_per_worker", False)


def _value_of(node: Any, origin: Any) -> tuple[str, str, bool]:
    """The type and digest of a constant or captured tensor, empty for variables, tables, iterators; and
    whether it has two or more elements that cannot be sizes, which depend on the number of rows.
    """
    if node is not None and node.op == "Const":
        proto = node.attr["value"].tensor
        dtype, shape = tf.as_dtype(proto.dtype).name, [size.size for size in proto.tensor_shape.dim]
        if dtype == "string" and (not shape or any(b"/" in text for text in proto.string_val)):
            return "", "", False  # a message or a path
        content = proto.SerializeToString(deterministic=True)
    elif origin is None or origin.dtype in (tf.resource, tf.variant):
        return "", "", False
    else:
        array = np.asarray(origin)
        dtype, shape = origin.dtype.name, list(array.shape)
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    elements = int(np.prod(shape))
    may_be_sizes = dtype.startswith("int") and len(shape) < 2 and elements <= _MAX_DIMENSIONS
    is_data = elements > 1 and not may_be_sizes
    return f"{dtype}{shape}", xxhash.xxh3_128_hexdigest(content), is_data


def _inputs(node: Any) -> list[str]:
    """The tensors from which an operation computes; the order of execution does not count."""
    return [source for source in node.input if not source.startswith("^")]


def _node_of(tensor: str) -> str:
    return tensor.partition(":")[0]


def _inputs_first(nodes: Mapping[str, Any], wanted: Iterable[str]) -> Iterator[str]:
    """The wanted nodes, after those they are computed from; what is declared to differ has no inputs."""
    entered: set[str] = set()
    done: set[str] = set()
    stack = [*wanted][::-1]
    while stack:
        name = stack[-1]
        node = nodes.get(name)
        if name not in entered and node is not None and not _is_declared(name, None):
            entered.add(name)  # once, so that a cycle ends
            stack += [source for source in map(_node_of, _inputs(node)) if source not in entered][::-1]
            continue
        stack.pop()
        if name not in done:
            done.add(name)
            yield name


def _digest(parts: Iterable[str]) -> str:
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())
