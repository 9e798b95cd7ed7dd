"""Changes of one worker's variables without replicast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from replicast.training import Source, TensorFlowState
from replicast.update.edits import Edit, EditKind
from tests.workers.test_update_edits import values_of


def state_of(model: keras.Model) -> TensorFlowState:
    """The variables of a model by name, as replicast sees them."""
    return TensorFlowState(*Source(model).variables())


def assign(model: keras.Model, values: Mapping[str, Any]) -> None:
    """Gives variables other values, on this worker only."""
    edits = [Edit(EditKind.ASSIGN, name, {"value": value}) for name, value in values.items()]
    state_of(model).apply(edits)


def scramble(model: keras.Model, rank: int) -> None:
    """Other values on each worker, in every variable."""
    scrambled = {}
    for place, variable in enumerate(state_of(model).schema):
        size = int(np.prod(variable.shape))
        values = values_of(variable.dtype, 100 * rank + place, rows=max(2, size)).reshape(-1)
        scrambled[variable.name] = np.array(values[:size].reshape(variable.shape))
    assign(model, scrambled)


def flip(model: keras.Model, name: str, index: tuple[int, ...], bit: int) -> None:
    """Changes one bit, on this worker only."""
    state = state_of(model)
    full = state.schema.resolve(name).name
    value = state.read([full])[full]
    bits = value.reshape(-1).view(f"u{value.dtype.itemsize}")
    place = int(np.ravel_multi_index(index, value.shape)) if index else 0
    bits[place] ^= bits.dtype.type(1 << bit)
    assign(model, {full: value})
