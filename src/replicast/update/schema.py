"""The schema of the state: names, shapes and dtypes, against which updates are checked."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash
from msgspec import Struct

from replicast.errors import UpdateRefused
from replicast.strictjson import described, fields_of
from replicast.tensorfiles import MAX_BYTES
from replicast.update.digest import name_of, nonfinite
from replicast.update.edits import (
    ADDITIONS,
    COPY_BITS,
    DTYPES,
    FLOAT_DTYPES,
    RESETS,
    Array,
    Edit,
    EditKind,
    by_variable,
    dtype_named,
    factor_as,
    refused,
    touched_rows,
)
from replicast.update.update import Update, cast_loose

Kind: TypeAlias = Literal["trainable", "non_trainable", "optimizer"]
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**48  # more than any array has; numpy raises on sizes that overflow
_MAX_NAMES = 5


class Variable(Struct, frozen=True):
    """One variable of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    slots: tuple[tuple[str, float], ...] = ()  # the optimizer's variables for it, and what they are reset to

    def __post_init__(self) -> None:
        if (
            self.dtype not in DTYPES
            or len(self.shape) > MAX_DIMENSIONS
            or any(size < 0 for size in self.shape)
            # Zeros count as 1: numpy multiplies the other dimensions too, and they may overflow.
            or math.prod(max(size, 1) for size in self.shape) >= MAX_ELEMENTS
        ):
            raise ValueError(f"Invalid dtype or shape of {self.name}. Received: {self.dtype} {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


class Schema:
    """All variables of the state, found by name."""

    def __init__(
        self, variables: Iterable[Variable], hints: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._variables: dict[str, Variable] = {}
        for variable in variables:
            if variable.name in self._variables:
                raise ValueError(f"Variable names must be unique. Received twice: {variable.name}")
            self._variables[variable.name] = variable
        for variable in self._variables.values():
            missing = [slot for slot, _ in variable.slots if slot not in self._variables]
            if missing:
                raise ValueError(f"A slot of {variable.name} is not a variable. Received: {missing[0]}")
        self._hints = dict(hints)
        self._by_suffix: dict[str, list[str]] = {}
        for name in self._variables:
            for suffix in _suffixes(name):
                self._by_suffix.setdefault(suffix, []).append(name)

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._variables.values())

    def __len__(self) -> int:
        return len(self._variables)

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def find(self, name: str) -> Variable | None:
        """The variable with this full name, or with this unique suffix that starts after a "/"."""
        matches = [name] if name in self._variables else self._by_suffix.get(name, [])
        return self._variables[matches[0]] if len(matches) == 1 else None

    def resolve(self, name: str) -> Variable:
        """As `find`; raises `UpdateRefused` if there is none."""
        found, matches = self.find(name), self._by_suffix.get(name, [])
        if found is not None:
            return found
        if matches:
            problem = f"The name matches {len(matches)} variables"
            raise refused(name, problem, f"one of {_listed(matches, 20)}", name)
        hint, near = self._hint(name), self._near(name)
        problem = "There is no variable with this name" + (f": {hint}" if hint else "")
        expected = f"perhaps {_listed(near)}" if near else f"one of {_listed(list(self._variables))}"
        raise refused(name, problem, expected, name)

    def to_json(self) -> dict[str, Any]:
        return {"variables": [fields_of(variable) for variable in self], "hints": self._hints}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Schema:
        """Reads what `to_json` wrote."""
        known = described(_Described, "schema", fields)
        return cls(known.variables, known.hints)

    def digest(self) -> str:
        """A digest that is equal on two workers if they have the same variables in the same order."""
        text = json.dumps(self.to_json()["variables"], sort_keys=True)
        return xxhash.xxh3_128(text.encode()).hexdigest()

    def _hint(self, name: str) -> str | None:
        if name in self._hints:
            return self._hints[name]
        matches = [hint for full, hint in self._hints.items() if name in _suffixes(full)]
        return matches[0] if len(matches) == 1 else None

    def _near(self, name: str) -> list[str]:
        """Full names that this one abbreviates, as `lr`, that are similar to it, or have a suffix that is."""
        near = [suffix for suffix in self._by_suffix if _initials(suffix) == name.rpartition("/")[2].lower()]
        near += difflib.get_close_matches(name, list(self._by_suffix), n=4 * _MAX_NAMES, cutoff=0.6)
        return list(dict.fromkeys(full for suffix in near for full in self._by_suffix[suffix]))[:_MAX_NAMES]


class _Described(Struct):
    variables: tuple[Variable, ...]
    hints: dict[str, str] = {}


def _suffixes(name: str) -> list[str]:
    """Every suffix of a name that starts after a "/", the full name first."""
    parts = name.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _initials(name: str) -> str:
    """The first letters of the words of a name without a "/": "lr" for learning_rate; empty for one word."""
    words = name.split("_")
    return "".join(word[:1] for word in words).lower() if len(words) > 1 and "/" not in name else ""


def _listed(names: list[str], limit: int = _MAX_NAMES) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# Validates an update against the schema of the state, before anything is sent.


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an update may be; a larger one is refused.

    Attributes:
        max_bytes: Of all its arrays together. A `sync`, a heal and `import_weights` count too.
        max_edits: Including resets of slots.
        max_before_bytes: Of overwritten values that are kept for a revert. An update that overwrites more is
            applied, and cannot be reverted.
    """

    max_bytes: int = MAX_BYTES
    max_edits: int = 10_000
    max_before_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            if (most := getattr(self, field.name)) < 0:
                raise ValueError(f"{field.name} must be at least 0. Received: {most}")


def planned(
    update: Update,
    schema: Schema,
    limits: Limits = Limits(),
    *,
    look_at: Callable[[int], bool] = lambda place: True,
) -> Update:
    """Returns the update as every worker will apply it: full names, the variables' dtypes, explicit resets.

    Idempotent: planning a planned update changes nothing.
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
    _check_count(len(edits), limits)
    return update.replaced(edits)


def check_outline(update: Update, schema: Schema, limits: Limits = Limits()) -> None:
    """Checks what of an update can be known without its values: names, operations, shapes, dtypes, sizes.

    For an update in outline (`Update.of_file`): what `planned` would refuse is refused before a byte is read.
    """
    _check_size(update, limits)
    for edit in update.edits:
        _check_fit(edit, schema.resolve(edit.variable))


def _check_size(update: Update, limits: Limits) -> None:
    _check_count(len(update.edits), limits)
    if update.nbytes > limits.max_bytes:
        raise UpdateRefused(
            "The update is too large",
            expected=f"at most {limits.max_bytes} bytes",
            received=f"{update.nbytes} bytes",
            remedy="Split it, or send rows or low-rank factors instead of whole variables",
        )


def _check_count(edits: int, limits: Limits) -> None:
    if edits > limits.max_edits:
        most = f"at most {limits.max_edits}"
        problem = "The update has too many edits"
        raise UpdateRefused(problem, expected=most, received=str(edits), remedy="Split it")


def _check_fit(edit: Edit, variable: Variable) -> None:
    """Checks what of an edit can be known without its values: its operation, shapes and dtypes."""
    operation, arrays = edit.operation, edit.arrays
    name, shape, dtype = variable.name, variable.shape, dtype_named(variable.dtype)
    is_bool = variable.dtype == "bool"
    changes_bits = operation not in COPY_BITS and variable.dtype not in FLOAT_DTYPES
    if changes_bits and (is_bool or operation not in ADDITIONS):
        possible = f"{'assign or assign_rows' if is_bool else 'add or assign'}, which keep its dtype"
        problem = f"A variable of dtype {variable.dtype} does not support {operation}"
        raise refused(name, problem, possible, str(operation))
    if operation is EditKind.ADD_LOW_RANK:
        a, b = arrays["a"].shape, arrays["b"].shape
        if len(shape) != 2 or len(a) != 2 or len(b) != 2 or (a[0], b[1]) != shape or a[1] != b[0]:
            expected = "a variable with 2 dimensions"
            if len(shape) == 2:
                expected = f"({shape[0]}, rank) and (rank, {shape[1]})"
            problem = "The low-rank factors do not match the variable"
            raise refused(name, problem, expected, f"{a} and {b} for shape {shape}")
    else:
        key = "value"
        if operation.is_of_rows:
            _check_form(arrays["indices"], variable)
            key, shape = "rows", (arrays["indices"].shape[0], *shape[1:])
        if key in arrays and arrays[key].shape != shape:
            raise refused(name, f"Wrong shape of {key}", str(shape), str(arrays[key].shape))
    for key, array in arrays.items():
        if key != "indices" and not edit.loose and array.dtype != dtype:
            remedy = f'Use .astype("{dtype.name}")'
            raise refused(name, "Wrong dtype", dtype.name, array.dtype.name, remedy)


def _check_form(indices: Array, variable: Variable) -> None:
    """Checks that indices are one-dimensional integers, and a variable has rows."""
    if not variable.shape:
        raise refused(variable.name, "A scalar variable has no rows", "at least one dimension")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        received = f"{indices.dtype.name} of shape {indices.shape}"
        expected = "a one-dimensional array of integers"
        raise refused(variable.name, "Wrong dtype or shape of indices", expected, received)


def _resets(touched: dict[str, Variable], edits: list[Edit], schema: Schema) -> Iterator[Edit]:
    """One reset for each slot of a touched variable, unless the update already resets it.

    If only rows of a variable are touched, only these rows are reset in slots that have its shape, or one
    number for each row.
    """
    done = {edit.variable for edit in edits if edit.operation in RESETS}
    of_each = by_variable(edits)
    for variable in touched.values():
        rows, shape = touched_rows(of_each[variable.name]), variable.shape
        by_rows = {shape} if shape[:1] == shape[-1:] else {shape, shape[:1]}  # one number for each column?
        for name, fill in variable.slots:
            if name in done:
                continue
            done.add(name)
            if rows is None or schema.resolve(name).shape not in by_rows:
                yield Edit(EditKind.RESET, name, {}, fill)
            elif rows.size:
                yield Edit(EditKind.RESET_ROWS, name, {"indices": rows}, fill)


def _planned_reset(edit: Edit, variable: Variable, touched: dict[str, Variable]) -> Edit:
    """Checks a reset that planning created before: of a slot of a touched variable, to its reset value."""
    slots = dict(slot for owner in touched.values() for slot in owner.slots)
    if edit.factor is None or slots.get(variable.name) != edit.factor:
        remedy = "Use reset_slots=True, or assign the values"
        raise refused(variable.name, "A reset cannot be proposed as an edit", remedy=remedy)
    arrays = {name: _checked_indices(indices, variable) for name, indices in edit.arrays.items()}
    return replace(edit, variable=variable.name, arrays=arrays, loose=False)


def _planned_edit(edit: Edit, variable: Variable, *, allow_nonfinite: bool, look: bool) -> Edit:
    _check_fit(edit, variable)
    dtype = dtype_named(variable.dtype)
    if edit.factor is not None and not allow_nonfinite and not np.isfinite(factor_as(edit.factor, dtype)):
        problem = f"The {'weight' if edit.operation is EditKind.BLEND else 'factor'} is not finite"
        problem += f" in {variable.dtype}" if math.isfinite(edit.factor) else ""
        expected = f"a number in the range of {variable.dtype}, or allow_nonfinite=True"
        raise refused(variable.name, problem, expected, str(edit.factor))
    arrays = dict(edit.arrays)
    for key, array in edit.arrays.items():
        if key == "indices":
            arrays[key] = _checked_indices(array, variable)
            continue
        if edit.loose:
            array = arrays[key] = cast_loose(variable.name, array, dtype)
        found, first = nonfinite(array) if look and name_of(array.dtype) in FLOAT_DTYPES else (0, 0)
        if found:
            position = [int(index) for index in np.unravel_index(first, array.shape)]
            problem = f"{found} of {array.size} values are not finite"
            received = f"{array[tuple(position)]} at {position}"
            raise refused(variable.name, problem, "finite values, or allow_nonfinite=True", received)
    return Edit(edit.operation, variable.name, arrays, edit.factor)


def _checked_indices(indices: Array, variable: Variable) -> Array:
    """The indices as int64, after checking that they are one-dimensional, in range and unique."""
    _check_form(indices, variable)
    count = variable.shape[0]
    wrong = (indices < 0) | (indices >= count)
    if wrong.any():
        position = int(np.argmax(wrong))
        expected = f"0 to {count - 1}" if count else "no index: the variable has no rows"
        received = f"{indices[position]} at position {position}"
        raise refused(variable.name, "A row index is out of range", expected, received)
    ascending = np.sort(indices)
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if twice.size:
        received = f"row {twice[0]} at positions {np.flatnonzero(indices == twice[0])[:5].tolist()}"
        raise refused(variable.name, "A row appears twice", "each row once", received)
    if indices.dtype == np.int64:
        return indices
    cast = indices.astype(np.int64)
    cast.flags.writeable = False
    return cast
