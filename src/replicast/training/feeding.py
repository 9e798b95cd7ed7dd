"""Each worker's share of every batch, without a transfer per step.

TensorFlow's distributed iterator asks all workers before every step whether each still has data, which costs
more than a whole step of a small model. Here every worker reads the same batches and takes its own rows of
each: worker r of N gets rows B*r//N to B*(r+1)//N of a batch of B rows. So each example is used once, also in
the last short batch, and all workers run out of data at the same step without communication.

All workers must have the same batches; otherwise training would silently use wrong examples. So they compare
samples of their data (`Excerpt`, `DataComparison`).
"""

from __future__ import annotations

import functools
import itertools
import random
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf
import xxhash

# Private: Keras' adapters of its inputs, to distinguish the kinds of data.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

# Private: the class of `iter(dataset)`, the only kind of iterator that Keras passes to its graphs; and the
# classes of two stages of a pipeline, to recognize a shuffle that is repeated.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.data.ops.repeat_op import _RepeatDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset

# Private: whether the user has set a global seed, and whether it was set again: `tf.random` does not tell.
from tensorflow.python.eager import context

from replicast.errors import NotSupported, logger
from replicast.training.keras_call import KerasCall, only_looks_at_shapes
from replicast.update.edits import grouped

PARTS = ("x", "y", "sample_weight")
PREFETCHED_BATCHES = 2
LARGE_SHARE_BYTES = 1 << 20
ROWS_OF_ARRAYS = 64
FIRST_BATCH_SECS = 60.0  # how long worker 0 waits for another worker's; the step would wait for it anyway
# The losses of Keras whose value for a row depends on other rows, and what to do.
_MIXING = {
    "Circle": "gather the embeddings and labels of all workers in compute_loss",
    "Dice": "leave out axis 0, for one value per row: Dice(axis=(1, 2, 3))",
    "Tversky": "leave out axis 0, for one value per row: Tversky(axis=(1, 2, 3))",
}

# The rows of a batch: which of its arrays have them, how many there are, a placeholder if there are none.
#
# A batch may hold arrays that are not rows: a table, an adjacency matrix, the edges of a graph. Only rows
# are divided among the workers; every worker gets the rest whole. What counts as rows follows from the
# batch alone, so that all workers decide alike:
#
# - The first dimension of y and sample_weight is the number of rows. All of their arrays must have it, and at
#   least one array of x. Without y and sample_weight, all arrays of x must have the same first dimension.
# - An array of x has rows if its first dimension is that number, or is not fixed. A first dimension that is
#   fixed while the number of rows is not (`dataset.batch(8)` does not fix it) is another one, even if they
#   happen to be equal, unless it is that of the only array. A generator has no types: its first batch tells.
# - Scalars are not rows.
#
# A batch for which this does not work is refused, with its shapes; one whose arrays of rows have different
# lengths ends the training, with these.
#
# A batch with fewer rows than workers leaves some workers without rows. They must still take part in the
# step's transfer, but many layers fail on an empty batch (a convolution) or return NaN (a mean). So such a
# worker computes one row of zeros, which is ignored: its weight is 0, and what it adds to metrics is
# discarded.


class _Array(NamedTuple):
    """An array of a batch, or its type, with its place in the flat batch."""

    place: int
    name: str
    value: Any

    @property
    def fixed_length(self) -> int | None:
        shape = tf.TensorShape(self.value.shape)
        return None if shape.rank is None else shape[0]


