"""Where `fit` goes on after a restore: the epoch, and the place in its data.

Keras' epoch iterator carries state from epoch to epoch: which iterator over the data it uses, and how many
batches it took from it. Both follow from how many epochs and batches are done, so they are not saved. They
are computed here, or found by reading where the length of the data is not known, and given to Keras before
its first epoch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras

# Private: what `fit` iterates over; there is no public way to begin in the middle of it.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from replicast.strategy.feeding import ArrayShare, Place, Share

POSITIONED = (ArrayDataAdapter, GeneratorDataAdapter, PyDatasetAdapter, TFDatasetAdapter)


@dataclass(frozen=True, slots=True)
class Lengths:
    """What decides where an epoch ends.

    Attributes:
        data: How many batches a pass over the data has; None if that is not known, or there is no end.
        epoch: `steps_per_epoch`; None if an epoch is a pass.
        execution: `steps_per_execution`.
    """

    data: int | None
    epoch: int | None
    execution: int = 1


class ResumedEpoch:
    """The epoch that `fit` begins with: it has only the batches that are left of it.

    Attributes:
        done: How many batches of it are not done again.
    """

    def __init__(
        self,
        iterator: EpochIterator | None = None,
        steps_per_epoch: int | None = None,
        done: int = 0,
        uncounted: int = 0,
    ) -> None:
        self._iterator = iterator
        self._steps_per_epoch = steps_per_epoch
        self._uncounted = uncounted
        self.done = done

    def ended(self) -> None:
        """The epochs after it are whole again. To be called in `on_epoch_end`."""
        if self._iterator is not None:
            self._iterator.steps_per_epoch = self._steps_per_epoch
            if self._steps_per_epoch is None:  # what Keras counted is the rest of a pass, not a pass
                self._iterator._num_batches = self._iterator.data_adapter.num_batches
            if self._uncounted:
                self._iterator.data_adapter._epoch += self._uncounted
        self._iterator = None


def start_at_epoch(model: keras.Model, epoch: int) -> None:
    """Has the `fit` that is about to begin start at this epoch. To be called in `on_train_begin`.

    Private: `fit` looks at this attribute after `on_train_begin`, because Keras' own BackupAndRestore
    callback sets it there; there is no public way. `tests/workers/test_private_apis.py` notices when it
    changes.
    """
    model._initial_epoch = epoch


def go_on(model: keras.Model, epoch: int, batch: int, warn: Callable[[str], None]) -> ResumedEpoch:
    """Has the `fit` that is about to begin go on with this batch. To be called in `on_train_begin`.

    Args:
        model: The model that is fitted.
        epoch: The epoch that training is in.
        batch: How many batches of it are done.
        warn: Told what cannot be positioned, and what to do.
    """
    start_at_epoch(model, epoch)
    model.distribute_strategy.take_start(model)  # for a `fit` without the callback
    if epoch == batch == 0:
        return ResumedEpoch()
    found = _running_fit(model)
    if found is None:
        warn(
            f"The data of this fit could not be found: it starts at its beginning, and not after {batch} "
            f"batches of epoch {epoch}. Call model.fit itself; if you do, report the version of Keras. "
            f"Received: Keras {keras.__version__}"
        )
        return ResumedEpoch()
    iterator, first_epoch = found
    adapter = iterator.data_adapter
    if not isinstance(adapter, POSITIONED):
        warn(
            "The order of this data is drawn outside of TensorFlow, Keras and Python: the batches that were "
            "used are skipped, but in the order of this life. Give fit a tf.data.Dataset, a "
            f"keras.utils.PyDataset or arrays. Received: {type(adapter).__name__}"
        )
    elif isinstance(adapter, PyDatasetAdapter) and _is_read_ahead_of_changes(
        adapter, iterator.steps_per_epoch
    ):
        warn(
            "This PyDataset has another order in each epoch, and Keras reads it ahead, so which order a "
            "batch had is not known: the data may not be where it was. Leave out steps_per_epoch and give it "
            "workers=1, or pass shuffle=False and have it stay the same in every epoch. "
            f"Received: {type(adapter.py_dataset).__name__}"
        )
    return _position(iterator, first_epoch, max(epoch - first_epoch, 0), batch, warn)


def pass_over(model: keras.Model, ended: int, warn: Callable[[str], None]) -> None:
    """Has the `fit` that is about to begin end at once. To be called in `on_train_begin`.

    A later `fit` may be given the same data: its orders are drawn as if this one had used it.

    Args:
        model: The model that is fitted.
        ended: The epoch after its last one.
        warn: Told what cannot be done, and what to do.
    """
    start_at_epoch(model, sys.maxsize)
    model.distribute_strategy.take_start(model)
    found = _running_fit(model)
    adapter = None if found is None else found[0].data_adapter
    if found is None or isinstance(adapter, GeneratorDataAdapter):
        warn(
            "This fit was done before the restore and is passed over, but its data cannot be moved to where "
            "it was left: a later fit that goes on with the same data gets other batches than it would have. "
            "Give each fit a generator of its own. "
            f"Received: {'data that could not be found' if adapter is None else 'a generator'}"
        )
        return
    iterator, first_epoch = found
    epochs = max(ended - first_epoch, 0)
    lengths = Lengths(iterator._num_batches, iterator.steps_per_epoch, iterator.steps_per_execution)
    if isinstance(adapter, PyDatasetAdapter):
        _repeat_epochs(adapter, epochs, lengths)
    elif isinstance(adapter, TFDatasetAdapter):
        _use_up(iterator, epochs, lengths)


def place_of(epochs: int, batch: int, lengths: Lengths) -> Place:
    """Where the data stands when so many epochs, and so many batches of the next one, are done.

    With `steps_per_epoch`, Keras goes on with the same iterator from epoch to epoch. An epoch in which it
    runs out ends there, and the next one has a new iterator. Without, each epoch has a new iterator; and
    where the length is known another one is made at its end, which is never used.
    """
    if lengths.epoch is None:
        made = 2 if lengths.data is not None else 1
        return Place(made * epochs, batch, epoch=epochs)
    whole = _up_to_executions(lengths.epoch, lengths.execution)
    if lengths.data is None:
        return Place(0, epochs * whole + batch, epoch=0)
    passes = used = opened = 0
    for epoch in range(epochs):
        used += min(whole, _up_to_executions(lengths.data - used, lengths.execution))
        if used >= lengths.data:
            passes, used, opened = passes + 1, 0, epoch
    return Place(passes, used + batch, epoch=opened)


def read_to(
    open_pass: Callable[[], Iterator[Any]], epochs: int, batch: int, steps: int | None
) -> tuple[Iterator[Any], int, bool]:
    """Does what Keras did with data of unknown length: an epoch in which it runs out ends there.

    Args:
        open_pass: Makes a new iterator over the data.
        epochs: How many epochs are done.
        batch: How many batches of the next one.
        steps: How many batches an epoch has; None for all that there are.

    Returns:
        The iterator, how many batches were taken from it, and whether all of `batch` were there.
    """
    current, used = open_pass(), 0
    for _ in range(epochs):
        taken = _take(current, steps)
        used += taken
        if taken != steps:
            current, used = open_pass(), 0
    taken = _take(current, batch)
    return current, used + taken, taken == batch


def _take(batches: Iterator[Any], count: int | None) -> int:
    taken = 0
    while taken != count:
        if next(batches, None) is None:
            break
        taken += 1
    return taken


def _up_to_executions(batches: int, execution: int) -> int:
    """An execution is never cut short but by the end of the data."""
    return -(-batches // execution) * execution


def _position(
    iterator: EpochIterator, first_epoch: int, epochs: int, batch: int, warn: Callable[[str], None]
) -> ResumedEpoch:
    """Gives Keras' iterator the state that it had: the iterator in use, and how much of it was used."""
    steps, adapter, data = iterator.steps_per_epoch, iterator.data_adapter, iterator._distributed_dataset
    lengths = Lengths(iterator._num_batches, steps, iterator.steps_per_execution)
    of_epoch = steps if steps is not None else lengths.data
    if of_epoch is not None and batch >= _up_to_executions(of_epoch, lengths.execution):
        warn(
            "The checkpoint was made with longer epochs than these, so the data is not where it was. Call "
            "fit with the batch size and the steps_per_epoch of before. "
            f"Received: {batch} batches done of an epoch that has {of_epoch}"
        )
        batch = of_epoch - 1
    place = place_of(epochs, batch, lengths)
    uncounted = _repeat_epochs(adapter, epochs, lengths) if isinstance(adapter, PyDatasetAdapter) else 0
    if _must_be_read(iterator):
        whole = None if steps is None else _up_to_executions(steps, lengths.execution)
        current, used, complete = read_to(lambda: iter(data), epochs, batch, whole)
        if not complete:
            warn(
                "The data has fewer batches than were used before the restore: the epoch ends at once. Give "
                "fit data that is the same in every life; a generator must be a new one. "
                f"Received: the end after {used} batches, and {batch} done of the epoch"
            )
    else:
        opened = replace(place, epoch=first_epoch + place.epoch)
        current, used = _opened_at(data, opened), place.batches
    iterator._current_iterator = current
    iterator._steps_seen = used
    # As long as steps_per_epoch is set, Keras uses the iterator that is there, and so many batches of it.
    iterator.steps_per_epoch = sys.maxsize if of_epoch is None else of_epoch - batch
    return ResumedEpoch(iterator, steps, batch, uncounted)


