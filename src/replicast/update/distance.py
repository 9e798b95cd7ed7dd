"""The distance between two arrays of the same shape and dtype, in bits and in numbers; what edits changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from replicast.update.audit_report import Deviation
from replicast.update.edits import (
    FLOAT_DTYPES,
    RESETS,
    Array,
    Edit,
    EditKind,
    by_variable,
    edit_in_slice,
    in_slice,
    slices_of,
    touched_rows,
)
from replicast.update.effect import Effect, Histogram
from replicast.update.schema import Schema, Variable

_PIECE_BYTES = 2**20  # In float64 and with temporary arrays, a piece takes up to forty times its size.


def deviation(mine: Array, reference: Array) -> Deviation:
    """Compares a value of any dtype with the reference, in bits and in numbers."""
    if (mine.shape, mine.dtype) != (reference.shape, reference.dtype):
        raise ValueError(
            f"Only values of the same shape and dtype can be compared, here {reference.dtype} "
            f"{reference.shape}. Received: {mine.dtype} {mine.shape}"
        )
    found = distance([(mine, reference)])
    if found.first_index is None:
        return found
    index = np.unravel_index(found.first_index[0], mine.shape)
    return replace(found, first_index=tuple(int(place) for place in index))


def distance(pairs: Iterable[tuple[Array, Array]]) -> Deviation:
    """Compares a value in parts, each with the reference's, piece by piece. Its index has one dimension."""
    count = of = one_is_nan = 0
    absolute = relative = 0.0
    first: tuple[int] | None = None
    for pair in pairs:
        left, right = (np.ascontiguousarray(side).reshape(-1) for side in pair)
        bits, length = np.dtype(f"u{left.dtype.itemsize}"), _PIECE_BYTES // left.dtype.itemsize
        for start in range(0, left.size, length):
            piece = slice(start, start + length)
            where = left[piece].view(bits) != right[piece].view(bits)
            if where.any():
                count += int(np.count_nonzero(where))
                first = (of + start + int(np.argmax(where)),) if first is None else first
                nans, *largest = _largest(left[piece][where], right[piece][where])
                one_is_nan += nans
                absolute, relative = max(absolute, largest[0]), max(relative, largest[1])
        of += left.size
    return Deviation(count, of, absolute, relative, first, one_is_nan)


def _largest(left: Array, right: Array) -> tuple[int, float, float]:
    """The number of elements that are NaN on one side only; the largest absolute and relative difference."""
    one_is_nan = 0
    with np.errstate(all="ignore"):
        if left.dtype.name in FLOAT_DTYPES:
            left, right = left.astype(np.float64), right.astype(np.float64)
            one_is_nan = int(np.count_nonzero(np.isnan(left) != np.isnan(right)))
            numbers = ~(np.isnan(left) | np.isnan(right))
            left, right = left[numbers], right[numbers]
            absolute = np.abs(left - right)
        else:
            # The difference of integers may wrap around; as an unsigned integer it is right.
            unsigned = np.dtype(f"u{left.dtype.itemsize}")
            forth, back = (
                pair[0].view(unsigned) - pair[1].view(unsigned) for pair in ((left, right), (right, left))
            )
            absolute = np.where(left > right, forth, back).astype(np.float64)
        if not absolute.size:
            return one_is_nan, 0.0, 0.0
        larger = np.maximum(np.abs(left.astype(np.float64)), np.abs(right.astype(np.float64)))
        relative = np.where(np.isinf(absolute), np.inf, absolute / np.where(larger == 0, 1.0, larger))
    return one_is_nan, float(absolute.max()), float(relative.max())


# What edits have done to a variable.

MEASURED_BYTES = 2**28  # of what an update touches: the effects of a larger one are not measured
_EXACT = 2**13  # elements: so many are measured in float64, which takes about three times as long
_SAMPLED, _BINS = 2**13, 32  # elements in a histogram: 0.2 ms, which an author waits for; 2.5 of 2**16
_MOST_HISTOGRAMS = 16  # of one update: each takes some hundred bytes of its receipt
_AT_ONCE = 2**13  # elements: they stay in the cache, and are too few for the threads of a matrix library


