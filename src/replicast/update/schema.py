"""The state as the protocol knows it: named variables, which updates fit them, and how one is undone.

`replicast.training.TensorFlowState` has variables of TensorFlow; its twin in the tests, numpy arrays.
"""

from __future__ import annotations

import abc
import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from replicast.codec import described, fields_of
from replicast.errors import UpdateRefused
from replicast.update.digest import name_of, nonfinite
from replicast.update.edits import (
    ADDITIONS,
    COPY_BITS,
    FLOAT_DTYPES,
    RESETS,
    Array,
    Edit,
    EditKind,
    Variable,
    by_variable,
    factor_as,
    grouped,
    refused,
    touched_rows,
)
from replicast.update.tensorfiles import MAX_BYTES
from replicast.update.update import Update, cast_loose

Arrays = dict[str, npt.NDArray[Any]]
Held: TypeAlias = Callable[[], tuple[Arrays, Arrays]]
_MAX_NAMES = 5


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
        self._by_suffix = grouped((suffix, name) for name in self._variables for suffix in _suffixes(name))

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
        hints = [hint for full, hint in self._hints.items() if name in _suffixes(full)]
        hint = self._hints.get(name, hints[0] if len(hints) == 1 else "")
        # What this one abbreviates, as `lr`, what is similar to it, or has a suffix that is.
        last = name.rpartition("/")[2].lower()
        similar = [suffix for suffix in self._by_suffix if _initials(suffix) == last]
        similar += difflib.get_close_matches(name, list(self._by_suffix), n=4 * _MAX_NAMES, cutoff=0.6)
        near = dict.fromkeys(full for suffix in similar for full in self._by_suffix[suffix])
        problem = "There is no variable with this name" + (f": {hint}" if hint else "")
        perhaps = f"perhaps {_listed(list(near)[:_MAX_NAMES])}"
        expected = perhaps if near else f"one of {_listed(list(self._variables))}"
        raise refused(name, problem, expected, name)

    def is_constant_rate(self, variable: Variable) -> bool:
        return is_rate(variable) and variable.name not in self._hints

    def matching(self, patterns: Iterable[str], what: str) -> set[str]:
        """The names that match shell patterns. One that matches none may be mistyped: raises ValueError."""
        found = set[str]()
        for pattern in patterns:
            names = [name for name in self._variables if fnmatchcase(name, pattern)]
            if not names:
                near = difflib.get_close_matches(pattern, [*self._variables], n=3, cutoff=0.3)
                raise ValueError(
                    f"{what} must match variables by their full names, such as "
                    f"{', '.join(near or [*self._variables][:3])}. Received: {pattern!r}, which matches none"
                )
            found.update(names)
        return found

    def to_json(self) -> dict[str, Any]:
        return {"variables": [fields_of(variable) for variable in self], "hints": self._hints}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Schema:
        known = described(_Described, "schema", fields)
        return cls(known.variables, known.hints)

    def digest(self) -> str:
        """A digest that is equal on two workers if they have the same variables in the same order."""
        text = json.dumps(self.to_json()["variables"], sort_keys=True)
        return xxhash.xxh3_128(text.encode()).hexdigest()


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


