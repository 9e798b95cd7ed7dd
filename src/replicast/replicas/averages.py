"""Variables that may differ between workers, made one value for a checkpoint: the mean over the workers."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from replicast.update.edits import FLOAT_DTYPES, Array
from replicast.update.schema import Schema
from replicast.update.state import State

MOST_AVERAGED_BYTES = 2**20
"""Values that may differ are sent as text. If they are larger than this in total, worker 0's are saved."""


def averaged_names(schema: Schema, may_differ: Collection[str]) -> list[str]:
    """The variables whose mean is saved. For all others, integers included, worker 0's value is saved."""
    floats = [v for v in schema if v.name in may_differ and v.dtype in FLOAT_DTYPES]
    return [v.name for v in floats] if sum(v.nbytes for v in floats) <= MOST_AVERAGED_BYTES else []


def packed(state: State, names: Iterable[str]) -> dict[str, str]:
    """This worker's values as text."""
    values = state.read(names)
    return {name: base64.b64encode(value.tobytes()).decode() for name, value in values.items()}


def mean(own: Array, others: Sequence[Mapping[str, str]], name: str) -> Array:
    """The mean of worker 0's value and the packed values of the others, in the variable's dtype."""
    total = own.astype(np.float64)
    for other in others:
        total += np.frombuffer(base64.b64decode(other[name]), own.dtype).reshape(own.shape)
    averaged: Array = (total / (len(others) + 1)).astype(own.dtype)
    return averaged