def _use_up(iterator: EpochIterator, epochs: int, lengths: Lengths) -> None:
    """Makes as many iterators over the data as Keras made in so many epochs: each draws an order."""
    data = iterator._distributed_dataset
    if _must_be_read(iterator):
        read_to(lambda: iter(data), epochs, 0, _up_to_executions(lengths.epoch or 0, lengths.execution))
        return
    made = place_of(epochs, 0, lengths).passes
    if epochs and lengths.epoch is not None:
        made += 1  # the one that is in use
    for _ in range(made):
        iter(data)


def _must_be_read(iterator: EpochIterator) -> bool:
    """Whether only reading tells where the data stands.

    A generator's passes share one generator; and data of unknown length may have begun anew in between.
    """
    if isinstance(iterator.data_adapter, GeneratorDataAdapter):
        return True
    if iterator.steps_per_epoch is None or not isinstance(iterator.data_adapter, TFDatasetAdapter):
        return False
    return iterator._num_batches is None and not _without_end(iterator._distributed_dataset)


def _is_read_ahead_of_changes(adapter: PyDatasetAdapter, steps: int | None) -> bool:
    """Whether batches are read before the epoch that uses them begins, and would be others after."""
    kind = type(adapter.py_dataset)
    changes = kind.on_epoch_end is not keras.utils.PyDataset.on_epoch_end
    changes = changes or kind.on_epoch_begin is not keras.utils.PyDataset.on_epoch_begin
    if adapter.enqueuer is not None:
        return bool(changes or adapter.shuffle)
    return changes and steps is not None and steps != adapter.num_batches


