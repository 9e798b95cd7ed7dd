"""Compares over the workers what a step computes, when it is traced: the same weights are not the same model.

A layer that draws a mask with an unseeded `np.random` has another one on each worker. Weights and losses stay
equal, and `predict` joins the rows of two models. So the workers compare the graph that a trace has made:

    structure   what is computed from what: operations, attributes, functions that are called
    values      constants, and tensors that the graph takes from outside; not variables, which audits compare

Only what a result or a write of a variable is computed from counts: worker 0 may print, or write a summary.
Names, devices, the order of operations, keys of transfers and seeds of random operations do not count.

All workers trace a function for the first time at the same line of the script: one that Keras has made, or
one in `strategy.run` that has a transfer. So they meet there, before the first step. If they differ, all
raise the same error; in a custom loop they warn, because there a worker's own data may be a constant. Later
traces are not compared: only one worker may trace again, because its share has another shape (the last,
uneven batch) where another's has not.

Shares of different static shapes (5 rows on one worker, 6 on another) give different graphs. Then only values
of the same shape are compared, and those of two or more elements.
"""

from __future__ import annotations

import base64
import logging
import re
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf
import xxhash

from replicast.errors import NotSupported
from replicast.training.origins import outside, tensors_in
from replicast.turns import Turns

logger = logging.getLogger("replicast")

MARK = "replicast_per_worker"
_WRITES = re.compile(r"Assign|Resource(Sparse)?Apply|ResourceScatter|ResourceStridedSliceAssign|Collective")
# Attributes that may differ: names, a function's number in its process, seeds.
_OF_ONE_WORKER = re.compile(r"_.*|seed2?|shared_name|container|token|config(_proto)?|executor_type|message")
_MAX_DIMENSIONS = 8


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
    """Compares the traces of this worker with the other workers'."""

    def __init__(self, turns: Turns, counter: tf.Variable) -> None:
        self._turns = turns
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
            heard = self._turns.meet("" if trace is None else trace.digest)
            said = set(filter(None, heard.values()))
            if len(said) < 2:
                return
            heard = self._turns.meet("" if trace is None else trace.to_text())
        refusal = _refusal(step.name, {worker: _decoded(text) for worker, text in heard.items() if text})
        if refusal is not None and not in_loop:
            raise refusal
        if refusal is not None:
            logger.warning(str(refusal).replace(" is not supported here", " was traced in a custom loop"))


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is about to be traced."""

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
    """What one worker's trace computes."""

    signature: str
    structure: str  # a digest of all from which results and written variables are computed
    operations: list[list[str]]  # the name and the digest of each, after those that it uses
    values: dict[str, list[str]]  # by its place: the type of a constant or captured tensor, and a digest

    @property
    def digest(self) -> str:
        return _digest([self.signature, self.structure])

    def to_text(self) -> str:
        """All of it as compressed text."""
        return base64.b85encode(zlib.compress(msgspec.msgpack.encode(self), 1)).decode()

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


def _decoded(text: str) -> Trace:
    return msgspec.msgpack.decode(zlib.decompress(base64.b85decode(text)), type=Trace)


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
                kind, shape, digest = _value_of(node, origin)
                digests[name] = _digest(["value", kind, digest])
                if _is_data(kind, shape):
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


def _refusal(step: str, traces: Mapping[int, Trace]) -> NotSupported | None:
    first, *others = traces
    found = {worker: traces[first].difference(traces[worker]) for worker in others}
    differing = [worker for worker, difference in found.items() if difference]
    if not differing:
        return None
    workers = ", ".join(map(str, differing))
    return NotSupported(
        f"A {step} that is not the same on worker {first} and worker {workers} (they differ in "
        f"{found[differing[0]]})",
        reason="the workers would train and predict with different models",
        remedy="If it is drawn at random, call keras.utils.set_random_seed(n) with the same n on all workers "
        "before the model is built. If it depends on the rank, compute it alike on all workers. If it is "
        "meant to differ, or only rounded by another processor, pass it through replicast.per_worker(value)",
    )


def _is_declared(name: str, origin: Any) -> bool:
    # TensorFlow gives a step's own number in the job as a constant of this name.
    marked = name.rpartition("/")[2].startswith((MARK, "replica_id_in_sync_group"))
    return marked or getattr(origin, "_replicast_per_worker", False)


def _value_of(node: Any, origin: Any) -> tuple[str, list[int], str]:
    """The type, shape and digest of a constant or captured tensor; empty for variables, tables, iterators."""
    if node is not None and node.op == "Const":
        proto = node.attr["value"].tensor
        dtype, shape = tf.as_dtype(proto.dtype).name, [size.size for size in proto.tensor_shape.dim]
        if dtype == "string" and (not shape or any(b"/" in text for text in proto.string_val)):
            return "", [], ""  # a message or a path
        content = proto.SerializeToString(deterministic=True)
    elif origin is None or origin.dtype in (tf.resource, tf.variant):
        return "", [], ""
    else:
        array = np.asarray(origin)
        dtype, shape = origin.dtype.name, list(array.shape)
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return f"{dtype}{shape}", shape, xxhash.xxh3_128_hexdigest(content)


def _is_data(kind: str, shape: Sequence[int]) -> bool:
    """Whether a value has two or more elements, and cannot be sizes, which depend on the number of rows."""
    elements = int(np.prod(shape))
    may_be_sizes = kind.startswith("int") and len(shape) < 2 and elements <= _MAX_DIMENSIONS
    return elements > 1 and not may_be_sizes


def _inputs(node: Any) -> list[str]:
    """The tensors from which an operation computes; the order of execution does not count."""
    return [source for source in node.input if not source.startswith("^")]


def _node_of(tensor: str) -> str:
    return tensor.partition(":")[0]


def _inputs_first(nodes: Mapping[str, Any], wanted: Iterable[str]) -> Iterator[str]:
    """The nodes from which the wanted ones are computed, and these, each after its inputs.

    What is declared to differ has no inputs here.
    """
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