class State(abc.ABC):
    """Named variables of one worker. For the training thread at a boundary; any thread may use `schema`."""

    schema: Schema
    devices: tuple[str, ...] = ()  # if this worker has several replicas: the device of each

    @abc.abstractmethod
    def apply(self, edits: Sequence[Edit]) -> None:
        """Applies edits that were checked against the schema, in order."""

    @abc.abstractmethod
    def digest_later(self, edits: Sequence[Edit]) -> Callable[[], str]:
        """The digest of what these edits touch, as it is now: any thread may compute it, at any time."""

    @abc.abstractmethod
    def read(self, names: Iterable[str], devices: Sequence[str] = ()) -> Arrays:
        """Copies of these variables' values; those on one of `devices` for each, if there are several."""

    def read_rows(self, name: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A copy of some rows of a variable."""
        rows: npt.NDArray[Any] = self.read([name])[name][indices]
        return rows

    def hold(self, whole: Iterable[str], rows: Mapping[str, npt.NDArray[np.int64]]) -> Held:
        """The values of these variables, and of these rows of others, as they are now."""
        values = self.read(whole)
        parts = {name: self.read_rows(name, indices) for name, indices in rows.items()}
        return lambda: (values, parts)

    @abc.abstractmethod
    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """The digest of each of these variables."""

    def written_by_rows(self) -> frozenset[str]:
        """The variables of which training writes single rows: the same on all workers at a boundary."""
        return frozenset()

    @abc.abstractmethod
    def snapshot(self, buffers: Arrays, replica: int | None = None) -> None:
        """Copies every variable of one replica into the buffers; allocates missing buffers.

        Without a number, the value that stands for all local replicas.
        """

    @abc.abstractmethod
    def restore_snapshot(self, buffers: Arrays, replica: int = 0) -> None:
        """Restores the bits that every variable of this replica had at `snapshot`."""


def of_replicas(digests: Sequence[str]) -> str:
    """One digest for all replicas of a worker; if theirs differ, all of them: see `audit_report.agree`."""
    return digests[0] if len(set(digests)) == 1 else ",".join(digests)


def touched_parts(edits: Sequence[Edit]) -> tuple[list[str], Arrays]:
    """The variables that these edits touch completely, and the touched rows of others."""
    rows = {name: touched_rows(several) for name, several in sorted(by_variable(edits).items())}
    whole = [name for name, indices in rows.items() if indices is None]
    return whole, {name: indices for name, indices in rows.items() if indices is not None}


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


# For values that a replica publishes from its own state, and updates that their author has checked.
NO_LIMITS = Limits(max_bytes=2**62, max_edits=2**62)


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
        if edit.operation in RESETS:  # Planning has made it before, of a slot of a touched variable.
            slots = dict(slot for owner in touched.values() for slot in owner.slots)
            if edit.factor is None or slots.get(variable.name) != edit.factor:
                remedy = "Use reset_slots=True, or assign the values"
                raise refused(variable.name, "A reset cannot be proposed as an edit", remedy=remedy)
            arrays = {name: _checked_indices(indices, variable) for name, indices in edit.arrays.items()}
            edits.append(replace(edit, variable=variable.name, arrays=arrays, loose=False))
            continue
        touched[variable.name] = variable
        look = not update.allow_nonfinite and look_at(place)
        edits.append(_planned_edit(edit, variable, allow_nonfinite=update.allow_nonfinite, look=look))
        if limits is not NO_LIMITS:  # A replay must accept what an older version has committed.
            _check_rate(edit, variable, schema)
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
        variable = schema.resolve(edit.variable)
        _check_fit(edit, variable)
        _check_rate(edit, variable, schema)


def _check_size(update: Update, limits: Limits) -> None:
    _check_count(len(update.edits), limits)
    if update.nbytes > limits.max_bytes:
        expected, received = f"at most {limits.max_bytes} bytes", f"{update.nbytes} bytes"
        remedy = "Split it, or send rows or low-rank factors instead of whole variables"
        raise UpdateRefused("The update is too large", expected=expected, received=received, remedy=remedy)


def _check_count(edits: int, limits: Limits) -> None:
    if edits > limits.max_edits:
        most = f"at most {limits.max_edits}"
        problem = "The update has too many edits"
        raise UpdateRefused(problem, expected=most, received=str(edits), remedy="Split it")


def _check_fit(edit: Edit, variable: Variable) -> None:
    """Checks what of an edit can be known without its values: its operation, shapes and dtypes."""
    operation, arrays = edit.operation, edit.arrays
    name, shape, dtype = variable.name, variable.shape, np.dtype(variable.dtype)
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


def _check_rate(edit: Edit, variable: Variable, schema: Schema) -> None:
    """A rate below 0 is a multiple of its schedule: a negative factor would make a constant of it."""
    is_constant = schema.is_constant_rate(variable)
    if edit.operation is EditKind.SCALE and is_rate(variable) and (edit.factor or 0) < 0:
        problem, expected = "A learning rate cannot be scaled by a negative factor", "a factor of 0 or more"
        back = "To give the rate back to its schedule, assign -1; for half of what it computes, -0.5"
        raise refused(variable.name, problem, expected, str(edit.factor), None if is_constant else back)
    if is_constant and edit.operation is EditKind.ASSIGN:
        check_constant_rate(variable.name, edit.arrays["value"])


def check_constant_rate(name: str, value: Array) -> None:
    if (rate := value.astype(np.float64).min(initial=math.inf)) < 0:
        problem = "This learning rate has no schedule, so it cannot be below 0"
        raise refused(name, problem, "a rate of 0 or more", f"{rate:g}")


def is_rate(variable: Variable) -> bool:
    is_scalar_of_optimizer = variable.kind == "optimizer" and not variable.shape
    return is_scalar_of_optimizer and variable.name.endswith("/learning_rate")


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


def _planned_edit(edit: Edit, variable: Variable, *, allow_nonfinite: bool, look: bool) -> Edit:
    _check_fit(edit, variable)
    dtype = np.dtype(variable.dtype)
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


# How an update is undone: which values have to be kept before it is applied, and the update that undoes it.
#
#     add, add_rows, add_low_rank     the same values are subtracted; nothing is kept
#     scale by a factor               scaled by 1/factor; nothing is kept
#     assign, assign_rows, blend      the values before are assigned; they are kept, of the touched rows only
#     resets of optimizer slots       the same
#     scale by 0                      the same: there is no factor that undoes it
#
# If one edit of a variable needs the values before, they undo all its edits in this update.

NOT_KEPT = (
    "Take the values from a checkpoint of before the update (replicast pull, replicast checkpoint list), and "
    "push them with --assign"
)


def parts_to_keep(edits: Sequence[Edit], schema: Schema) -> tuple[list[str], Arrays]:
    """What a revert needs of the values before these planned edits: whole variables, and rows of others."""
    overwritten = {edit.variable for edit in edits if not _has_inverse(edit, schema)}
    return touched_parts([edit for edit in edits if edit.variable in overwritten])


def bytes_to_keep(whole: Iterable[str], rows: Mapping[str, Array], schema: Schema) -> int:
    sizes = [schema.resolve(name).nbytes for name in whole]
    for name, indices in rows.items():
        variable = schema.resolve(name)
        sizes.append(variable.nbytes // max(1, variable.shape[0]) * len(indices))
    return sum(sizes)


def update_before(id_: str, whole: Arrays, rows: Mapping[str, tuple[Array, Array]]) -> Update:
    before = Update(id=id_, note="the values before this update", allow_nonfinite=True)
    for name, value in whole.items():
        before = before.assign(name, value)
    for name, (indices, values) in rows.items():
        before = before.assign_rows(name, indices, values)
    return before


def inverse(update: Update, before: Update | None, *, id_: str | None = None, note: str = "") -> Update:
    """The update that undoes another one."""
    kept = {} if before is None else {edit.variable: edit for edit in before.edits}
    edits: list[Edit] = []
    for edit in reversed(update.edits):
        name = edit.variable
        if name in kept:
            continue  # the values before undo all edits of this variable
        if edit.operation not in ADDITIONS and edit.operation is not EditKind.SCALE:
            problem = f"The values of {name} before the update are not kept, and without them its "
            raise refused(name, f"{problem}{edit.operation} cannot be undone", remedy=NOT_KEPT)
        if edit.operation is EditKind.SCALE:
            edits.append(Edit(edit.operation, name, {}, 1.0 / (edit.factor or 1.0)))
            continue
        key = {EditKind.ADD: "value", EditKind.ADD_ROWS: "rows", EditKind.ADD_LOW_RANK: "a"}[edit.operation]
        with np.errstate(all="ignore"):  # integers wrap around, and come back by wrapping around
            negated = np.asarray(np.negative(edit.arrays[key]))
        negated.flags.writeable = False
        edits.append(Edit(edit.operation, name, {**edit.arrays, key: negated}))
    edits += kept.values()
    return Update(note=note, id=id_, allow_nonfinite=True).replaced(edits)


def meaning(edit: Edit) -> str:
    """What undoing an edit means for the training since then, in words. For an edit of an inverse."""
    if edit.operation in ADDITIONS:
        return (
            "subtracts what was added: training since then stays. In floating point the last bits may "
            "differ from the values before"
        )
    if edit.operation is EditKind.SCALE:
        return (
            "divides by the factor: what training has added since then is divided as well. In floating point "
            "the last bits may differ from the values before"
        )
    return "goes back to exactly the values before: training of these values since then is discarded"


def disturbs(later: EditKind, undoes: EditKind, *, heals: bool = False) -> bool:
    """Whether a later edit of the same variable makes the undoing of an edit wrong, or is discarded by it."""
    if undoes not in ADDITIONS and undoes is not EditKind.SCALE:
        return True
    if heals or later in ADDITIONS:
        return False
    return later is not EditKind.SCALE or undoes in ADDITIONS


def _has_inverse(edit: Edit, schema: Schema) -> bool:
    if edit.operation in ADDITIONS:
        return True
    if edit.operation is not EditKind.SCALE or edit.factor is None:
        return False
    if edit.factor == 0.0 or not math.isfinite(edit.factor):
        return False
    dtype = np.dtype(schema.resolve(edit.variable).dtype)
    both = [factor_as(factor, dtype).astype(np.float64) for factor in (edit.factor, 1.0 / edit.factor)]
    return all(np.isfinite(factor) and factor != 0.0 for factor in both)
