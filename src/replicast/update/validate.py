"""Validates an update against the schema of the state, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from replicast.errors import UpdateRefused
from replicast.files import MAX_BYTES
from replicast.update.digest import name_of
from replicast.update.edits import (
    BFLOAT16,
    COPY_BITS,
    FLOAT_DTYPES,
    RESETS,
    ROWS,
    Array,
    Edit,
    EditKind,
    factor_as,
)
from replicast.update.finite import nonfinite
from replicast.update.parts import cast_loose
from replicast.update.schema import Schema, Variable
from replicast.update.update import Update


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an update may be.

    Attributes:
        max_bytes: The maximum size of all arrays together.
        max_edits: The maximum number of edits, including resets of slots.
        max_before_bytes: The most bytes of overwritten values that are kept for a revert. A larger update is
            applied all the same, and cannot be reverted.
    """

    max_bytes: int = MAX_BYTES
    max_edits: int = 10_000
    max_before_bytes: int = 256 * 2**20


def planned(
    update: Update,
    schema: Schema,
    limits: Limits = Limits(),
    *,
    look_at: Callable[[int], bool] = lambda place: True,
) -> Update:
    """Returns the update as every worker will apply it: full names, the variables' dtypes, explicit resets.

    Idempotent: planning a planned update changes nothing.

    Args:
        update: The proposed update.
        schema: The state that it changes.
        limits: How large it may be.
        look_at: Whether to search the arrays of the edit at this index for NaN and infinity. This is the one
            slow check, so workers that share the same bytes divide it. Factors are always checked.

    Returns:
        An update with the same id, author and note.

    Raises:
        UpdateRefused: The update is invalid; reports the first problem found.
    """
    if not update.edits:
        raise UpdateRefused("The update has no edits", expected="at least one", received="none")
    _check_size(update, limits)
    edits: list[Edit] = []
    touched: dict[str, Variable] = {}
    for place, edit in enumerate(update.edits):
        variable = schema.resolve(edit.variable)
        if edit.operation in RESETS:
            edits.append(_planned_reset(edit, variable, touched))
            continue
        touched[variable.name] = variable
        allowed = update.allow_nonfinite
        look = not allowed and look_at(place)
        edits.append(_planned_edit(edit, variable, allow_nonfinite=allowed, look=look))
    if update.reset_slots:
        edits += _resets(touched, edits, schema)
    if len(edits) > limits.max_edits:
        raise _too_many(len(edits), limits)
    return update.replaced(edits)


def check_outline(update: Update, schema: Schema, limits: Limits = Limits()) -> None:
    """Checks what of an update can be known without its values: names, operations, shapes, dtypes, sizes.

    For an update in outline (`Update.of_file`): what `planned` would refuse is refused before a byte is read.

    Raises:
        UpdateRefused: As `planned`.
    """
    _check_size(update, limits)
    for edit in update.edits:
        _check_fit(edit, schema.resolve(edit.variable))


def _check_fit(edit: Edit, variable: Variable) -> None:
    _check_operation(edit.operation, variable)
    if edit.operation in ROWS:
        _check_form(edit.arrays["indices"], variable)
    _check_shapes(edit.operation, edit.arrays, variable)
    for key, array in edit.arrays.items():
        if key != "indices" and not edit.loose and array.dtype != _dtype_of(variable):
            raise UpdateRefused(
                "Wrong dtype",
                variable=variable.name,
                expected=_dtype_of(variable).name,
                received=array.dtype.name,
                remedy=f'Use .astype("{_dtype_of(variable).name}")',
            )


def _dtype_of(variable: Variable) -> np.dtype[Any]:
    return BFLOAT16 if variable.dtype == "bfloat16" else np.dtype(variable.dtype)


def _check_size(update: Update, limits: Limits) -> None:
    if len(update.edits) > limits.max_edits:
        raise _too_many(len(update.edits), limits)
    if update.nbytes > limits.max_bytes:
        raise UpdateRefused(
            "The update is too large",
            expected=f"at most {limits.max_bytes} bytes",
            received=f"{update.nbytes} bytes",
            remedy="Split it, or send rows or low-rank factors instead of whole variables",
        )


def _too_many(number: int, limits: Limits) -> UpdateRefused:
    return UpdateRefused(
        "The update has too many edits",
        expected=f"at most {limits.max_edits}",
        received=str(number),
        remedy="Split it",
    )


def _resets(touched: dict[str, Variable], edits: list[Edit], schema: Schema) -> Iterator[Edit]:
    """One reset for each slot of a touched variable, unless the update already resets it.

    If only rows of a variable are touched, only these rows are reset in slots that have its shape.
    """
    done = {edit.variable for edit in edits if edit.operation in RESETS}
    of_each: dict[str, list[Edit]] = {}
    for edit in edits:
        of_each.setdefault(edit.variable, []).append(edit)
    for variable in touched.values():
        rows = _touched_rows(of_each[variable.name])
        for name, fill in variable.slots:
            if name in done:
                continue
            done.add(name)
            if rows is None or schema.resolve(name).shape != variable.shape:
                yield Edit(EditKind.RESET, name, {}, fill)
            elif rows.size:
                yield Edit(EditKind.RESET_ROWS, name, {"indices": rows}, fill)


def _touched_rows(edits: list[Edit]) -> Array | None:
    """The rows that the planned edits of a variable touch; None for the whole variable."""
    if any(edit.operation not in ROWS for edit in edits):
        return None
    indices = [edit.arrays["indices"] for edit in edits]
    if len(indices) == 1:
        return indices[0]
    rows = np.unique(np.concatenate(indices))
    rows.flags.writeable = False
    return rows