def effects(
    edits: Sequence[Edit], schema: Schema, before: Mapping[str, Array], after: Mapping[str, Array]
) -> tuple[Effect, ...]:
    """What edits have done to each variable, without resets of slots.

    Args:
        edits: The edits of a planned update.
        schema: The variables.
        before: What they overwrote, as far as it was kept.
        after: What they touched: variables, or of those with edits of rows these rows, each once.
    """
    asked = by_variable(edit for edit in edits if edit.operation not in RESETS)
    found = [
        _effect(several, schema.resolve(name), before.get(name), after[name])
        for name, several in asked.items()
        if name in after
    ]
    rest = (replace(effect, histogram=UNSET) for effect in found[_MOST_HISTOGRAMS:])
    return (*found[:_MOST_HISTOGRAMS], *rest)


def _effect(edits: Sequence[Edit], variable: Variable, before: Array | None, after: Array) -> Effect:
    """Values before that were not kept are what undoing the edits gives: where it would not, they are."""
    rows = touched_rows(edits)
    found = Effect(variable.name, variable.shape, None if rows is None else len(rows))
    undone = before is None and all(edit.operation in _UNDO for edit in edits)
    if before is None and not undone:
        return found
    if rows is not None and undone:  # as edits of a table that has these rows alone
        edits = [_of_touched(edit, rows) for edit in edits]
    wide = np.float64 if after.size <= _EXACT else np.float32
    squares = changed = 0.0
    least, greatest, stride, sampled = math.inf, -math.inf, -(-after.size // _SAMPLED), list[Array]()
    with np.errstate(all="ignore"):
        for part in slices_of(after.shape, _AT_ONCE):
            new: Array = in_slice(after, part).astype(wide)
            old: Array = new if before is None else in_slice(before, part).astype(wide)
            for edit in reversed(edits) if undone else ():
                cut = edit_in_slice(edit, after.shape, part)
                old = old if cut is None else _UNDO[edit.operation](old, cut)
            difference = (new - old).reshape(-1)
            squares += float(np.dot(old.reshape(-1), old.reshape(-1)))
            changed += float(np.dot(difference, difference))
            # Of what is not finite, both are NaN or infinite from here on.
            least, greatest = np.minimum(least, difference.min()), np.maximum(greatest, difference.max())
            sampled.append(difference[::stride].copy())
    if after.size == 1:
        return replace(found, before=_finite(old.item()), after=_finite(new.item()))
    found = replace(found, norm=_finite(math.sqrt(squares)), change=_finite(math.sqrt(changed)))
    if not sampled or not math.isfinite(greatest - least):
        return found
    values, span = np.concatenate(sampled).astype(np.float64), (float(least), float(greatest))
    counts = np.histogram(values, _BINS, span)[0] if least < greatest else np.array([values.size])
    return replace(found, histogram=Histogram(*span, tuple(counts.tolist())))


def _of_touched(edit: Edit, rows: Array) -> Edit:
    """An edit of rows as one of a table that has only the touched ones, in order."""
    places = np.searchsorted(rows, edit.arrays["indices"])
    if len(places) == len(rows):
        return Edit(EditKind.ADD, edit.variable, {"value": edit.arrays["rows"][np.argsort(places)]})
    return dataclasses.replace(edit, arrays={**edit.arrays, "indices": places})


def _without_rows(value: Array, cut: Edit) -> Array:
    value = value.copy()
    value[cut.arrays["indices"]] -= cut.arrays["rows"]
    return value


_UNDO: dict[EditKind, Callable[[Array, Edit], Array]] = {
    EditKind.ADD: lambda value, cut: value - cut.arrays["value"],
    EditKind.ADD_ROWS: _without_rows,
    EditKind.ADD_LOW_RANK: lambda value, cut: value - cut.arrays["a"].astype(value.dtype) @ cut.arrays["b"],
    EditKind.SCALE: lambda value, cut: value / (cut.factor or math.nan),
}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
