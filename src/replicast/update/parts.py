"""The parts of an update, built and checked from user input: values, JSON, plain tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from replicast.errors import UpdateRefused
from replicast.mapping import copied
from replicast.update.digest import name_of
from replicast.update.edits import (
    ARRAY_NAMES,
    DTYPES,
    FLOAT_DTYPES,
    HAVE_FACTOR,
    RESETS,
    Array,
    Edit,
    EditKind,
)

MAX_EDITS_IN_FILE = 100_000
MAX_STEP = 2**63
"""No step is as large: a larger number could be written into the journal, and not be read again."""
MAX_TENSORS = 2 * MAX_EDITS_IN_FILE
MAX_TEXT = 10_000
_MAX_NAME = 1_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NONFINITE = ("nan", "inf", "-inf")


def checked_id(value: Any) -> str:
    """Checks that an id can be used as a file's name.

    Raises:
        UpdateRefused: It cannot.
    """
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise UpdateRefused(
            "The id is not valid",
            expected="up to 100 of A-Z a-z 0-9 . _ -, beginning with a letter or digit",
            received=repr(value)[:200],
        )
    return value


def checked_text(what: str, value: Any, most: int = MAX_TEXT) -> str:
    """Checks that a text can be stored.

    Raises:
        UpdateRefused: It is not text, too long, or not valid Unicode.
    """
    if not isinstance(value, str) or len(value) > most:
        received = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise UpdateRefused(
            f"The {what} cannot be used", expected=f"text of at most {most} characters", received=received
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UpdateRefused(f"The {what} is not valid Unicode", received=ascii(value)[:200]) from error
    return value


def edit_from_values(
    operation: EditKind,
    variable: Any,
    factor: Any,
    values: Mapping[str, Any],
) -> Edit:
    """An edit from what an author passed.

    Raises:
        UpdateRefused: A value that cannot be part of an update.
    """
    name = _checked_name(variable)
    arrays: dict[str, Array] = {}
    loose: dict[str, bool] = {}
    for key, value in values.items():
        arrays[key], loose[key] = _array_of(name, value)
        if key == "indices" and loose.pop(key) and arrays[key].size == 0:
            arrays[key] = arrays[key].astype(np.int64)  # The dtype of an empty list cannot be inferred.
    if any(loose.values()) and not all(loose.values()):
        dtype = next(arrays[key].dtype for key, is_loose in loose.items() if not is_loose)
        arrays |= {key: cast_loose(name, arrays[key], dtype) for key, is_loose in loose.items() if is_loose}
        loose = {}
    for array in arrays.values():
        array.flags.writeable = False
    return Edit(operation, name, arrays, _factor_of(operation, name, factor), any(loose.values()))


def cast_loose(variable: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """Casts Python numbers to the dtype of a variable.

    Raises:
        UpdateRefused: They do not fit: a fraction for an integer, too large, or a bool for a number.
    """
    if array.dtype == dtype:
        return array
    if (array.dtype == np.bool_) != (dtype == np.bool_) and array.size:
        raise UpdateRefused(
            "The values have the wrong dtype",
            variable=variable,
            expected=dtype.name,
            received=array.dtype.name,
        )
    with np.errstate(all="ignore"):
        cast = np.asarray(array.astype(dtype))
        if name_of(dtype) in FLOAT_DTYPES:
            wrong = np.isinf(cast.astype(np.float64)) & np.isfinite(array.astype(np.float64))
        else:
            # Casting back is not enough: a number beyond the range may wrap twice and come out the same.
            info = np.iinfo(dtype)
            wrong = (cast.astype(array.dtype) != array) | (array < info.min) | (array > info.max)
    if wrong.any():
        position = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise UpdateRefused(
            "A value does not fit the variable",
            variable=variable,
            expected=f"numbers that fit {dtype.name}",
            received=f"{array[position]} at {list(position)}",
        )
    cast.flags.writeable = False
    return cast


def ordered_arrays(edit: Edit) -> Iterator[tuple[str, Array]]:
    """The arrays of an edit with their names, in the order in which they are written, sent and digested."""
    return ((name, edit.arrays[name]) for name in ARRAY_NAMES[edit.operation])


def array_to_json(array: Array) -> dict[str, Any]:
    """The dtype and shape of an array, which are needed to find it in a buffer."""
    return {"dtype": name_of(array.dtype), "shape": list(array.shape)}


def edit_to_json(edit: Edit, describe_array: Callable[[str, Array], Any]) -> dict[str, Any]:
    """An edit without its bytes.

    Args:
        edit: The edit.
        describe_array: Returns the description of an array, given its name and the array.
    """
    return {
        "operation": str(edit.operation),
        "variable": edit.variable,
        "factor": factor_to_json(edit.factor),
        "loose": edit.loose,
        "arrays": {name: describe_array(name, array) for name, array in ordered_arrays(edit)},
    }


def head_from_json(description: Any, known_format: int) -> dict[str, Any]:
    """The fields of a description that concern the whole update, as arguments of `Update`.

    Raises:
        UpdateRefused: It is not a description, or has another format.
    """
    if not isinstance(description, dict):
        raise UpdateRefused("The description must be a JSON object", received=type(description).__name__)
    if description.get("format") != known_format:
        raise UpdateRefused(
            "This version of replicast cannot read the format of the update",
            expected=str(known_format),
            received=repr(description.get("format"))[:200],
            remedy="Use the version that wrote it",
        )
    head: dict[str, Any] = {name: description.get(name, False) for name in ("reset_slots", "allow_nonfinite")}
    for name, flag in head.items():
        if not isinstance(flag, bool):
            raise UpdateRefused(
                f"The flag {name} is wrong", expected="true or false", received=repr(flag)[:200]
            )
    head["id"] = checked_id(description.get("id"))  # None would make a new one.
    return head | {name: checked_text(name, description.get(name, "")) for name in ("note", "author")}


def edits_from_json(described: Any, array_of: Callable[[str, Any], Array]) -> tuple[Edit, ...]:
    """The edits that `edit_to_json` described.

    Args:
        described: A list of descriptions.
        array_of: Finds an array, given its name for error messages and its description.

    Raises:
        UpdateRefused: A description is not valid, or an array is missing.
    """
    if not isinstance(described, list):
        raise UpdateRefused("The edits must be a list", received=type(described).__name__)
    if len(described) > MAX_EDITS_IN_FILE:
        raise UpdateRefused(
            "There are too many edits", expected=f"at most {MAX_EDITS_IN_FILE}", received=str(len(described))
        )
    return tuple(_edit_from_json(number, entry, array_of) for number, entry in enumerate(described))


def edits_of_tensors(
    tensors: Mapping[str, Array], operation: EditKind, weight: float | None
) -> tuple[Edit, ...]:
    """One edit for each variable that a plain file names.

    Args:
        tensors: The file's tensors. For rows, `name.indices` accompanies `name`; for low rank there are
            `name.a` and `name.b`; for scale, each is a scalar.
        operation: What to do with them.
        weight: The weight of a blend.

    Raises:
        UpdateRefused: The tensors do not fit the operation.
    """
    if operation in RESETS:
        raise UpdateRefused("Values cannot be reset from a file", remedy="Use assign, or reset_slots=True")
    if (operation is EditKind.BLEND) != (weight is not None):
        raise UpdateRefused(
            "A blend needs a weight, and no other operation takes one", received=f"{operation}, {weight}"
        )
    rest = dict(tensors)
    edits = []
    for name in tensors:
        if name not in rest:
            continue
        if operation is EditKind.SCALE:
            edits.append(edit_from_values(operation, name, rest.pop(name), {}))
            continue
        suffixes = {"value": "", "rows": "", "indices": ".indices", "a": ".a", "b": ".b"}
        keys = ARRAY_NAMES[operation]
        variable = next(
            (name.removesuffix(end) for key in keys if (end := suffixes[key]) and name.endswith(end)), name
        )
        values = {key: rest.pop(variable + suffixes[key], None) for key in keys}
        missing = [variable + suffixes[key] for key, value in values.items() if value is None]
        if missing:
            raise UpdateRefused(
                f"A tensor is missing to {operation}",
                variable=variable,
                expected=" and ".join(variable + suffixes[key] for key in keys),
                received=f"no {missing[0]}",
            )
        edits.append(edit_from_values(operation, variable, weight, values))
    return tuple(edits)


def factor_to_json(factor: float | None) -> float | str | None:
    """A factor as JSON, which has no NaN and no infinity: they become text."""
    return factor if factor is None or math.isfinite(factor) else str(factor)


def _checked_name(variable: Any) -> str:
    if variable == "":
        raise UpdateRefused("A variable needs a name", received="''")
    return checked_text("name of a variable", variable, _MAX_NAME)


def _array_of(variable: str, value: Any) -> tuple[Array, bool]:
    """The value as a private row-major array, and whether it was given as Python numbers."""
    loose = isinstance(value, bool | int | float | list | tuple)
    if not loose and not isinstance(value, np.ndarray | np.generic) and not hasattr(value, "__array__"):
        raise UpdateRefused(
            "A value is not an array", variable=variable, expected="numbers", received=type(value).__name__
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # A foreign object's conversion may raise anything.
        raise UpdateRefused(
            "A value cannot be converted to an array",
            variable=variable,
            expected="numbers in rows of equal length",
            received=f"{type(value).__name__} ({str(error)[:200]})",
        ) from error
    if name_of(array.dtype) not in DTYPES:
        raise UpdateRefused(
            "A value has an unsupported dtype",
            variable=variable,
            expected="floats, integers or bools",
            received=str(array.dtype),
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not isinstance(value, np.ndarray) or not _is_frozen(array):
        # Even if another object reports read-only memory: it may still write to it itself.
        return copied(array), loose
    return np.asarray(array, order="C").view(), loose


def _is_frozen(array: Array) -> bool:
    """Whether no known array can write to this memory."""
    while not array.flags.writeable:
        if not isinstance(array.base, np.ndarray):
            return True
        array = array.base
    return False


def _factor_of(operation: EditKind, variable: str, factor: Any) -> float | None:
    if (operation in HAVE_FACTOR) != (factor is not None):
        expected = "a number" if operation in HAVE_FACTOR else "none"
        raise UpdateRefused(
            f"The factor does not fit {operation}",
            variable=variable,
            expected=expected,
            received=repr(factor)[:200],
        )
    if factor is None:
        return None
    array, _ = _array_of(variable, factor)
    if array.size != 1 or array.ndim > 1:
        raise UpdateRefused(
            "The factor must be a scalar", variable=variable, received=f"an array of shape {array.shape}"
        )
    return float(array.astype(np.float64).reshape(-1)[0])


def _edit_from_json(number: int, entry: Any, array_of: Callable[[str, Any], Array]) -> Edit:
    if not isinstance(entry, dict):
        raise UpdateRefused(f"Edit {number} must be a JSON object", received=type(entry).__name__)
    try:
        operation = EditKind(str(entry.get("operation")))
    except ValueError:
        raise UpdateRefused(
            f"Edit {number} has an unknown operation",
            expected=", ".join(EditKind),
            received=repr(entry.get("operation"))[:200],
            remedy="It may come from a later version of replicast",
        ) from None
    variable = _checked_name(entry.get("variable"))
    factor: Any = entry.get("factor")
    loose, specs = entry.get("loose", False), entry.get("arrays", {})
    is_number = type(factor) in (int, float) or (isinstance(factor, str) and factor in _NONFINITE)
    try:
        factor = float(factor) if is_number else factor
    except OverflowError:
        is_number = False
    if is_number != (operation in HAVE_FACTOR) or (not is_number and factor is not None):
        raise UpdateRefused(
            f"Edit {number} has a wrong factor", variable=variable, received=repr(factor)[:200]
        )
    names = ARRAY_NAMES[operation]
    if not isinstance(loose, bool) or not isinstance(specs, dict) or set(specs) != set(names):
        raise UpdateRefused(
            f"Edit {number} is not what {operation} needs",
            variable=variable,
            expected=f"arrays {list(names)}",
            received=str(specs)[:200],
        )
    arrays = {name: array_of(f"The array {name!r} of edit {number}", specs[name]) for name in names}
    return Edit(operation, variable, arrays, factor, loose)
