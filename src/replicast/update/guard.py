"""Guards: limits on how much an update may change, and on which variables."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from replicast.update.digest import nonfinite
from replicast.update.edits import (
    FLOAT_DTYPES,
    RESETS,
    Array,
    Edit,
    EditKind,
    apply_edit,
    by_variable,
    dtype_named,
    factor_as,
    low_rank_norm,
    refused,
    touched_rows,
)
from replicast.update.schema import Schema

Read = Callable[[Iterable[str]], Mapping[str, Array]]
_CHUNK = 2**16  # Elements. In float64 they stay in the processor's cache.
_REMEDY = "Make the change smaller, or pass another guard to the job's Replicas"
_NOT_FINITE = "Make them finite, or pass a guard with require_finite=False to the job's Replicas"
_OTHER_VARIABLE = "Leave this variable out of the update, or pass another guard to the job's Replicas"


@dataclass(frozen=True, slots=True)
class Guard:
    """Refuses updates that change too much, or change protected variables. Pass it to `Replicas`.

    Each worker checks the updates proposed on it, and worker 0 checks those pushed from outside, before
    anything is sent to the others: pass the same guard on all workers. `sync`, `import_weights`, heals and
    journal replays are not checked, because they bring back existing values and no proposed change.

    The bounds apply to each variable, relative to its value when the update is proposed, even if the update
    is to be applied at a later step. The resets of `reset_slots=True` only restore the optimizer's initial
    values: they are matched against the patterns, but not measured.

    Example:
        replicast.Replicas(model, guard=replicast.Guard(max_relative_change=0.1, deny=["optimizer/*"]))

    Attributes:
        max_norm: The maximum L2 norm of the change of a variable.
        max_relative_change: The maximum norm of the change divided by the norm of the value; for row edits,
            of the touched rows. Any change to an all-zero value is too large.
        allow: Shell patterns (`*/bias`) of the full names that may be changed. Empty: all.
        deny: Patterns of names that may not be changed, even if they are allowed.
        require_finite: Refuse NaN and infinity even in an update with `allow_nonfinite=True`.
    """

    max_norm: float | None = None
    max_relative_change: float | None = None
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    require_finite: bool = True

    def __post_init__(self) -> None:
        for name in ("max_norm", "max_relative_change"):
            object.__setattr__(self, name, _checked_bound(name, getattr(self, name)))
        for name in ("allow", "deny"):
            object.__setattr__(self, name, _checked_patterns(name, getattr(self, name)))
        if not isinstance(self.require_finite, bool):
            raise ValueError(f"require_finite must be True or False. Received: {self.require_finite!r}")

    def check_patterns(self, schema: Schema) -> None:
        """Checks that every pattern matches a variable: a mistyped `deny` would silently protect nothing.

        Raises:
            ValueError: A pattern matches no variable.
        """
        names = [variable.name for variable in schema]
        for which, patterns in (("allow", self.allow), ("deny", self.deny)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                    raise ValueError(
                        f"The guard's {which} must match variables by their full names, such as "
                        f"{', '.join(near)}. Received: {pattern!r}, which matches none"
                    )

    def check(self, edits: Sequence[Edit], schema: Schema, read: Read) -> None:
        """Checks what an update would change.

        Args:
            edits: The edits of a planned update.
            schema: The state's variables.
            read: Returns the current values of variables. Called for one variable at a time, and only if its
                value is needed to compute the change.

        Raises:
            UpdateRefused: A bound is exceeded; reports the first one found.
        """
        for edit in edits:
            self._check_name(edit.variable)
        for name, several in by_variable(edit for edit in edits if edit.operation not in RESETS).items():
            if self.require_finite:
                for edit in several:
                    _check_finite(name, edit, schema.resolve(name).dtype)
            if self.max_norm is not None or self.max_relative_change is not None:
                self._check_change(name, several, read)

    def _check_name(self, name: str) -> None:
        denied = next((pattern for pattern in self.deny if fnmatchcase(name, pattern)), None)
        if denied is not None:
            problem = "The guard denies changes to this variable"
            raise refused(name, problem, f"none that matches {denied!r} (deny)", name, _OTHER_VARIABLE)
        if self.allow and not any(fnmatchcase(name, pattern) for pattern in self.allow):
            problem = "The guard does not allow changes to this variable"
            expected = f"one that matches {' or '.join(map(repr, self.allow))} (allow)"
            raise refused(name, problem, expected, name, _OTHER_VARIABLE)

    def _check_change(self, name: str, edits: list[Edit], read: Read) -> None:
        live = functools.cache(lambda: read([name])[name])  # read when it is first needed
        change = _norm_of_change(edits, live)
        if self.max_norm is not None:
            _check_bound(name, "norm", "max_norm", self.max_norm, change)
        if self.max_relative_change is not None:
            size = math.sqrt(sum(_squares(_rows(live(), touched_rows(edits)))))
            relative = 0.0 if change == 0 else math.inf if size == 0 else change / size
            bound = self.max_relative_change
            _check_bound(name, "relative change", "max_relative_change", bound, relative)


def checked_guard(guard: Guard | None) -> Guard | None:
    """Returns the guard after checking its type."""
    if guard is not None and not isinstance(guard, Guard):
        raise ValueError(
            "guard must be a replicast.Guard, such as replicast.Guard(max_relative_change=0.1), or None. "
            f"Received: {guard!r}"
        )
    return guard


def _checked_bound(name: str, bound: float | None) -> float | None:
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | float | np.number) or not 0 < bound < math.inf:
        raise ValueError(f"{name} must be a number above 0, or None for no bound. Received: {bound!r}")
    return float(bound)


def _checked_patterns(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    checked = None if isinstance(patterns, str) else tuple(patterns)
    if checked is None or not all(isinstance(pattern, str) and pattern for pattern in checked):
        raise ValueError(f'{name} must be a list of patterns, such as ["*/bias"]. Received: {patterns!r}')
    return checked


def _check_bound(name: str, what: str, parameter: str, bound: float, found: float) -> None:
    if not found <= bound:  # also refuses NaN
        times = f", {found / bound:.4g} times the bound" if math.isfinite(found) else ""
        problem = f"The {what} of this update is larger than the guard allows"
        raise refused(name, problem, f"at most {bound:g} ({parameter})", f"{found:.6g}{times}", _REMEDY)


def _check_finite(name: str, edit: Edit, dtype: str) -> None:
    if dtype not in FLOAT_DTYPES:
        return
    numbers = {key: array for key, array in edit.arrays.items() if key != "indices"}
    if edit.factor is not None:
        numbers["factor"] = factor_as(edit.factor, dtype_named(dtype))
    for key, array in numbers.items():
        found, first = nonfinite(array)
        if found:
            problem = f"{found} of {array.size} numbers of the {key} are not finite, which the guard refuses"
            expected = "finite numbers (require_finite), even with allow_nonfinite=True"
            raise refused(name, problem, expected, str(array.reshape(-1)[first]), _NOT_FINITE)


def _norm_of_change(edits: list[Edit], live: Callable[[], Array]) -> float:
    with np.errstate(all="ignore"):  # infinity and NaN exceed every bound
        arrays, only = edits[0].arrays, edits[0].operation if len(edits) == 1 else None
        if only in (EditKind.ADD, EditKind.ADD_ROWS):  # additions alone need not be compared with live values
            squares = sum(_squares(arrays[only.arrays[-1]]))
        elif only is EditKind.ADD_LOW_RANK:
            return low_rank_norm(arrays["a"], arrays["b"])
        else:  # together: one edit may undo another
            rows = touched_rows(edits)
            before = after = _rows(live(), rows)
            for edit in edits:
                if rows is not None:
                    places = np.searchsorted(rows, edit.arrays["indices"])
                    edit = replace(edit, arrays={**edit.arrays, "indices": places})
                after = apply_edit(edit, after)
            squares = sum(_squares(after, before))
        return math.sqrt(squares)


def _rows(value: Array, rows: Array | None) -> Array:
    return value if rows is None else value[rows]


def _squares(array: Array, subtracted: Array | None = None) -> Iterator[float]:
    """The sums of squares of an array, or of the difference of two, for each chunk, in float64."""
    others = None if subtracted is None else _chunks(subtracted)
    for chunk in _chunks(array):
        wide = chunk.astype(np.float64)
        if others is not None:
            wide -= next(others)
        yield float(np.dot(wide, wide))


def _chunks(array: Array) -> Iterator[Array]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
