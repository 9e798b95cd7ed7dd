"""The layout of `state.safetensors`: a function of the schema, known before a byte is written.

A reader compares the file's header with the expected one and never interprets it: either it is equal to the
last byte, or the file is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from replicast.errors import CheckpointError
from replicast.files import tensor_chunks
from replicast.update.edits import BFLOAT16, Array
from replicast.update.schema import Schema, Variable

METADATA = {"replicast": "checkpoint 1"}
_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one variable.

    Attributes:
        variable: The variable.
        start: The first byte, counted from the beginning of the file.
        nbytes: The number of bytes.
    """

    variable: Variable
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The file of a state.

    Attributes:
        header: The first bytes of the file.
        spans: The variables by name, in the order of their bytes.
        nbytes: The size of the file.
    """

    header: bytes
    spans: Mapping[str, Span]
    nbytes: int


def dtype_of(variable: Variable) -> np.dtype[np.generic]:
    """The variable's dtype in numpy."""
    return BFLOAT16 if variable.dtype == "bfloat16" else np.dtype(variable.dtype)


def layout_of(schema: Schema) -> Layout:
    """The layout of the file for a state of this schema.

    Raises:
        CheckpointError: A variable has a name that the format reserves.
    """
    if _RESERVED in schema:
        raise CheckpointError(
            "A variable has a name that safetensors reserves", variable=_RESERVED, remedy="Rename it"
        )
    shapes: dict[str, Array] = {
        variable.name: np.broadcast_to(np.zeros((), dtype_of(variable)), variable.shape)
        for variable in schema
    }
    header = bytes(next(tensor_chunks(shapes, METADATA)))  # Only the header: there are no arrays yet.
    entries = json.loads(header[8:])
    variables = {variable.name: variable for variable in schema}
    spans = {
        name: Span(
            variables[name],
            len(header) + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if name != _RESERVED
    }
    size = len(header) + sum(span.nbytes for span in spans.values())
    return Layout(header, MappingProxyType(spans), size)


def file_order(schema: Schema) -> tuple[str, ...]:
    """The names in the fastest order for writing a checkpoint: that of their bytes in the file."""
    return tuple(layout_of(schema).spans)
