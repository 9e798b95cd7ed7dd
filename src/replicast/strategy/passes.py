"""Positions the data of a custom training loop after a restore."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

Batches = Any
"""Any iterable: preferably a `tf.data.Dataset`, but also a distributed dataset, a list or a generator."""


class Rest(Iterable[Any]):
    """A pass without its first batches, which are read and discarded."""

    def __init__(self, batches: Iterable[Any], done: int) -> None:
        self._batches = batches
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._batches), self._done, None)


def length_of(batches: Batches) -> int:
    """The number of batches of a pass; negative if it is unknown."""
    if isinstance(batches, tf.data.Dataset):
        return int(batches.cardinality())
    return len(batches) if isinstance(batches, Sequence) else -1


def rest_of(batches: Batches, passes: int, done: int) -> Batches:
    """The rest of a pass.

    Args:
        batches: The data.
        passes: How many passes were started before this one.
        done: How many batches of this one are done.
    """
    if not isinstance(batches, Sequence | Iterator):
        for _ in range(passes):
            iter(batches)  # each pass draws an order: skip those of the earlier passes
    if not done:
        return batches
    return batches.skip(done) if isinstance(batches, tf.data.Dataset) else Rest(batches, done)


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