def named_leaves(structure: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a structure in the order of `tf.nest`, with a name for each: x['table'], x[0]."""
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from named_leaves(structure[key], f"{name}[{key!r}]")
    elif isinstance(structure, (tuple, list)):
        for place, part in enumerate(structure):
            yield from named_leaves(part, f"{name}[{place}]")
    else:
        yield from ((name, leaf) for leaf in tf.nest.flatten(structure))


def _arrays(batch: Any) -> tuple[list[_Array], list[_Array]]:
    as_keras = isinstance(batch, (tuple, list)) and 0 < len(batch) <= len(PARTS)
    parts = zip(PARTS, batch, strict=False) if as_keras else [("x", batch)]
    leaves = [(part, *named) for part, value in parts for named in named_leaves(value, part)]
    found: tuple[list[_Array], list[_Array]] = ([], [])
    for place, (part, name, leaf) in enumerate(leaves):
        shape = getattr(leaf, "shape", None)  # None: an absent part of the batch
        if shape is not None and tf.TensorShape(shape).rank != 0:
            found[part != "x"].append(_Array(place, name, leaf))
    return found


def length_of(array: Any) -> tf.Tensor:
    """The first dimension of an array, ragged or sparse tensor."""
    if isinstance(array, tf.RaggedTensor):
        return tf.cast(array.nrows(), tf.int32)
    if isinstance(array, tf.SparseTensor):
        return tf.cast(array.dense_shape[0], tf.int32)
    return tf.shape(array)[0]


class Division:
    """Which arrays of a dataset's batches have rows."""

    def __init__(self, spec: Any, first_batch: Any = None) -> None:
        self._inputs, labels = _arrays(spec)
        self._arrays = [*self._inputs, *labels]
        self._counted = labels or self._inputs  # the arrays whose first dimension is the number of rows
        rows = {array.fixed_length for array in self._counted} - {None}
        if len(rows) > 1:
            raise self._refusal()
        self.rows = next(iter(rows), None)  # if it is fixed
        # By place, whether an array has rows.
        self.kinds = dict.fromkeys((array.place for array in self._counted), True)
        if labels:
            for array in self._inputs:
                self.kinds[array.place] = array.fixed_length in (None, self.rows)
            if self._inputs and not any(self.kinds[array.place] for array in self._inputs):
                if self.rows is not None or len(self._inputs) > 1:
                    raise self._refusal()
                self.kinds[self._inputs[0].place] = True
        if first_batch is not None:
            self.kinds = Division(first_batch).kinds

    def rows_in(self, flat: list[Any]) -> Any:
        """The number of rows of a batch: a tensor, unless it is fixed."""
        counted = [array for array in self._arrays if self.kinds.get(array.place)]
        lengths = [length_of(flat[array.place]) for array in counted]
        rows = length_of(flat[self._counted[0].place]) if self.rows is None else self.rows
        if len(counted) > 1:
            names = ", ".join(array.name for array in counted)
            message = f"{self._refusal()} First dimensions of {names} in this batch:"
            equal = tf.reduce_all([length == rows for length in lengths])
            tf.debugging.Assert(equal, [message, *lengths], summarize=len(lengths) + 1)
        return rows

    def _refusal(self) -> NotSupported:
        shapes = ", ".join(f"{array.name} {tf.TensorShape(array.value.shape)}" for array in self._arrays)
        return NotSupported(
            f"A batch whose number of rows cannot be told ({shapes})",
            reason="replicast divides the rows of every batch among the workers; they are counted by y and "
            "sample_weight, or by all of x if there is neither",
            remedy="Give y one entry per row: (x, y), also for predict. Add a first axis of 1 to an array "
            "that is not rows, if its first dimension changes or may equal their number. For batches whose "
            "rows belong together, such as one large graph, turn off auto_shard_policy and give each worker "
            "its own batches (docs/train.md)",
        )


def _counted(data: Any) -> _Array | None:
    """An array whose first dimension is the number of rows of a share."""
    inputs, labels = _arrays(data)
    return next(iter([*labels, *inputs]), None)


def rows_of(data: Any) -> tf.Tensor:
    counted = _counted(data)
    return tf.constant(1) if counted is None else length_of(counted.value)


def first_input_is_whole(data: Any) -> tf.Tensor | None:
    """Whether the first array of x, by which Keras weights its loss, is not rows; None if it surely is."""
    inputs, labels = _arrays(data)
    if not labels or len(inputs) < 2:
        return None
    return length_of(inputs[0].value) != length_of(labels[0].value)


def _has_first_axis(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank not in (None, 0)


def at_least_one_row(data: Any, rows: tf.Tensor) -> Any:
    def filled(leaf: Any) -> Any:
        if not _has_first_axis(leaf) or (leaf.shape[0] or 0) > 0:
            return leaf
        shape = tf.shape(leaf)
        zeros = functools.partial(tf.zeros, tf.concat([[1], shape[1:]], axis=0), leaf.dtype)
        # A conditional even if there are certainly no rows: `graphs.py` must recognize rows of a batch here,
        # as on the workers that have some.
        whole = tf.cond((shape[0] > 0) | (rows > 0), lambda: leaf, zeros)
        whole.set_shape([1 if leaf.shape[0] == 0 else None, *leaf.shape[1:]])
        return whole

    return tf.nest.map_structure(filled, data)


def only_real(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """What was computed from a share; empty if the share has no rows, but a row of zeros instead."""
    return tensor[: tf.where(rows > 0, tf.shape(tensor)[0], 0)]


def with_unknown_rows(data: Any) -> Any:
    """The share, without its number of rows in the static shapes of its tensors."""

    def unknown(leaf: Any) -> Any:
        if not _has_first_axis(leaf) or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return data if tf.executing_eagerly() else tf.nest.map_structure(unknown, data)


def predicting_all_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a prediction function; for a share without rows it returns empty tensors."""

    def predict(data: Any) -> Any:
        rows, counted = rows_of(data), _counted(data)
        fixed = None if counted is None else counted.fixed_length
        outputs = function(at_least_one_row(data, rows))
        real = []
        for name, output in named_leaves(outputs, "output"):
            if not isinstance(output, tf.Tensor) or output.shape.rank is None:
                real.append(output)
                continue
            length = output.shape[0] if output.shape.rank else None
            whole = length is not None and (fixed is None or length % max(fixed, 1) != 0)
            if output.shape.rank == 0 or whole:
                raise NotSupported(
                    f"predict with an output that has no rows: {name} has the shape {output.shape}",
                    reason="each worker computes it from its own rows of the batch, and predict joins rows",
                    remedy="Return one entry per row, or call the model itself on the whole batch: model(x)",
                )
            real.append(only_real(output, rows))
        return tf.nest.pack_sequence_as(outputs, real)

    return predict


def losses_that_mix_rows(loss: Any) -> dict[str, str]:
    """The names of such losses in an argument of `compile`, and a warning for each."""
    found = {}
    for given in tf.nest.flatten(loss):
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        name = name.replace("_", "").capitalize()
        axis = getattr(given, "axis", None)
        if name in _MIXING and (axis is None or 0 in tf.nest.flatten(axis)):
            found[name] = (
                f"The loss {name} compares the rows of a batch with each other. Each worker computes it from "
                f"its own rows, so training differs from one process. To avoid that, {_MIXING[name]} "
                "(docs/train.md, losses and layers that mix rows of a batch)."
            )
    return found


# Comparing the workers' data. What is compared, at the first pass:
#
#     arrays                      the number of rows, and 64 rows spread over them, with the first and last
#     generator                   its first batch
#     tf.data, PyDataset, others  the number of batches, if an epoch uses all of them, and the first one used
#
# Lengths, arrays and generators are known before the pass, so their samples are exchanged when the workers
# meet to open it. The first batch of a pipeline is reported from the pipeline's own thread when it is read.


class Excerpt(msgspec.Struct, frozen=True):
    """A description of one worker's data for the other workers."""

    what: str
    length: int | None = None
    unit: str = "batches"
    order: str = ""
    digests: dict[str, str] = {}
    divided: bool = False
    labelled: bool = False  # the targets identify the examples
    seed: list[int] = []  # of the orders of arrays: worker 0's counts

    @staticmethod
    def of_arrays(what: str, arrays: Any, seed: Sequence[int] = ()) -> Excerpt:
        rows = int(tf.nest.flatten(arrays)[0].shape[0])
        some = np.unique(np.linspace(0, max(rows - 1, 0), ROWS_OF_ARRAYS).astype(np.int64))[:rows]

        def some_of(array: Any) -> np.ndarray[Any, Any]:
            return np.asarray(tf.gather(array, some) if isinstance(array, tf.Tensor) else array[some])

        parts = _parts_of(arrays).items()
        digests = {name: _digest([some_of(leaf) for leaf in tf.nest.flatten(part)]) for name, part in parts}
        return Excerpt(what, length=rows, unit="rows", digests=digests, seed=[*seed])

    @staticmethod
    def of_batch(what: str, parts: Mapping[str, Sequence[np.ndarray[Any, Any]]], order: str = "") -> Excerpt:
        labelled = any(each.ndim > 0 and bool(np.any(each != each[:1])) for each in parts.get("y", ()))
        digests = {name: _digest(part) for name, part in parts.items()}
        return Excerpt(what, order=order, digests=digests, labelled=labelled)


def _parts_of(batch: Any) -> dict[str, Any]:
    return dict(zip(PARTS, batch, strict=False)) if isinstance(batch, tuple) else {"x": batch}


def _digest(components: Sequence[np.ndarray[Any, Any]]) -> str:
    digest = xxhash.xxh3_64()
    for component in components:
        if component.dtype == object:  # strings
            digest.update(repr(component.tolist()).encode())
        elif component.size:
            digest.update(np.ascontiguousarray(component).view(np.uint8).data)
        digest.update(f"{component.dtype} {component.shape}".encode())
    return digest.hexdigest()


class DataComparison:
    def __init__(self, own: Excerpt, strategy: Any, warn: Callable[[str], None]) -> None:
        self._own = own
        self._strategy = strategy
        self._meet = strategy.lifetime.meet if strategy.size > 1 else lambda message: {0: message}
        self._warn = warn
        self._direct = strategy.lifetime.exchange(strategy.next_name("first-batch"))
        self._compared = False
        self.seed: Sequence[int] = own.seed

    def open_pass(self) -> None:
        """Waits for the other workers before a pass; before the first one, compares the samples."""
        if self._compared:
            self._meet("")
            return
        self._compared = True
        heard = sorted(self._meet(msgspec.json.encode(self._own).decode()).items())
        samples = {worker: msgspec.json.decode(text, type=Excerpt) for worker, text in heard if text}
        self.seed = samples.get(0, self._own).seed
        refuse_other_lengths(samples)
        self._compare(samples, "a sample of its rows" if self._own.unit == "rows" else "its first batch")

    def report_first_batch(self, parts: Mapping[str, Sequence[np.ndarray[Any, Any]]]) -> None:
        """Compares the first batch of a pipeline. Worker 0 waits for the others, at most 60 s."""
        try:
            own = Excerpt.of_batch(self._own.what, parts, self._own.order)
            self._direct.tell(str(self._strategy.rank), msgspec.json.encode(own).decode())
            if self._strategy.rank == 0:
                workers = range(self._strategy.size)
                texts = {each: self._direct.hear(str(each), FIRST_BATCH_SECS, each) for each in workers}
                samples = {each: msgspec.json.decode(text, type=Excerpt) for each, text in texts.items()}
                for each in workers:
                    self._strategy.coordination.delete(f"replicast/{self._direct.name}/{each}")
                self._compare(samples, "its first batch")
        except Exception as error:  # a value that cannot be digested, a late worker, or a job that has failed
            logger.warning("The first batch of the %s was not compared: %s", self._own.what, error)

    def _compare(self, samples: Mapping[int, Excerpt], compared: str) -> None:
        found = differing_parts(samples)
        if self._strategy.rank != 0 or not found:
            return
        workers = ", ".join(str(worker) for worker in found)
        parts = ", ".join(dict.fromkeys(part for differing in found.values() for part in differing))
        self._warn(
            f"The workers have different {self._own.what} (worker 0 and worker {workers} differ in {parts} "
            f"of {compared}). Each worker takes its own rows of its own batch, so some examples may be used "
            "twice in an epoch and others not at all. Give every worker all of the data, in the same order: "
            "call keras.utils.set_random_seed(n) first or pass a seed to dataset.shuffle(), and do not "
            "divide the data by rank. To divide a tf.data.Dataset yourself, set its auto_shard_policy to OFF."
        )


def differing_parts(samples: Mapping[int, Excerpt]) -> dict[int, list[str]]:
    """The parts of each worker's sample that differ from worker 0's, if that means different examples.

    If only the inputs differ and the targets identify examples, these are the same examples with random
    augmentation. Each worker takes its own rows, so that is harmless.
    """
    found: dict[int, list[str]] = {}
    first = samples.get(0)
    for worker, sample in samples.items():
        if first is None or (sample.what, sample.order) != (first.what, first.order):
            continue
        names = list(dict.fromkeys([*first.digests, *sample.digests]))
        parts = [name for name in names if first.digests.get(name) != sample.digests.get(name)]
        if parts and not (parts == ["x"] and first.labelled):
            found[worker] = parts
    return found


def refuse_other_lengths(samples: Mapping[int, Excerpt]) -> None:
    known = {worker: sample for worker, sample in samples.items() if sample.length is not None}
    if len({(sample.length, sample.unit, sample.what) for sample in known.values()}) < 2:
        return
    first = next(iter(known.values()))
    lengths = ", ".join(f"worker {worker} has {s.length} {s.unit}" for worker, s in known.items())
    reason = "each worker takes its own rows of every batch, so all need the same data"
    remedy = "Give every worker all of the data, and do not divide it by rank"
    if first.divided:
        reason = "every step uses one batch of each worker"
        remedy = "Give every worker the same number of batches, for example with dataset.take(n)"
    what = f"{first.what[0].upper()}{first.what[1:]} of different lengths ({lengths})"
    raise NotSupported(what, reason=reason, remedy=remedy)


def sampled(
    batches: tf.data.Dataset, report: Callable[[dict[str, list[np.ndarray[Any, Any]]]], None]
) -> tf.data.Dataset:
    """The same batches; also reports the first one of a pass, from the pipeline's own thread."""

    def look(number: tf.Tensor, batch: Any) -> Any:
        leaves = [
            (name, leaf)
            for name, part in _parts_of(batch).items()
            for leaf in tf.nest.flatten(part, expand_composites=True)
            if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant
        ]

        def report_leaves(*values: np.ndarray[Any, Any]) -> np.int64:
            report(grouped((name, value) for (name, _), value in zip(leaves, values, strict=True)))
            return np.int64(0)

        tf.cond(
            tf.equal(number, 0),
            lambda: tf.numpy_function(report_leaves, [leaf for _, leaf in leaves], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )
        return batch

    return batches.enumerate().map(look)


# The shares.


class DataPosition(NamedTuple):
    """The position of a training in its data, in terms of Keras' iterators."""

    passes: int
    batches: int
    epoch: int


def rows_of_share(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """The first row of a worker's share of `rows` rows, and the row after its last."""
    return rows * rank // size, rows * (rank + 1) // size


class DataPass(OwnedIterator):
    """An iterator over a dataset whose shapes Keras can read without taking a batch from it.

    With `validation_steps`, Keras keeps the iterator of `validation_data` from epoch to epoch, and takes a
    batch from it before the next pass, only for the shapes.
    """

    def __init__(self, share: tf.data.Dataset, shapes: Any) -> None:
        super().__init__(share)
        self._shapes = shapes

    def __next__(self) -> Any:
        return self._shapes if only_looks_at_shapes() else super().__next__()


class Share(tf.data.Dataset):
    """One worker's rows of every batch of a dataset.

    It is a dataset itself, so that it can be passed to `fit` and is not divided a second time.
    """

    def __init__(
        self,
        batches: tf.data.Dataset,
        rank: int,
        size: int,
        *,
        opened: Callable[[], None],
        first_batch: Any = None,
        ahead: bool = True,
        report: Callable[[Any], None] | None = None,
    ) -> None:
        self._opened = opened  # called before every pass
        division = Division(batches.element_spec, first_batch) if size > 1 else None

        def share_of(batches: tf.data.Dataset) -> tf.data.Dataset:
            shares = batches if division is None else _divided(batches, rank, size, division)
            if ahead:
                return shares.prefetch(PREFETCHED_BATCHES)
            # TensorFlow would add a prefetch, and run `map` in parallel. Both read ahead, by timing: when a
            # pass ends, one worker may have drawn the next order of a repeated shuffle and another not.
            options = tf.data.Options()
            options.experimental_optimization.inject_prefetch = False
            options.experimental_optimization.map_parallelization = False
            return shares.with_options(options)

        self._share = share_of(batches)
        self._first_share = self._share if report is None else share_of(sampled(batches, report))
        self._shapes = first_batch  # or types, from which Keras can build a model; None if a shape is unknown
        if first_batch is None:
            shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(self._share.element_spec)]
            if all(shape is not None and shape.rank is not None for shape in shapes):
                self._shapes = self._share.element_spec
        # Private: a dataset is created from its variant tensor; there is no public way to wrap one.
        super().__init__(self._share._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self._share]

    @property
    def element_spec(self) -> Any:
        return self._share.element_spec

    def __iter__(self) -> Iterator[Any]:
        if only_looks_at_shapes() and self._shapes is not None:
            return iter([self._shapes])
        self._opened()
        share, self._first_share = self._first_share, self._share
        return self._pass_over(share)

    def at(self, position: DataPosition) -> Iterator[Any]:
        """The rest of a pass. Skipped batches are read and discarded; skipped passes draw their shuffles."""
        self._opened()
        for _ in range(position.passes):
            iter(self._share)  # draws the order of its pass
        done = position.batches
        return self._pass_over(self._share.skip(done) if done else self._share)

    def _pass_over(self, share: tf.data.Dataset) -> Iterator[Any]:
        return iter(share) if self._shapes is None else DataPass(share, self._shapes)


def _divided(batches: tf.data.Dataset, rank: int, size: int, division: Division) -> tf.data.Dataset:
    """One worker's rows of every batch; what is not rows, whole."""

    def share(array: Any, first: Any, after: Any) -> Any:
        if not isinstance(array, tf.SparseTensor):
            return array[first:after]
        others = array.dense_shape[1:]
        bounds = tf.cast([first, after], tf.int64)
        start = tf.concat([bounds[:1], tf.zeros_like(others)], axis=0)
        return tf.sparse.slice(array, start, tf.concat([bounds[1:] - bounds[:1], others], axis=0))

    def take(*parts: Any) -> Any:
        # `map` passes the parts of a tuple as arguments. A tuple of one part stays one: its x may be a tuple.
        batch = parts if isinstance(batches.element_spec, tuple) else parts[0]
        flat = tf.nest.flatten(batch)
        bounds = rows_of_share(division.rows_in(flat), rank, size)
        shares = [share(leaf, *bounds) if division.kinds.get(i) else leaf for i, leaf in enumerate(flat)]
        return tf.nest.pack_sequence_as(batch, shares)

    return batches.map(take) if division.kinds else batches


class ArrayShare:
    """One worker's rows of every batch of arrays in memory, shuffled alike on every worker.

    Keras shuffles with an operation whose seed differs between workers, so some examples would be used twice
    in an epoch and others never; and with a global seed it repeats the same order in every epoch. The order
    here depends on the seed, the call of `fit` and the epoch. A worker gathers only its own rows: small ones
    directly, which is cheaper than passing them between threads, and large ones ahead in a pipeline.
    """

    def __init__(self, strategy: Any, call: KerasCall, compared: DataComparison) -> None:
        self._strategy = strategy
        self._compared = compared
        self._is_fit = call.method == "fit"
        self._passes = 0
        self._batch_size, self._shuffle = call.adapter.batch_size, call.adapter._shuffle
        with tf.device("CPU:0"):
            # Keras makes tuples of lists as well: tf.data takes a list for a tensor.
            arrays = keras.tree.lists_to_tuples(call.adapter._inputs)
            self._tensors = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        leaves = tf.nest.flatten(self._tensors)
        self._rows = int(leaves[0].shape[0])
        in_graph = getattr(call.model, "steps_per_execution", 1) > 1
        bytes_of_row = sum(leaf.dtype.size * int(np.prod(leaf.shape[1:])) for leaf in leaves)
        self._ahead = in_graph or bytes_of_row * self._batch_size // strategy.size > LARGE_SHARE_BYTES

    def __iter__(self) -> Iterator[Any]:
        if only_looks_at_shapes():
            rows = min(self._rows, self._batch_size)
            return iter([tf.nest.map_structure(lambda tensor: tensor[:rows], self._tensors)])
        self._compared.open_pass()
        known = self._is_fit and self._strategy.epoch is not None
        epoch = self._strategy.epoch if known else self._passes
        self._passes += 1
        return self._rest(epoch, 0)

    def at(self, position: DataPosition) -> Iterator[Any]:
        """The rest of a pass."""
        self._compared.open_pass()
        self._passes += position.passes + 1
        return self._rest(position.epoch, position.batches)

    def _rest(self, epoch: int, done: int) -> Iterator[Any]:
        order = epoch_order(self._rows, self._batch_size, self._shuffle, (*self._compared.seed, epoch))
        shares = shares_of_order(order, self._batch_size, self._strategy.rank, self._strategy.size)
        rest = itertools.islice(shares, done, None)
        return iter(self._pipeline(list(rest))) if self._ahead else map(self._gather, rest)

    def _gather(self, rows: Any) -> Any:
        with tf.device("CPU:0"):
            return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), self._tensors)

    def _pipeline(self, mine: list[np.ndarray[Any, Any]]) -> tf.data.Dataset:
        last = mine.pop() if mine and self._rows % self._batch_size else None
        columns = len(mine[0]) if mine else 0
        indices = tf.data.Dataset.from_tensor_slices(np.array(mine, np.int64).reshape(len(mine), columns))
        if last is not None:
            indices = indices.concatenate(tf.data.Dataset.from_tensors(last))
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False  # would copy the arrays
        options.autotune.enabled = False  # nothing to tune, and it needs a thread
        options.threading.private_threadpool_size = 1
        return indices.map(self._gather).prefetch(PREFETCHED_BATCHES).with_options(options)


def epoch_order(
    rows: int, batch_size: int, shuffle: bool | str, seed: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """The order in which one epoch uses the rows: the same on every worker with the same seed."""
    generator = np.random.default_rng(seed)
    order = np.arange(rows, dtype=np.int64)
    if shuffle == "batch":
        for first in range(0, rows, batch_size):
            generator.shuffle(order[first : first + batch_size])
    elif shuffle:
        generator.shuffle(order)
    return order


def shares_of_order(
    order: np.ndarray[Any, Any], batch_size: int, rank: int, size: int
) -> Iterator[np.ndarray[Any, Any]]:
    """The rows of one worker, batch by batch."""
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        yield batch[slice(*rows_of_share(len(batch), rank, size))]


class Inputs:
    """Divides the data of Keras calls among the workers, by its kind, and compares the workers' data."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._rank, self._size = strategy.rank, strategy.size
        self._generator: object = self  # differs from any context's generator
        self._seeds_drawn = 0
        self._warned: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()
        # How many passes used the orders of a repeated shuffle.
        self._passes: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()

    def share_of_arrays(self, call: KerasCall) -> ArrayShare | None:
        """None if the data is not arrays in memory whose rows can be gathered: dense, and no None."""
        leaves = tf.nest.flatten(getattr(call.adapter, "_inputs", None))
        gathers = all(isinstance(leaf, (np.ndarray, tf.Tensor)) and leaf.ndim > 0 for leaf in leaves)
        if not isinstance(call.adapter, ArrayDataAdapter) or not gathers:
            return None
        # The seed of their orders is the user's global one, if there is one, else random. It begins again
        # when the global seed is set again. No random generator of the user is changed.
        generator = getattr(context.context(), "_rng", None)  # absent until a seed is set
        if generator is not self._generator:
            self._generator, self._seeds_drawn = generator, 0
        self._seeds_drawn += 1
        chosen = context.global_seed()
        seed = secrets.randbits(32) if chosen is None else int(chosen) & 0xFFFFFFFF
        sample = Excerpt.of_arrays(call.data_name, call.adapter._inputs, [seed, self._seeds_drawn])
        return ArrayShare(self._strategy, call, self._comparison(call, sample))

    def share_of_batches(self, dataset: tf.data.Dataset, call: KerasCall, *, divided: bool = False) -> Share:
        adapter, what = call.adapter, call.data_name
        # Only a pass that is used to its end reads ahead. Otherwise reading ahead would draw the next
        # order from a shuffled, repeated dataset, and take batches from a generator.
        ahead = call.steps is None
        # `fit` continues one pass from epoch to epoch; the other methods start one each time.
        if isinstance(adapter, GeneratorDataAdapter) and call.method != "fit" and call.steps is not None:
            # Private: Keras reads a generator ahead, and loses what it has read ahead when a pass ends.
            (dataset,) = dataset._inputs()
            dataset, ahead = dataset.take(call.steps), True
        first_batch = next(iter(getattr(adapter, "_first_batches", None) or ()), None)
        if first_batch is not None:
            parts = {
                name: [np.asarray(leaf) for leaf in tf.nest.flatten(part, expand_composites=True)]
                for name, part in _parts_of(first_batch).items()
            }
            sample = Excerpt.of_batch(what, parts)
        else:
            # The order that Keras will draw for the batches of a PyDataset, with Python's generator.
            shuffled = isinstance(adapter, PyDatasetAdapter) and adapter.shuffle
            order = xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()) if shuffled else ""
            length = adapter.num_batches if call.steps is None else None
            sample = Excerpt(what, length=length, order=order, divided=divided)
        compared = self._comparison(call, sample)
        count_pass = self._pass_counter(dataset, what) if not ahead else lambda: None

        def opened() -> None:
            compared.open_pass()
            count_pass()

        is_unknown = dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY and adapter.num_batches is None
        if is_unknown and not divided:
            self._warn_of_unknown_length(call, dataset.element_spec)
        rank, size = (0, 1) if divided else (self._rank, self._size)
        report = compared.report_first_batch if first_batch is None and size > 1 else None
        return Share(dataset, rank, size, opened=opened, first_batch=first_batch, ahead=ahead, report=report)

    def share_of_loop(self, dataset: tf.data.Dataset) -> Share:
        """This worker's rows of every batch of a dataset for a custom training loop."""
        endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        opened = self._pass_counter(dataset, "dataset") if endless else lambda: None
        return Share(dataset, self._rank, self._size, opened=opened, ahead=not endless)

    def warn_once(self, model: keras.Model, subject: str, message: str) -> None:
        warned = self._warned.setdefault(model, set())
        if subject not in warned:
            warned.add(subject)
            logger.warning(message)

    def _pass_counter(self, dataset: tf.data.Dataset, what: str) -> Callable[[], None]:
        """Counts the passes over a repeated shuffle; worker 0 warns at the second one.

        In one process, what TensorFlow has read ahead when a pass ends decides which order the next pass
        gets. So there is no order of one process to reproduce.
        """
        shuffles = list(repeated_shuffles(dataset))

        def count_pass() -> None:
            for shuffle in shuffles:
                self._passes[shuffle] = self._passes.get(shuffle, 0) + 1
            if self._rank == 0 and any(self._passes[shuffle] == 2 for shuffle in shuffles):
                logger.warning(
                    "The %s is shuffled, then repeated, and a second pass over it begins before its end. Its "
                    "order depends on how far TensorFlow had read ahead: it may differ from that of one "
                    "process, and between workers if the pipeline itself reads ahead. Shuffle after repeat "
                    "instead: dataset.repeat().shuffle(n, seed=1) (docs/train.md, steps).",
                    what,
                )

        return count_pass

    def _warn_of_unknown_length(self, call: KerasCall, spec: Any) -> None:
        """Warns of what Keras in one process counts once more per pass, with a step that finds no data left.

        It does so only in a graph that is not compiled by XLA and has one step.
        """
        model, what = call.model, call.data_name
        counts = not (model.run_eagerly or model.jit_compile or model.steps_per_execution > 1)
        if self._rank != 0 or call.steps is not None or call.method == "predict" or not counts:
            return
        differing = []
        if call.method == "fit":
            differing.append("in optimizer.iterations, which learning rate schedules and Adam use")
        if any(array.fixed_length is not None for array in itertools.chain(*_arrays(spec))):
            differing.append("as a batch of zeros in the reported loss and metrics")
        if differing:
            self.warn_once(
                model,
                f"length of {what}",
                f"The length of the {what} is unknown. Keras in one process finds the end with a step that "
                f"has no data but counts, once per pass: {'; '.join(differing)}. replicast counts only "
                "batches that exist. For the numbers of one process, tell the length: "
                "dataset.apply(tf.data.experimental.assert_cardinality(n)), or pass the number of steps "
                "(docs/train.md, numbers).",
            )

    def _comparison(self, call: KerasCall, sample: Excerpt) -> DataComparison:
        warn = functools.partial(self.warn_once, call.model, call.method)
        return DataComparison(sample, self._strategy, warn)


def repeated_shuffles(dataset: tf.data.Dataset, *, repeated: bool = False) -> Iterator[tf.data.Dataset]:
    """The stages of a pipeline that draw a new order each time a later `repeat` starts again."""
    if repeated and isinstance(dataset, _ShuffleDataset) and dataset._reshuffle_each_iteration:
        yield dataset
    for source in dataset._inputs():
        yield from repeated_shuffles(source, repeated=repeated or isinstance(dataset, _RepeatDataset))
