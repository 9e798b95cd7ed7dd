"""A model that only has variables: the state of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from replicast.update.update import Update


class Weights(keras.Model):  # type: ignore[misc]
    """Variables `part_0`, `part_1` and so on, initially zero."""

    def __init__(self, count: int, shape: tuple[int, ...], net: keras.Model | None = None) -> None:
        super().__init__(name="weights")
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros", trainable=False, name=f"part_{number}")
            for number in range(count)
        ]
        self.net = net
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Does nothing."""
        return inputs


def adding(changes: Iterable[Any]) -> Update:
    """The changes of all variables as an update."""
    update = Update()
    for number, change in enumerate(changes):
        update = update.add(f"part_{number}", change)
    return update
