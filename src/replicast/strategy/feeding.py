"""Each worker's share of every batch, without a transfer per step.

TensorFlow's distributed iterator asks all workers before every step whether each still has data, which costs
more than a whole step of a small model. Here every worker reads the same batches and takes its own rows of
each: worker r of N gets rows B*r//N to B*(r+1)//N of a batch of B rows. So each example is used once, also in
the last short batch, and all workers run out of data at the same step without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: the class of `iter(dataset)`, the only kind of iterator that Keras passes to its graphs.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from replicast.strategy.caller import only_looks_at_shapes
from replicast.strategy.rows import Division, length_of
from replicast.strategy.samples import sampled

PREFETCHED_BATCHES = 2
LARGE_SHARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """Where a pass over the data continues.

    Attributes:
        epoch: The epoch of the pass.
        batch: How many of its batches to skip.
        batches: How many batches were used in all epochs, for infinite data.
    """

    epoch: int
    batch: int
    batches: int


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The position of a training in its data, in terms of Keras' iterators.

    Attributes:
        passes: How many iterators were created before the current one.
        batches: How many batches were taken from the current one.
        epoch: The epoch in which the current one was created.
    """

    passes: int
    batches: int
    epoch: int


def from_the_start() -> Start | None:
    """The pass starts at its first batch."""
    return None


def rows_of_share(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """The first row of a worker's share of `rows` rows, and the row after its last."""
    return rows * rank // size, rows * (rank + 1) // size


class Pass(OwnedIterator):
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

    Args:
        batches: The batches of the whole job.
        rank: This worker.
        size: The number of workers.
        opened: Called before each pass.
        start: Returns where the next pass continues.
        first_batch: The first batch, if it is known, from which Keras builds the model.
        at_most: How many batches of a pass are used; None if Keras may use all.
        ahead: Whether to read ahead. Only correct if a pass is used to its end: reading on draws the order
            of the next repetition from a shuffled dataset, and takes batches away from a generator.
        report: Called with the first batch of the first pass.
    """

    def __init__(
        self,
        batches: tf.data.Dataset,
        rank: int,
        size: int,
        *,
        opened: Callable[[], object],
        start: Callable[[], Start | None] = from_the_start,
        first_batch: Any = None,
        at_most: int | None = None,
        ahead: bool = True,
        report: Callable[[Any], None] | None = None,
    ) -> None:
        self._batches = batches if at_most is None else batches.take(at_most)
        self._opened = opened
        self._start = start

        division = Division(batches.element_spec, first_batch) if size > 1 else None

        def share_of(batches: tf.data.Dataset) -> tf.data.Dataset:
            shares = batches if division is None else _divided(batches, rank, size, division)
            return shares.prefetch(PREFETCHED_BATCHES) if ahead else shares

        self._share = share_of(self._batches)
        self._first_share = self._share if report is None else share_of(sampled(self._batches, report))
        self._shapes = _shapes(self._share.element_spec) if first_batch is None else first_batch
        # Private: a dataset is created from its variant tensor; there is no public way to wrap one.
        super().__init__(self._share._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self._share]

    @property
    def element_spec(self) -> Any:
        """The types of this worker's part of a batch."""
        return self._share.element_spec

    def __iter__(self) -> Iterator[Any]:
        if only_looks_at_shapes() and self._shapes is not None:
            return iter([self._shapes])
        self._opened()
        start = self._start()
        if start is not None:
            return self._pass_over(self._from(start))
        share, self._first_share = self._first_share, self._share
        return self._pass_over(share)

    def at(self, position: DataPosition) -> Iterator[Any]:
        """The rest of a pass. Skipped batches are read and discarded; skipped passes draw their shuffles."""
        self._opened()
        for _ in range(position.passes):
            iter(self._share)  # draws the order of its pass
        return self._pass_over(self._share.skip(position.batches) if position.batches else self._share)

    def _pass_over(self, share: tf.data.Dataset) -> Iterator[Any]:
        return iter(share) if self._shapes is None else Pass(share, self._shapes)

    def is_infinite(self) -> bool:
        """Whether the data is infinite."""
        return bool(self._share.cardinality() == tf.data.INFINITE_CARDINALITY)

    def _from(self, start: Start) -> tf.data.Dataset:
        """The rest of the pass, for a `fit` without the callback, which starts with its first epoch."""
        if self.is_infinite():
            return self._share.skip(start.batches)
        # If the length is known, Keras creates two iterators per epoch and uses the first.
        per_epoch = 2 if self._share.cardinality() != tf.data.UNKNOWN_CARDINALITY else 1
        for _ in range(per_epoch * start.epoch):
            iter(self._share)
        return self._share.skip(start.batch)


class ArrayShare:
    """One worker's rows of every batch of arrays in memory, shuffled alike on every worker.

    Keras shuffles with an operation whose seed differs between workers, so some examples would be used twice
    in an epoch and others never; and with a global seed it repeats the same order in every epoch. The order
    here depends on the seed, the call of `fit` and the epoch. A worker gathers only its own rows: small ones
    directly, which is cheaper than passing them between threads, and large ones ahead in a pipeline.
    """

    def __init__(
        self,
        arrays: Any,
        *,
        rank: int,
        size: int,
        batch_size: int,
        shuffle: bool | str,
        seed: tuple[int, ...],
        opened: Callable[[], object],
        in_graph: bool,
        start: Callable[[], Start | None] = from_the_start,
        epoch: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._start = start
        self._epoch_told = epoch
        with tf.device("CPU:0"):
            # Keras makes tuples of lists as well: tf.data takes a list for a tensor.
            self._tensors = tf.nest.map_structure(tf.convert_to_tensor, keras.tree.lists_to_tuples(arrays))
        leaves = tf.nest.flatten(self._tensors)
        self._rows = int(leaves[0].shape[0])
        self._rank = rank
        self._size = size
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._opened = opened
        self._epoch = 0
        bytes_of_row = sum(leaf.dtype.size * int(np.prod(leaf.shape[1:])) for leaf in leaves)
        self._ahead = in_graph or bytes_of_row * batch_size // size > LARGE_SHARE_BYTES

    def __iter__(self) -> Iterator[Any]:
        if only_looks_at_shapes():
            rows = min(self._rows, self._batch_size)
            return iter([tf.nest.map_structure(lambda tensor: tensor[:rows], self._tensors)])
        self._opened()
        told, start = self._epoch_told(), self._start()
        epoch = self._epoch if told is None else told
        self._epoch += 1
        shares = self._shares(epoch)
        if start is not None:  # Keras accepts an early end of a pass only from a TensorFlow iterator
            return iter(self._pipeline(itertools.islice(shares, start.batch, None)))
        return iter(self._pipeline(shares)) if self._ahead else map(self._gather, shares)

    def at(self, position: DataPosition) -> Iterator[Any]:
        """The rest of a pass."""
        self._opened()
        self._epoch += position.passes + 1
        rest = itertools.islice(self._shares(position.epoch), position.batches, None)
        return iter(self._pipeline(rest)) if self._ahead else map(self._gather, rest)

    def _shares(self, epoch: int) -> Iterator[np.ndarray[Any, Any]]:
        order = epoch_order(self._rows, self._batch_size, self._shuffle, (*self._seed, epoch))
        return shares_of_order(order, self._batch_size, self._rank, self._size)

    def _gather(self, rows: Any) -> Any:
        with tf.device("CPU:0"):
            return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), self._tensors)

    def _pipeline(self, shares: Iterator[np.ndarray[Any, Any]]) -> tf.data.Dataset:
        mine = list(shares)
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
    random = np.random.default_rng(seed)
    order = np.arange(rows, dtype=np.int64)
    if shuffle == "batch":
        for first in range(0, rows, batch_size):
            random.shuffle(order[first : first + batch_size])
    elif shuffle:
        random.shuffle(order)
    return order