def _without_end(data: Any) -> bool:
    return isinstance(data, Share) and data.is_without_end()


def _opened_at(data: Any, place: Place) -> Iterator[Any]:
    if isinstance(data, Share | ArrayShare):
        return data.at(place)
    for _ in range(place.passes):  # TensorFlow's own distribution: it has no other way to skip
        iter(data)
    current: Iterator[Any] = iter(data)
    _take(current, place.batches)
    return current


def _repeat_epochs(adapter: PyDatasetAdapter, epochs: int, lengths: Lengths) -> int:
    """Calls what Keras called in the epochs before, and draws the orders of batches that it drew.

    Not the adapter's own methods, which would start threads that read ahead. Keras 3.16 draws an order from
    the number of the epoch that first reads it, which the adapter counts.

    Returns:
        How many epochs the adapter has still to count, once the pass that goes on has its order.
    """
    begins = [place_of(epoch, 0, lengths).batches == 0 for epoch in range(epochs + 1)]
    orders = sum(begins) - 1  # the pass that goes on draws its own, when it is read
    for begins_pass in begins[:-1]:
        adapter.py_dataset.on_epoch_begin()
        if begins_pass and orders > 0 and adapter.shuffle and lengths.data is not None:
            orders -= 1
            random.shuffle([*range(lengths.data)])  # what Keras 3.16 does not look at
        adapter.py_dataset.on_epoch_end()
    if not hasattr(adapter, "_epoch"):
        return 0
    read_first = max(epoch for epoch, begins_pass in enumerate(begins) if begins_pass)
    adapter._epoch += read_first
    return epochs - read_first


def callbacks_of(model: keras.Model) -> list[keras.callbacks.Callback] | None:
    """The callbacks of the `fit` that called our caller, in their order; who is added to them is called last.

    Private: `fit` keeps them in a local variable only.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            found = frame.f_locals.get("callbacks")
            if isinstance(found, keras.callbacks.CallbackList):
                called: list[keras.callbacks.Callback] = found.callbacks
                return called
        frame = frame.f_back
    return None


def _running_fit(model: keras.Model) -> tuple[EpochIterator, int] | None:
    """The iterator of the `fit` that called our caller, and the epoch it was told to begin with.

    Private: `fit` keeps both in local variables only.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            iterator = frame.f_locals.get("epoch_iterator")
            if isinstance(iterator, EpochIterator):
                return iterator, int(frame.f_locals.get("initial_epoch", 0))
        frame = frame.f_back
    return None
