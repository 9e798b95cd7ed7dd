"""Where an own loop goes on in whatever it takes its batches from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

Batches = Any
"""What a `for` loop can run over: best a `tf.data.Dataset`; a distributed one, a list, a generator."""


class Rest(Iterable[Any]):
    """A pass without its first batches, which are read and thrown away."""

    def __init__(self, batches: Iterable[Any], done: int) -> None:
        self._batches = batches
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._batches), self._done, None)


def length_of(batches: Batches) -> int:
    """How many batches a pass has; below 0 if that is not known."""
    if isinstance(batches, tf.data.Dataset):
        return int(batches.cardinality())
    return len(batches) if isinstance(batches, Sequence) else -1


def rest_of(batches: Batches, passes: int, done: int) -> Batches:
    """What is left of a pass.

    Args:
        batches: The data.
        passes: How many passes over it were begun before this one.
        done: How many batches of this one are done.
    """
    if not isinstance(batches, Sequence | Iterator):
        for _ in range(passes):
            iter(batches)  # each pass draws its own order: those before have had theirs
    if not done:
        return batches
    return batches.skip(done) if isinstance(batches, tf.data.Dataset) else Rest(batches, done)


def what_is_not_certain(batches: Batches) -> str:
    """Why this data may be elsewhere after a restart, and what to do; empty if it will be where it was."""
    if isinstance(batches, tf.data.Dataset | tf.distribute.DistributedDataset | Sequence):
        return ""
    kind = "an iterator, which begins anew in every life" if isinstance(batches, Iterator) else "an object"
    return (
        "This data cannot be positioned for certain: after a restart, resume() reads as many batches of it "
        "as were done of the pass, and throws them away. That is right only if the script makes it anew for "
        "each pass, with the same batches in every life. Give resume() a tf.data.Dataset, or a list. "
        f"Received: {kind} ({type(batches).__name__})"
    )
