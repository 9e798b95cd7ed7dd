"""Compares over the workers what a step computes, when it is traced: the same weights are not the same model.

A layer that draws a mask with an unseeded `np.random` has another one on each worker. Weights and losses stay
equal, and `predict` joins the rows of two models. So the workers compare the graph that a trace has made:

    structure   what is computed from what: operations, attributes, functions that are called
    values      constants, and tensors that the graph takes from outside; not variables, which audits compare

Only what a result or a write of a variable is computed from counts: worker 0 may print, or write a summary.
Names, devices, the order of operations, keys of transfers and seeds of random operations do not count.

When the workers compare:

    the first trace of a Keras function   all workers trace it at the same line of the script, so they meet,
                                          and all of them raise the same error, before the first step
    later traces, custom loops            nobody waits. Only one worker may trace again, because its share has
                                          another shape (the last, uneven batch) where another's has not. The
                                          first worker that traces at a position publishes what it has, and
                                          one that traces there too compares. If they differ, it raises, and
                                          the job fails on the others; in a custom loop it warns, because
                                          there a worker's own data may be a constant

A position is a number of transfers and turns, which is the same on all workers before the same step.

Shares of different static shapes (5 rows on one worker, 6 on another) give different graphs. Then only values
are compared, those with two or more elements, and a value that grows with the rows is not a difference.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf
import xxhash

from replicast.coordination import Coordination
from replicast.errors import NotSupported
from replicast.training.origins import outside, tensors_in
from replicast.turns import Turns

logger = logging.getLogger("replicast")

MARK = "replicast_per_worker"
_WRITES = re.compile(r"Assign|Resource(Sparse)?Apply|ResourceScatter|ResourceStridedSliceAssign|Collective")
# Attributes that may differ: names, a function's number in its process, seeds.
_OF_ONE_WORKER = re.compile(r"_.*|seed2?|shared_name|container|token|config(_proto)?|executor_type|message")
# Relative to the norm of a value: processors of two kinds do not round `np.sin` alike.
_ROUNDING = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}
_EXACT = 1e-12
_MAX_DIMENSIONS = 8
_KEPT_KEYS = 4
_Value = tuple[str, list[int], float, float]  # dtype, shape, and the two numbers of `_mix`
_WEIGHTS = np.arange(1, 65537) * 0.6180339887498949 % 1.0 + 0.5


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

    def __init__(self, rank: int, coordination: Coordination, turns: Turns, counter: tf.Variable) -> None:
        self._rank = rank
        self._coordination = coordination
        self._turns = turns
        self._counter = counter
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._traces: Counter[tuple[str, str]] = Counter()
        self._published: deque[str] = deque()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def compare(self, step: Step | None, outputs: Any) -> None:
        """Compares a step that has just been traced."""
        if step is None:
            return
        if step.function is None and all(
            outside(taken) is not self._counter.handle for taken, _ in step.graph.captures
        ):
            return  # without a transfer, it is not one that all workers certainly run together
        first = step.function is not None and step.function not in self._met
        try:
            trace = _Reader.read(step, outputs)
        except Exception:  # a graph that cannot be read is not compared; the others must not wait for it
            logger.warning("Could not compare %s with the other workers'", step.name, exc_info=True)
            trace = None
        with tf.init_scope():
            if first:
                self._met.add(step.function)
                self._compare_with_all(step.name, trace)
            elif trace is not None:
                self._compare_with_first(step, trace)

    def _compare_with_all(self, name: str, trace: Trace | None) -> None:
        """Two rounds: the digests, and only if they differ everything."""
        heard = self._turns.meet("" if trace is None else f"{trace.digest} {trace.signature}")
        said = set(filter(None, heard.values()))
        if len(said) < 2:
            return
        comparable = len({text.partition(" ")[2] for text in said}) == 1
        heard = self._turns.meet("" if trace is None else trace.to_text(operations=comparable))
        refusal = _refusal(name, {worker: _decoded(text) for worker, text in heard.items() if text})
        if refusal is not None:
            raise refusal

    def _compare_with_first(self, step: Step, trace: Trace) -> None:
        traced = ("-".join(map(str, self._turns.position())), step.name)
        self._traces = Counter({traced: self._traces[traced] + 1})
        key = f"replicast/function/{traced[0]}/{self._traces[traced]}/{_digest([step.name])}"
        if self._coordination.put(key, json.dumps([self._rank, trace.digest, trace.to_text()])):
            self._published.append(key)
            # All workers that trace at one position do so before the transfer after it.
            while len(self._published) > _KEPT_KEYS:
                self._coordination.delete(self._published.popleft())
            return
        worker, digest, text = json.loads(self._coordination.peek(key) or f'[{self._rank}, "", ""]')
        if worker == self._rank or digest == trace.digest:
            return
        traces = {worker: _decoded(text), self._rank: trace}
        refusal = _refusal(step.name, dict(sorted(traces.items())))
        if refusal is not None and step.function is not None:
            raise refusal
        if refusal is not None:
            logger.warning(str(refusal).replace(" is not supported here", " was traced in a custom loop"))


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is about to be traced."""

    name: str
    function: Any
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
        except TypeError:  # None, or an object of the user of which it cannot be told that it is new
            function = None
        graph = tf.compat.v1.get_default_graph()
        return Step(name, function, args, graph, graph.version)


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """A value in a graph that is not computed: a constant, or a tensor that was captured."""

    used_by: str
    place: str
    dtype: str
    shape: list[int]
    mix: float
    norm: float

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))

    def is_as(self, other: Leaf, rows: int = 1, others_rows: int = 1) -> bool:
        """Whether two values are equal up to rounding, or differ as the rows of two shares do."""
        tolerance = _ROUNDING.get(self.dtype, _EXACT) * (self.norm + other.norm)
        ones = 0.0 if rows == others_rows else _mix(np.ones(self.elements))[0]
        pairs = [
            (self.mix, other.mix),
            (self.mix / rows, other.mix / others_rows),
            (self.mix * rows, other.mix * others_rows),
            (self.mix - rows * ones, other.mix - others_rows * ones),
        ]
        return any(abs(own - others) <= tolerance for own, others in pairs)

    def may_be_shape(self) -> bool:
        """Whether it may hold sizes, which depend on the number of rows."""
        return self.dtype.startswith("int") and len(self.shape) < 2 and self.elements <= _MAX_DIMENSIONS


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """What one worker's trace computes."""

    signature: str
    rows: int
    structure: str
    operations: list[list[str]]
    leaves: list[Leaf]

    @property
    def digest(self) -> str:
        """Covers the structure from which results and written variables are computed, and the leaves."""
        leaves = (f"{leaf.place} {leaf.dtype}{leaf.shape} {leaf.mix} {leaf.norm}" for leaf in self.leaves)
        return _digest([self.signature, self.structure, *sorted(leaves)])

    def to_text(self, *, operations: bool = True) -> str:
        """All of it as compressed text; the operations only if they can be compared."""
        sent = self if operations else msgspec.structs.replace(self, operations=[])
        return base64.b85encode(zlib.compress(msgspec.msgpack.encode(sent), 1)).decode()

    def difference(self, other: Trace) -> str:
        """The first thing in which two traces differ; empty if there is none."""
        if self.signature != other.signature:
            same_place = {leaf.used_by: leaf for leaf in other.leaves}
            pairs = [(leaf, same_place[leaf.used_by]) for leaf in self.leaves if leaf.used_by in same_place]
            pairs = [(one, two) for one, two in pairs if one.elements > 1 and not one.may_be_shape()]
            pairs = [(one, two) for one, two in pairs if (one.dtype, one.shape) == (two.dtype, two.shape)]
        elif self.structure != other.structure:
            return self._other_operation(other) or other._other_operation(self) or "which results it returns"
        else:
            # Leaves at the same place, as of two equal layers, are told apart by nothing but their values.
            own, others = (
                sorted(trace.leaves, key=lambda leaf: (leaf.place, leaf.mix)) for trace in (self, other)
            )
            pairs = list(zip(own, others, strict=True))
        for one, two in pairs:
            if not one.is_as(two, self.rows, other.rows):
                return f"a constant or captured tensor that {one.used_by.rpartition(':')[0]!r} uses"
        return ""

    def _other_operation(self, other: Trace) -> str:
        known = {digest for _, digest in self.operations}
        return next(
            (f"the operation {name!r}" for name, digest in other.operations if digest not in known), ""
        )


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
        self._constants: dict[bytes, _Value] = {}
        self.operations: list[list[str]] = []
        self.leaves: list[Leaf] = []

    @staticmethod
    def read(step: Step, outputs: Any) -> Trace:
        definition = step.graph.as_graph_def(from_version=step.version)
        inputs = [tensor for tensor in tensors_in(step.args) if isinstance(tensor, tf.Tensor)]
        signature = " ".join(f"{tensor.dtype.name}{tensor.shape}" for tensor in inputs)
        rows = max(1, next((tensor.shape[0] for tensor in inputs if tensor.shape.rank), None) or 1)
        results = [tensor for tensor in tensors_in(outputs) if isinstance(tensor, tf.Tensor)]
        named = [tensor.name for tensor in results if tensor.graph is step.graph]
        captured = {inside.op.name: outside(taken) for taken, inside in step.graph.captures}
        reader = _Reader(definition)
        structure = reader._body(definition.node, named, {}, captured)
        return Trace(signature, rows, structure, reader.operations, reader.leaves)

    def _body(
        self,
        nodes: Iterable[Any],
        results: Sequence[str],
        digests: dict[str, str],
        captured: Mapping[str, Any],
    ) -> str:
        by_name = {node.name: node for node in nodes}
        values: dict[str, _Value] = {}
        writes = [node.name for node in by_name.values() if self._writes(node)]
        for name in _inputs_first(by_name, [*map(_node_of, results), *writes]):
            node, origin = by_name.get(name), captured.get(name)
            if name in digests:
                continue
            if _is_declared(name, origin):
                digests[name] = _digest(["per worker"])
            elif node is None or node.op in ("Const", "Placeholder"):
                value = self._value_of(node, origin)
                digests[name] = _digest(["value", "" if value is None else f"{value[0]}{value[1]}"])
                if value is not None:
                    values[name] = value
            else:
                inputs = _inputs(node)[:1] if node.op.startswith("Collective") else _inputs(node)
                sources = [f"{digests.get(_node_of(source))}:{source.partition(':')[2]}" for source in inputs]
                digests[name] = digest = _digest([node.op, *self._attributes(node), *sources])
                self.operations.append([name, digest[:12]])
                for index, source in enumerate(inputs):
                    if (used := values.pop(_node_of(source), None)) is not None:
                        self.leaves.append(Leaf(f"{name}:{index}", f"{index}:{digest}"[:12], *used))
        returned = [f"{digests.get(_node_of(name))}:{name.partition(':')[2]}" for name in results]
        self.leaves += [Leaf(f"{name}:", "result", *value) for name, value in values.items()]
        return _digest([*returned, *sorted(digests[name] for name in writes)])

    def _value_of(self, node: Any, origin: Any) -> _Value | None:
        """The value of a constant, or of a captured tensor that is none of a variable, table or iterator."""
        if node is not None and node.op == "Const":
            proto = node.attr["value"].tensor
            dtype, is_scalar = tf.as_dtype(proto.dtype).name, not proto.tensor_shape.dim
            if dtype == "string" and (is_scalar or any(b"/" in text for text in proto.string_val)):
                return None  # a message or a path
            content = proto.SerializeToString(deterministic=True)
            if content not in self._constants:  # most are a few small numbers
                self._constants[content] = _described(tf.make_ndarray(proto), dtype)
            return self._constants[content]
        if origin is None or origin.dtype in (tf.resource, tf.variant):
            return None
        return _described(np.asarray(origin), origin.dtype.name)

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
        "meant to differ, pass it through replicast.per_worker(value)",
    )


