"""Applies edits to a variable slice by slice: the same bits as on the whole variable, with little memory.

Every edit computes each element from that element and the edit's own arrays alone. So a variable is treated
as a table, with a row for each index of its first dimension, and cut into blocks that are contiguous in the
file: whole rows, or a part of one row if a row is too long.

The sign and payload of a NaN computed from two different NaNs are undefined: processors give different
results for vectorized elements and for the remainder. This needs an update that contains NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replicast.update.edits import Array, Edit, EditKind, apply_edit
from replicast.update.schema import Variable

SLICE_ELEMENTS = 2**20
"""Arithmetic needs about ten arrays of this size, and is faster if they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous part of a variable.

    Attributes:
        rows: Which rows.
        columns: Which columns of them.
    """

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def blocks_of(variable: Variable, elements: int = SLICE_ELEMENTS) -> Iterator[Block]:
    """Cuts a variable into blocks of at most `elements` elements, in the order of its bytes."""
    rows, width = _table(variable.shape)
    if not rows * width:
        return
    if width > elements:
        for row in range(rows):
            for start in range(0, width, elements):
                yield Block(slice(row, row + 1), slice(start, min(start + elements, width)))
        return
    step = elements // width
    for start in range(0, rows, step):
        yield Block(slice(start, min(start + step, rows)), slice(0, width))


def apply_edits(edits: Sequence[Edit], variable: Variable, block: Block, current: Array) -> Array:
    """The values of a block after the edits.

    Args:
        edits: Planned edits of this variable, in order.
        variable: The variable.
        block: The block.
        current: Its values before, as a table; not modified.
    """
    for edit in edits:
        part = _part(edit, variable, block)
        if part is not None:
            current = apply_edit(part, current)
    return current


def _table(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _part(edit: Edit, variable: Variable, block: Block) -> Edit | None:
    """The part of an edit that applies to this block; None if none does."""
    arrays = edit.arrays
    rows, width = _table(variable.shape)
    match edit.operation:
        case EditKind.ADD | EditKind.ASSIGN | EditKind.BLEND:
            part = {"value": arrays["value"].reshape(rows, width)[block.rows, block.columns]}
        case EditKind.ADD_ROWS | EditKind.ASSIGN_ROWS:
            indices = arrays["indices"]
            chosen = _rows_in(indices, block)
            if not chosen.any():
                return None
            values = arrays["rows"].reshape(len(indices), width)[:, block.columns]
            part = {"indices": indices[chosen] - block.rows.start, "rows": values[chosen]}
        case EditKind.ADD_LOW_RANK:
            part = {"a": arrays["a"][block.rows], "b": arrays["b"][:, block.columns]}
        case EditKind.RESET_ROWS:
            chosen = _rows_in(arrays["indices"], block)
            if not chosen.any():
                return None
            part = {"indices": arrays["indices"][chosen] - block.rows.start}
        case EditKind.SCALE | EditKind.RESET:
            part = {}
    return Edit(edit.operation, edit.variable, part, edit.factor)


def _rows_in(indices: Array, block: Block) -> npt.NDArray[np.bool_]:
    return np.asarray((indices >= block.rows.start) & (indices < block.rows.stop))
