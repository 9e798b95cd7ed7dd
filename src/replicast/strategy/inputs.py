"""Divides the data of a Keras call among the workers, by the kind of data."""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

# Private: the module whose functions call callbacks, to recognize its frames.
from keras.src.callbacks import callback_list

# Private: Keras' adapters of its inputs, to distinguish the kinds of data.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from replicast.coordination import Coordination
from replicast.strategy.caller import KerasCall
from replicast.strategy.feeding import ArrayShare, Share, Start, can_gather, from_the_start, rows_of_share
from replicast.strategy.samples import (
    WHAT,
    Comparison,
    Sample,
    order_of_batches,
    sample_of_arrays,
    sample_of_batch,
)
from replicast.strategy.seeds import Seeds

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Divides the data of Keras calls among the workers, and compares the workers' data.

    Attributes:
        rank: This worker.
        size: The number of workers.
        coordination: The keys that all workers share.
        meet: Opens a pass together with the other workers; exchanges a message with them.
        check_job: Raises if the job has failed.
        next_name: Returns names that are the same on all workers at the same line of the script.
        seeds: Seeds to shuffle arrays alike everywhere.
        take_start: Returns once where the data of a model's `fit` continues.
        epoch: Returns the current epoch of `fit`, if it is known.
    """

    rank: int
    size: int
    coordination: Coordination
    meet: Callable[[str], dict[int, str]]
    check_job: Callable[[], None]
    next_name: Callable[[str], str]
    seeds: Seeds
    take_start: Callable[[keras.Model], Start | None]
    epoch: Callable[[], int | None]
    _warned: weakref.WeakKeyDictionary[keras.Model, set[str]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def are_arrays(self, call: KerasCall) -> bool:
        """Whether the data of this call is arrays in memory, whose rows can be gathered."""
        return isinstance(call.adapter, ArrayDataAdapter) and can_gather(call.adapter._inputs)

    def share_of_arrays(self, call: KerasCall) -> ArrayShare:
        """This worker's rows of the arrays of a call."""
        adapter = call.adapter
        sample = sample_of_arrays(_what(call), adapter._inputs)
        compared = self._comparison(call, sample)
        self._explain_errors(call, lambda: min(sample.length or 0, adapter.batch_size))
        return ArrayShare(
            adapter._inputs,
            rank=self.rank,
            size=self.size,
            batch_size=adapter.batch_size,
            shuffle=adapter._shuffle,
            seed=self.seeds.next(),
            opened=compared.open_pass,
            start=self._start_of(call),
            epoch=self.epoch if call.method == "fit" else lambda: None,
            in_graph=getattr(call.model, "steps_per_execution", 1) > 1,
        )

    def share_of_batches(self, dataset: tf.data.Dataset, call: KerasCall, *, divided: bool = False) -> Share:
        """This worker's rows of every batch of a dataset.

        Args:
            dataset: The batches, as the user passed them or as Keras created them.
            call: The call that uses them.
            divided: The user divided the data by rank: this worker uses all rows of its batches.
        """
        first_batches = getattr(call.adapter, "_first_batches", None)
        at_most = None
        # `fit` continues one pass from epoch to epoch; the other methods start one each time.
        if isinstance(call.adapter, GeneratorDataAdapter) and call.method != "fit" and call.steps is not None:
            # Private: Keras reads a generator ahead, and loses what it has read ahead when a pass ends.
            (dataset,) = dataset._inputs()
            at_most = call.steps
        compared = self._comparison(call, _sample_of_pipeline(call, first_batches, divided=divided))
        if not divided:
            known = _static_rows(first_batches[0] if first_batches else dataset.element_spec)
            self._explain_errors(call, lambda: known or compared.first_rows)
        return Share(
            dataset,
            0 if divided else self.rank,
            1 if divided else self.size,
            opened=compared.open_pass,
            start=self._start_of(call),
            first_batch=first_batches[0] if first_batches else None,
            at_most=at_most,
            ahead=call.steps is None or at_most is not None,
            report=None if first_batches or divided or self.size == 1 else compared.report_first_batch,
        )

    def share_of_loop(self, dataset: tf.data.Dataset) -> Share:
        """This worker's rows of every batch of a dataset for a custom training loop."""
        endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        return Share(dataset, self.rank, self.size, opened=lambda: None, ahead=not endless)

    def _explain_errors(self, call: KerasCall, rows: Callable[[], int | None]) -> None:
        """Adds to an error in a step of this call that the batch was divided.

        A model in whose code the size of a batch is fixed, or whose data has a first axis that is not rows,
        fails with an error of TensorFlow about shapes that says nothing about it.

        Args:
            call: The call.
            rows: Returns the number of rows of a batch, if it is known.
        """
        if self.size == 1:
            return
        kind, iterator = type(call.iterator), weakref.ref(call.iterator)  # which holds this function

        @contextlib.contextmanager
        def explained() -> Iterator[None]:
            with kind.catch_stop_iteration(iterator()):
                try:
                    yield
                except (ValueError, tf.errors.InvalidArgumentError) as error:
                    note = _note(rows(), self.rank, self.size)
                    if note not in getattr(error, "__notes__", ()) and not _of_a_callback(error):
                        error.add_note(note)
                    raise

        call.iterator.catch_stop_iteration = explained

    def _comparison(self, call: KerasCall, sample: Sample) -> Comparison:
        return Comparison(
            sample,
            rank=self.rank,
            size=self.size,
            meet=self.meet,
            coordination=self.coordination,
            key=f"replicast/{self.next_name('first-batch')}",
            check_job=self.check_job,
            warn=functools.partial(self.warn_once, call.model, call.method),
        )

    def warn_once(self, model: keras.Model, subject: str, message: str) -> None:
        """Logs a warning about a model, unless it was logged before."""
        warned = self._warned.setdefault(model, set())
        if subject not in warned:
            warned.add(subject)
            logger.warning(message)

    def _start_of(self, call: KerasCall) -> Callable[[], Start | None]:
        return functools.partial(self.take_start, call.model) if call.method == "fit" else from_the_start


def _sample_of_pipeline(call: KerasCall, first_batches: Any, *, divided: bool) -> Sample:
    """The sample that is known before the first pass."""
    what, adapter = _what(call), call.adapter
    if first_batches:
        return sample_of_batch(what, first_batches[0])
    shuffled = isinstance(adapter, PyDatasetAdapter) and adapter.shuffle
    return Sample(
        what,
        length=adapter.num_batches if call.steps is None else None,
        order=order_of_batches() if shuffled else "",
        divided=divided,
    )


def _static_rows(batch: Any) -> int | None:
    """The number of rows of a batch, or of its types, if it is known."""
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(batch)]
    return next((shape[0] for shape in map(tf.TensorShape, shapes) if shape.rank), None)


def _note(rows: int | None, rank: int, size: int) -> str:
    first, after = rows_of_share(rows or 0, rank, size)
    divided = f"each batch among {size} workers" + (
        f": of {rows} rows, worker {rank} has {after - first}" if rows else ""
    )
    return (
        f"replicast has divided {divided}. If the code of the model expects all rows of a batch (a batch "
        "size that is fixed in it, or a first axis that is not rows), take the size from the input, as with "
        "keras.ops.shape(x)[0], or feed each worker batches of its own: a tf.data.Dataset whose "
        "auto_shard_policy is OFF."
    )


def _of_a_callback(error: BaseException) -> bool:
    """Whether code of the user that is not the model raised an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == callback_list.__name__ for frame, _ in frames)


def _what(call: KerasCall) -> str:
    return WHAT.get(call.method, f"data for {call.method}")