def _is_declared(name: str, origin: Any) -> bool:
    # TensorFlow gives a step's own number in the job as a constant of this name.
    marked = name.rpartition("/")[2].startswith((MARK, "replica_id_in_sync_group"))
    return marked or getattr(origin, "_replicast_per_worker", False)


def _described(array: np.ndarray[Any, Any], dtype: str) -> _Value:
    if dtype == "string":
        return dtype, list(array.shape), float(int(_digest([repr(array.tolist())])[:12], 16)), 0.0
    flat = np.ravel(array)
    mixed = _mix(np.concatenate([flat.real, flat.imag]) if flat.dtype.kind == "c" else flat)
    return dtype, list(array.shape), *mixed


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


def _mix(array: np.ndarray[Any, Any]) -> tuple[float, float]:
    """A sum with another weight for each element, which tells values apart up to rounding; and the norm."""
    mix = square = 0.0
    for index, first in enumerate(range(0, array.size, len(_WEIGHTS))):  # a large one is not copied whole
        part = array[first : first + len(_WEIGHTS)].astype(np.float64)
        if not np.isfinite(part).all():  # a mask of attention: any numbers will do, if all take the same
            part = np.nan_to_num(part, nan=0.5, posinf=3.0, neginf=-3.0)
        mix += float(part @ _WEIGHTS[: len(part)]) * _WEIGHTS[index % len(_WEIGHTS)]
        square += float(part @ part)
    return float(mix), square**0.5
