"""Resumes `fit`, or a custom training loop, after a restore: sets the epoch, and the position in its data.

Keras' epoch iterator keeps state from epoch to epoch: its current iterator over the data, and how many
batches it has taken from it. Both follow from the number of epochs and batches done, so they are not saved.
They are computed here, or found by reading if the length of the data is unknown, and set before Keras' first
epoch.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# Private, with the attributes of iterator and adapters that are read and set below: what `fit` iterates over.
# Keras has no public way to start in the middle of an epoch.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from replicast.training.feeding import ArrayShare, DataPosition, Share
from replicast.training.keras_call import locals_of_fit

POSITIONED = (ArrayDataAdapter, GeneratorDataAdapter, PyDatasetAdapter, TFDatasetAdapter)
Batches = Any  # any iterable: best a `tf.data.Dataset`, but also a distributed dataset, a list or a generator


class Lengths(NamedTuple):
    """The lengths that determine where an epoch ends."""

    data: int | None
    epoch: int | None
    execution: int = 1

    def up_to_executions(self, batches: int) -> int:
        """Rounds up to whole executions: only the end of the data shortens one."""
        return -(-batches // self.execution) * self.execution


@dataclass(slots=True)
class ResumedEpoch:
    """The first epoch of a resumed `fit`, which has only the remaining batches."""

    iterator: EpochIterator | None = None
    steps_per_epoch: int | None = None
    uncounted: int = 0

    def ended(self) -> None:
        """Makes the following epochs complete again. Call it in `on_epoch_end`."""
        if self.iterator is not None:
            self.iterator.steps_per_epoch = self.steps_per_epoch
            if self.steps_per_epoch is None:  # Keras has counted the rest of a pass, not a whole pass
                self.iterator._num_batches = self.iterator.data_adapter.num_batches
            if self.uncounted:
                self.iterator.data_adapter._epoch += self.uncounted
        self.iterator = None


def start_at_epoch(model: keras.Model, epoch: int) -> None:
    """Makes the starting `fit` begin at this epoch. Call it in `on_train_begin`.

    Private: `fit` reads this attribute after `on_train_begin`, because Keras' own BackupAndRestore callback
    sets it there; there is no public way. `tests/workers/test_private_apis.py` notices when it changes.
    """
    model._initial_epoch = epoch


def start_tf_keras_at(model: Any, epoch: int, batch: int = 0) -> None:
    """As `start_at_epoch`, for a model of tf_keras; 0 for wherever the script says.

    Private: tf_keras' own BackupAndRestore sets this attribute in `on_train_begin`, and `fit` asks it then.
    """
    start = types.SimpleNamespace(maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, batch))
    model._training_state = start if epoch or batch else None


def resume_fit(model: keras.Model, epoch: int, batch: int, warn: Callable[[str], None]) -> ResumedEpoch:
    """Makes the starting `fit` continue at this batch. Call it in `on_train_begin`."""
    start_at_epoch(model, epoch)
    if epoch == batch == 0:
        return ResumedEpoch()
    found = _running_fit(model)
    if found is None:
        warn(
            f"The data of this fit could not be found: it starts from the beginning, not after {batch} "
            f"batches of epoch {epoch + 1}. Call model.fit directly; if you do, report this version of "
            f"Keras. Received: Keras {keras.__version__}"
        )
        return ResumedEpoch()
    iterator, first_epoch = found
    adapter = iterator.data_adapter
    if not isinstance(adapter, POSITIONED) or _is_read_ahead_of_changes(adapter, iterator.steps_per_epoch):
        warn(
            "The order of this data may not be as before the restart: the batches that were used are "
            "skipped, but in the order after it. Pass a tf.data.Dataset, arrays, or a keras.utils.PyDataset "
            f"with workers=1 and without steps_per_epoch to fit. Received: {type(adapter).__name__}"
        )
    # The state of Keras' iterator: the current iterator, and how much of it was used.
    epochs, steps, data = max(epoch - first_epoch, 0), iterator.steps_per_epoch, iterator._distributed_dataset
    lengths = Lengths(iterator._num_batches, steps, iterator.steps_per_execution)
    of_epoch = steps if steps is not None else lengths.data
    if of_epoch is not None and batch >= lengths.up_to_executions(of_epoch):
        warn(
            "The checkpoint was saved with longer epochs than these, so the data is at another position. "
            "Call fit with the same batch size and steps_per_epoch as before. "
            f"Received: {batch} batches done of an epoch that has {of_epoch}"
        )
        batch = of_epoch - 1
    position = data_position(epochs, batch, lengths)
    uncounted = _repeat_epochs(adapter, epochs, lengths) if isinstance(adapter, PyDatasetAdapter) else 0
    if _must_be_read(iterator):
        whole = None if steps is None else lengths.up_to_executions(steps)
        current, used, complete = read_to(lambda: iter(data), epochs, batch, whole)
        if not complete:
            warn(
                "The data has fewer batches than were used before the restore: the epoch ends at once. Pass "
                "the same data to fit after every restart; a generator must be a new one. "
                f"Received: {used} batches of data, {batch} batches done of the epoch"
            )
    else:
        used = position.batches
        if isinstance(data, Share | ArrayShare):
            current = data.at(position._replace(epoch=first_epoch + position.epoch))
        else:  # data distributed by TensorFlow: there is no other way to skip
            for _ in range(position.passes):
                iter(data)
            current = iter(data)
            _take(current, used)
    iterator._current_iterator = current
    iterator._steps_seen = used
    # While steps_per_epoch is set, Keras uses the current iterator, and that many batches of it.
    iterator.steps_per_epoch = sys.maxsize if of_epoch is None else of_epoch - batch
    return ResumedEpoch(iterator, steps, uncounted)


def skip_fit(model: keras.Model, ended: int, warn: Callable[[str], None]) -> None:
    """Makes the starting `fit` end at once. Call it in `on_train_begin`.

    A later `fit` may use the same data, so the data draws its orders as if this `fit` had used it.
    """
    start_at_epoch(model, sys.maxsize)
    found = _running_fit(model)
    adapter = None if found is None else found[0].data_adapter
    if found is None or isinstance(adapter, GeneratorDataAdapter):
        warn(
            "This fit was complete before the restore and is skipped, but its data cannot be moved to its "
            "position after that fit: a later fit on the same data gets other batches than without a "
            "restart. Pass a new generator to each fit. "
            f"Received: {'data that could not be found' if adapter is None else 'a generator'}"
        )
        return
    iterator, first_epoch = found
    epochs = max(ended - first_epoch, 0)
    lengths = Lengths(iterator._num_batches, iterator.steps_per_epoch, iterator.steps_per_execution)
    if isinstance(adapter, PyDatasetAdapter):
        _repeat_epochs(adapter, epochs, lengths)
    elif isinstance(adapter, TFDatasetAdapter):
        # Creates as many iterators over the data as Keras did in these epochs: each draws an order.
        data = iterator._distributed_dataset
        if _must_be_read(iterator):
            read_to(lambda: iter(data), epochs, 0, lengths.up_to_executions(lengths.epoch or 0))
            return
        with_the_current_one = int(epochs > 0 and lengths.epoch is not None)
        for _ in range(data_position(epochs, 0, lengths).passes + with_the_current_one):
            iter(data)


def data_position(epochs: int, batch: int, lengths: Lengths) -> DataPosition:
    """The position in the data after a number of epochs and some batches of the next one.

    With `steps_per_epoch`, Keras keeps the same iterator from epoch to epoch. When it runs out, the epoch
    ends there, and the next one creates a new iterator. Without `steps_per_epoch`, each epoch creates a new
    iterator; if the length is known, Keras creates another one at the end of the epoch, which is never used.
    """
    if lengths.epoch is None:
        per_epoch = 2 if lengths.data is not None else 1
        return DataPosition(per_epoch * epochs, batch, epoch=epochs)
    whole = lengths.up_to_executions(lengths.epoch)
    if lengths.data is None:
        return DataPosition(0, epochs * whole + batch, epoch=0)
    passes = used = opened = 0
    for epoch in range(epochs):
        used += min(whole, lengths.up_to_executions(lengths.data - used))
        if used >= lengths.data:
            passes, used, opened = passes + 1, 0, epoch
    return DataPosition(passes, used + batch, epoch=opened)


def read_to(
    open_pass: Callable[[], Iterator[Any]], epochs: int, batch: int, steps: int | None
) -> tuple[Iterator[Any], int, bool]:
    """Reads data of unknown length as Keras did: an epoch in which it runs out ends there."""
    current, used = open_pass(), 0
    for _ in range(epochs):
        taken = _take(current, steps)
        used += taken
        if taken != steps:
            current, used = open_pass(), 0
    taken = _take(current, batch)
    return current, used + taken, taken == batch


def _take(batches: Iterator[Any], count: int | None) -> int:
    return sum(1 for _ in itertools.islice(batches, count))


def _must_be_read(iterator: EpochIterator) -> bool:
    """Whether only reading finds the position: all passes of a generator share it, and data of unknown length
    may have started again in between.
    """
    if isinstance(iterator.data_adapter, GeneratorDataAdapter):
        return True
    if iterator.steps_per_epoch is None or not isinstance(iterator.data_adapter, TFDatasetAdapter):
        return False
    data = iterator._distributed_dataset
    is_infinite = isinstance(data, Share) and data.cardinality() == tf.data.INFINITE_CARDINALITY
    return iterator._num_batches is None and not is_infinite


def _is_read_ahead_of_changes(adapter: Any, steps: int | None) -> bool:
    """Whether an epoch's batches are read before its start, and depend on what happens at its start."""
    if not isinstance(adapter, PyDatasetAdapter):
        return False
    kind, stock = type(adapter.py_dataset), keras.utils.PyDataset
    changes = (kind.on_epoch_begin, kind.on_epoch_end) != (stock.on_epoch_begin, stock.on_epoch_end)
    if adapter.enqueuer is not None:
        return bool(changes or adapter.shuffle)
    return changes and steps is not None and steps != adapter.num_batches