def shares_of_order(
    order: np.ndarray[Any, Any], batch_size: int, rank: int, size: int
) -> Iterator[np.ndarray[Any, Any]]:
    """The rows of one worker, batch by batch."""
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        yield batch[slice(*rows_of_share(len(batch), rank, size))]


def can_gather(arrays: Any) -> bool:
    """Whether `ArrayShare` supports these: only dense arrays, no None."""
    leaves = tf.nest.flatten(arrays)
    return all(isinstance(leaf, (np.ndarray, tf.Tensor)) and leaf.ndim > 0 for leaf in leaves)


def _divided(batches: tf.data.Dataset, rank: int, size: int, division: Division) -> tf.data.Dataset:
    """One worker's rows of every batch; what is not rows, whole."""

    def part(array: Any, rows: tf.Tensor | int, has_rows: Any) -> Any:
        if has_rows is False:
            return array
        first, after = rows_of_share(rows, rank, size)
        if has_rows is not True:
            first, after = tf.where(has_rows, first, 0), tf.where(has_rows, after, length_of(array))
        if not isinstance(array, tf.SparseTensor):
            return array[first:after]
        others = array.dense_shape[1:]
        bounds = tf.cast([first, after], tf.int64)
        start = tf.concat([bounds[:1], tf.zeros_like(others)], axis=0)
        return tf.sparse.slice(array, start, tf.concat([bounds[1:] - bounds[:1], others], axis=0))

    def take(told: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        flat = tf.nest.flatten(batch)
        rows, has_rows, told = division.tell(flat, told)
        known = rows if division.rows is None else division.rows
        shares = [part(leaf, known, has_rows.get(place, False)) for place, leaf in enumerate(flat)]
        return told, tf.nest.pack_sequence_as(batch, shares)

    if not division.kinds:
        return batches
    nothing = np.zeros(1 + max(division.kinds), np.int32)
    if None in division.kinds.values():
        return batches.scan(nothing, take)
    # `map` passes the parts of a tuple as arguments. A tuple with one part stays one: its x may be a tuple.
    of_tuples = isinstance(batches.element_spec, tuple)
    return batches.map(lambda *parts: take(tf.constant(nothing), parts if of_tuples else parts[0])[1])


def _shapes(spec: Any) -> Any:
    """Shapes and dtypes, from which Keras can build a model; None if a shape is unknown."""
    leaves = tf.nest.flatten(spec)
    if any(getattr(leaf, "shape", None) is None or leaf.shape.rank is None for leaf in leaves):
        return None
    return spec