def _planned_reset(edit: Edit, variable: Variable, touched: dict[str, Variable]) -> Edit:
    """Checks a reset that planning created before: of a slot of a touched variable, to its reset value."""
    slots = dict(slot for owner in touched.values() for slot in owner.slots)
    if edit.factor is None or slots.get(variable.name) != edit.factor:
        raise UpdateRefused(
            "A reset cannot be proposed as an edit",
            variable=variable.name,
            remedy="Use reset_slots=True, or assign the values",
        )
    arrays = {name: _checked_indices(indices, variable) for name, indices in edit.arrays.items()}
    return replace(edit, variable=variable.name, arrays=arrays, loose=False)


def _planned_edit(edit: Edit, variable: Variable, *, allow_nonfinite: bool, look: bool) -> Edit:
    _check_fit(edit, variable)
    if edit.factor is not None:
        _check_factor(edit.factor, edit.operation, variable, allow_nonfinite=allow_nonfinite)
    arrays = dict(edit.arrays)
    if edit.operation in ROWS:
        arrays["indices"] = _checked_indices(arrays["indices"], variable)
    for key, array in arrays.items():
        if key == "indices":
            continue
        if edit.loose:
            array = arrays[key] = cast_loose(variable.name, array, _dtype_of(variable))
        if look:
            _check_finite(array, variable)
    return Edit(edit.operation, variable.name, arrays, edit.factor)


def _check_operation(operation: EditKind, variable: Variable) -> None:
    if operation in COPY_BITS or variable.dtype in FLOAT_DTYPES:
        return
    whole = (EditKind.ADD, EditKind.ADD_ROWS, EditKind.ADD_LOW_RANK)
    if variable.dtype == "bool" or operation not in whole:
        possible = "assign or assign_rows" if variable.dtype == "bool" else "add or assign"
        raise UpdateRefused(
            f"A variable of dtype {variable.dtype} does not support {operation}",
            variable=variable.name,
            expected=f"{possible}, which keep its dtype",
            received=str(operation),
        )


def _factor_name(operation: EditKind) -> str:
    """The name of the parameter that the author set."""
    return "weight" if operation is EditKind.BLEND else "factor"


def _check_factor(factor: float, operation: EditKind, variable: Variable, *, allow_nonfinite: bool) -> None:
    if allow_nonfinite:
        return
    as_used = float(factor_as(factor, BFLOAT16 if variable.dtype == "bfloat16" else variable.dtype))
    if not math.isfinite(as_used):
        raise UpdateRefused(
            f"The {_factor_name(operation)} is not finite"
            + (f" in {variable.dtype}" if math.isfinite(factor) else ""),
            variable=variable.name,
            expected=f"a number in the range of {variable.dtype}, or allow_nonfinite=True",
            received=str(factor),
        )


def _check_shapes(operation: EditKind, arrays: Mapping[str, Array], variable: Variable) -> None:
    shape = variable.shape
    if operation is EditKind.ADD_LOW_RANK:
        a, b = arrays["a"].shape, arrays["b"].shape
        if len(shape) != 2 or len(a) != 2 or len(b) != 2 or (a[0], b[1]) != shape or a[1] != b[0]:
            matrix = (
                f"({shape[0]}, rank) and (rank, {shape[1]})"
                if len(shape) == 2
                else "a variable with 2 dimensions"
            )
            raise UpdateRefused(
                "The low-rank factors do not match the variable",
                variable=variable.name,
                expected=f"{matrix}",
                received=f"{a} and {b} for shape {shape}",
            )
        return
    if operation in ROWS:
        key, expected = "rows", (arrays["indices"].shape[0], *shape[1:])
    else:
        key, expected = "value", shape
    if key in arrays and arrays[key].shape != expected:
        raise UpdateRefused(
            f"Wrong shape of {key}",
            variable=variable.name,
            expected=str(expected),
            received=str(arrays[key].shape),
        )


def _check_form(indices: Array, variable: Variable) -> None:
    """Checks that indices are one-dimensional integers, and a variable has rows."""
    if not variable.shape:
        raise UpdateRefused(
            "A scalar variable has no rows",
            variable=variable.name,
            expected="at least one dimension",
        )
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise UpdateRefused(
            "Wrong dtype or shape of indices",
            variable=variable.name,
            expected="a one-dimensional array of integers",
            received=f"{indices.dtype.name} of shape {indices.shape}",
        )


def _checked_indices(indices: Array, variable: Variable) -> Array:
    """The indices as int64, after checking that they are one-dimensional, in range and unique."""
    _check_form(indices, variable)
    count = variable.shape[0]
    wrong = (indices < 0) | (indices >= count)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise UpdateRefused(
            "A row index is out of range",
            variable=variable.name,
            expected=f"0 to {count - 1}" if count else "no index: the variable has no rows",
            received=f"{indices[position]} at position {position}",
        )
    ascending = np.sort(indices)
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if twice.size:
        raise UpdateRefused(
            "A row appears twice",
            variable=variable.name,
            expected="each row once",
            received=f"row {twice[0]} at positions {np.flatnonzero(indices == twice[0])[:5].tolist()}",
        )
    if indices.dtype == np.int64:
        return indices
    cast = indices.astype(np.int64)
    cast.flags.writeable = False
    return cast


def _check_finite(array: Array, variable: Variable) -> None:
    if name_of(array.dtype) not in FLOAT_DTYPES:
        return
    found, first = nonfinite(array)
    if found:
        position = [int(index) for index in np.unravel_index(first, array.shape)]
        raise UpdateRefused(
            f"{found} of {array.size} values are not finite",
            variable=variable.name,
            expected="finite values, or allow_nonfinite=True",
            received=f"{array[tuple(position)]} at {position}",
        )