def _repeat_epochs(adapter: PyDatasetAdapter, epochs: int, lengths: Lengths) -> int:
    """Repeats Keras' calls of the earlier epochs, and draws the same orders of batches.

    Does not call the adapter's own methods, which would start threads that read ahead. Keras 3.16 derives an
    order from the number of the epoch that first reads it, which the adapter counts.
    """
    begins = [data_position(epoch, 0, lengths).batches == 0 for epoch in range(epochs + 1)]
    orders = sum(begins) - 1  # the resumed pass draws its own when it is read
    for begins_pass in begins[:-1]:
        adapter.py_dataset.on_epoch_begin()
        if begins_pass and orders > 0 and adapter.shuffle and lengths.data is not None:
            orders -= 1
            random.shuffle([*range(lengths.data)])  # Keras 3.16 does not use Python's generator
        adapter.py_dataset.on_epoch_end()
    if not hasattr(adapter, "_epoch"):
        return 0
    read_first = max(epoch for epoch, begins_pass in enumerate(begins) if begins_pass)
    adapter._epoch += read_first
    return epochs - read_first


def callbacks_of(model: keras.Model) -> list[keras.callbacks.Callback] | None:
    """The list of callbacks of the running `fit`, in order; a callback appended to it is called last."""
    found = locals_of_fit(model).get("callbacks")
    return found.callbacks if isinstance(found, keras.callbacks.CallbackList) else None


