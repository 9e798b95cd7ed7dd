"""Variables that may differ between workers, made one value for a checkpoint: the mean over the workers."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from replicast.edits import FLOAT_DTYPES, Array
from replicast.schema import Schema
from replicast.state import State

MOST_BYTES = 2**20
"""The values cross as words. Moving statistics are far smaller; of what is larger, worker 0's is saved."""


def averaged_names(schema: Schema, declared: Collection[str]) -> list[str]:
    """Those of which the mean is saved; of the others, and of whole numbers, worker 0's own value."""
    floats = [v for v in schema if v.name in declared and v.dtype in FLOAT_DTYPES]
    return [v.name for v in floats] if sum(v.nbytes for v in floats) <= MOST_BYTES else []


def packed(state: State, names: Iterable[str]) -> dict[str, str]:
    """This worker's values, as text."""
    values = state.read(names)
    return {name: base64.b64encode(value.tobytes()).decode() for name, value in values.items()}


def mean(own: Array, others: Sequence[Mapping[str, str]], name: str) -> Array:
    """The mean of worker 0's value and what the others have packed, in the variable's dtype."""
    total = own.astype(np.float64)
    for other in others:
        total += np.frombuffer(base64.b64decode(other[name]), own.dtype).reshape(own.shape)
    averaged: Array = (total / (len(others) + 1)).astype(own.dtype)
    return averaged