def _running_fit(model: keras.Model) -> tuple[EpochIterator, int] | None:
    """The iterator of the running `fit`, and its `initial_epoch`."""
    found = locals_of_fit(model)
    iterator = found.get("epoch_iterator")
    return (iterator, int(found.get("initial_epoch", 0))) if isinstance(iterator, EpochIterator) else None


# A custom training loop.


def length_of(batches: Batches) -> int:
    """The number of batches of a pass; negative if it is unknown."""
    if isinstance(batches, tf.data.Dataset):
        return int(batches.cardinality())
    return len(batches) if isinstance(batches, Sequence) else -1


def rest_of(batches: Batches, passes: int, done: int) -> Batches:
    if not isinstance(batches, Sequence | Iterator):
        for _ in range(passes):
            iter(batches)  # each pass draws an order: skip those of the earlier passes
    if not done:
        return batches
    if isinstance(batches, tf.data.Dataset):
        return batches.skip(done)
    return itertools.islice(batches, done, None)


def position_problem(batches: Batches) -> str:
    """Why this data may be at another position after a restart, and what to do; empty if it will not."""
    if isinstance(batches, tf.data.Dataset | tf.distribute.DistributedDataset | Sequence):
        return ""
    kind = "an iterator, which a restart starts again" if isinstance(batches, Iterator) else "an object"
    return (
        "This data cannot be positioned reliably: after a restart, resume() reads and discards the batches "
        "of the pass that are done. That is correct only if the script creates the data anew for each pass, "
        "with the same batches after every restart. Pass a tf.data.Dataset or a list to resume(). "
        f"Received: {kind} ({type(batches).__name__})"
    )
