"""What an update changes: told before it (`examine`), limited (`Guard`), measured after it (`effects`)."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from msgspec import UNSET, structs

from replicast.codec import View
from replicast.errors import UpdateRefused
from replicast.update.digest import chunks_of, nonfinite
from replicast.update.edits import (
    FLOAT_DTYPES,
    RESETS,
    Array,
    Edit,
    EditKind,
    Variable,
    apply_edit,
    by_variable,
    edit_in_slice,
    factor_as,
    in_slice,
    low_rank_norm,
    refused,
    slices_of,
    touched_rows,
)
from replicast.update.schema import Schema, check_constant_rate, is_rate, planned
from replicast.update.trial import Effect, Histogram, Trial
from replicast.update.update import Update

Read = Callable[[Iterable[str]], Mapping[str, Array]]
_REMEDY = "Make the change smaller, or pass another guard to the job's Replicas"
_NOT_FINITE = "Make them finite, or pass a guard with require_finite=False to the job's Replicas"
_OTHER_VARIABLE = "Leave this variable out of the update, or pass another guard to the job's Replicas"


# What an update would do.


class Values(View, frozen=True):
    """The values of an array in short: how many are not finite; of the others, extremes and 2-norm."""

    size: int
    nonfinite: int
    minimum: float
    maximum: float
    norm: float


class EditView(View, frozen=True):
    """One edit, for people."""

    variable: str
    operation: EditKind
    factor: float | None
    shape: tuple[int, ...] | None
    dtype: str
    nbytes: int
    rows: int | None
    rank: int | None
    values: Values | None


class Examination(View, frozen=True):
    """What an update would do to a run, without doing it."""

    edits: tuple[EditView, ...]
    problems: tuple[UpdateRefused, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of all values."""
        return sum(edit.nbytes for edit in self.edits)


def examine(update: Update, schema: Schema | None) -> Examination:
    """What an update would do, and why it would be refused: all problems, not only the first."""
    check_types(update)
    problems: list[UpdateRefused] = []
    edits: list[Edit] = []
    if schema is None:  # What is wrong whatever the state is.
        expected, views = "finite values, or allow_nonfinite=True", tuple(map(view_of, update.edits))
        if not views:
            none = UpdateRefused("The update has no edits", expected="at least one", received="none")
            problems.append(none)
        for view in () if update.allow_nonfinite else views:
            if view.values is not None and view.values.nonfinite:
                problem = f"{view.values.nonfinite} of {view.values.size} values are not finite"
                problems.append(refused(view.variable, problem, expected, "NaN or infinity"))
            elif view.factor is not None and not math.isfinite(view.factor):
                factor = str(view.factor)
                problems.append(refused(view.variable, "The factor is not finite", expected, factor))
        return Examination(views, tuple(problems))
    for edit in update.edits:
        try:
            # A reset is judged together with the others: it needs the edit whose slots it resets.
            edits += () if edit.operation in RESETS else planned(update.replaced([edit]), schema).edits
        except UpdateRefused as error:
            problems.append(error)
            edits.append(edit)
    if not problems:
        try:
            edits = list(planned(update, schema, look_at=lambda _place: False).edits)
        except UpdateRefused as error:
            problems.append(error)
    views = tuple(view_of(edit, schema) for edit in edits)
    if problems:
        return Examination(views, tuple(problems))
    return Examination(views, (), tuple(warnings_of(edits)), tuple(_notes_of(views)))


def check_types(update: object, trial: object = None) -> None:
    """A dictionary is a common mistake, and would fail later with an error about an attribute."""
    if not isinstance(update, Update):
        example = 'replicast.Update().add("dense/bias", delta)'
        raise TypeError(f"Expected an Update, such as {example}. Received: {type(update).__name__}")
    if not isinstance(trial, Trial | None):
        raise TypeError(f"Expected a Trial, such as replicast.Trial(50). Received: {type(trial).__name__}")


def values_of(array: Array) -> Values:
    """The values of an array in short; needs little memory."""
    infinite, squares, low, high = 0, 0.0, math.inf, -math.inf
    for chunk in chunks_of(array):
        with np.errstate(all="ignore"):
            finite = chunk.astype(np.float64)
            finite = finite[np.isfinite(finite)]
            squares += float(np.dot(finite, finite))
        infinite += chunk.size - finite.size
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        low = high = math.nan
    return Values(array.size, infinite, low, high, math.sqrt(squares))


def view_of(edit: Edit, schema: Schema | None = None) -> EditView:
    """An edit in short; the schema tells shape and dtype where the edit itself does not."""
    arrays, shape, dtype, rank, values = edit.arrays, None, "", None, None
    if schema is not None:
        with contextlib.suppress(UpdateRefused):
            variable = schema.resolve(edit.variable)
            shape, dtype = variable.shape, variable.dtype
    written = arrays.get("value", arrays.get("rows"))
    if edit.operation is EditKind.ADD_LOW_RANK:
        a, b = arrays["a"], arrays["b"]
        shape, rank, dtype = (*a.shape[:1], *b.shape[-1:]), a.shape[-1], a.dtype.name
        first, second = values_of(a), values_of(b)
        extremes = min(first.minimum, second.minimum), max(first.maximum, second.maximum)
        # The norm is that of their product, which is never computed as a whole.
        norm = low_rank_norm(a, b) if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] else math.nan
        nonfinite = first.nonfinite + second.nonfinite
        values = Values(first.size + second.size, nonfinite, *extremes, norm)
    elif written is not None:
        shape, dtype, values = written.shape, written.dtype.name, values_of(written)
    rows = arrays["indices"].size if "indices" in arrays else None
    return EditView(edit.variable, edit.operation, edit.factor, shape, dtype, edit.nbytes, rows, rank, values)


_MOST_TIMES = 100.0  # A larger factor of a learning rate is hardly meant.


def check_rates(edits: Iterable[Edit], schema: Schema, read: Read) -> None:
    """Refuses what would make a learning rate without a schedule negative, whichever edit it is."""
    for name, several in by_variable(edits).items():
        if schema.is_constant_rate(schema.resolve(name)):
            after = functools.reduce(lambda value, edit: apply_edit(edit, value), several, read([name])[name])
            check_constant_rate(name, after)


def warnings_of(edits: Iterable[Edit]) -> Iterator[str]:
    """What is allowed and hardly meant. Cheap: looks at the values of scalars only."""
    for edit in edits:
        name = edit.variable.rpartition("/")[2]
        if name in ("iteration", "iterations") and edit.operation not in RESETS:
            yield (
                f"{edit.variable} is the optimizer's own count of steps. Learning rate schedules and the "
                "bias correction of Adam follow it; the step of the job stays as it is"
            )
        elif name == "learning_rate" and edit.operation in (EditKind.ASSIGN, EditKind.SCALE):
            given = edit.arrays.get("value", np.array(edit.factor)).astype(np.float64)
            rate = float(given.min(initial=math.inf))
            times = -rate if edit.factor is None else rate  # a rate below 0: `_notes_of`
            if rate == 0:
                how = "" if edit.factor is None else "multiplied by "
                yield f"{edit.variable} would be {how}0. A rate that trains is positive"
            elif _MOST_TIMES < times < math.inf:
                yield f"{edit.variable} would be {times:g} times as large"


def _notes_of(edits: Iterable[EditView]) -> Iterator[str]:
    """What a learning rate below 0, of a schedule, means: `training/tensorflow_state.py`."""
    for edit in edits:
        of_rate = edit.variable.endswith("/learning_rate") and edit.operation is EditKind.ASSIGN
        if of_rate and edit.values is not None and (value := edit.values.minimum) < 0:
            means = f"is {'half of' if value == -0.5 else f'{-value:g} times'} what the schedule computes"
            means = "gives the rate back to the schedule" if value == -1 else means
            yield f"{edit.variable}: {value:g} {means}"


# The bounds of a guard.


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
            of the touched rows. Any change to an all-zero value is too large. A learning rate is not measured
            where there is nothing to compare it with: in place of a schedule, and -1, which gives it back.
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
            if (bound := getattr(self, name)) is not None:
                is_number = isinstance(bound, int | float | np.number) and not isinstance(bound, bool)
                if not is_number or not 0 < bound < math.inf:
                    must = "must be a number above 0, or None for no bound"
                    raise ValueError(f"{name} {must}. Received: {bound!r}")
                object.__setattr__(self, name, float(bound))
        for name in ("allow", "deny"):
            patterns = getattr(self, name)
            checked = None if isinstance(patterns, str) else tuple(patterns)
            if checked is None or not all(isinstance(pattern, str) and pattern for pattern in checked):
                must = 'must be a list of patterns, such as ["*/bias"]'
                raise ValueError(f"{name} {must}. Received: {patterns!r}")
            object.__setattr__(self, name, checked)
        if not isinstance(self.require_finite, bool):
            raise ValueError(f"require_finite must be True or False. Received: {self.require_finite!r}")

    def check_patterns(self, schema: Schema) -> None:
        """Checks that every pattern matches a variable: a mistyped `deny` would silently protect nothing.

        Raises:
            ValueError: A pattern matches no variable.
        """
        schema.matching(self.allow, "The guard's allow")
        schema.matching(self.deny, "The guard's deny")

    def check(self, edits: Sequence[Edit], schema: Schema, read: Read) -> None:
        """Checks what a planned update would change; raises `UpdateRefused` for the first bound it exceeds.

        `read` returns current values: for one variable at a time, and only if they are needed.
        """
        for name in dict.fromkeys(edit.variable for edit in edits):
            denied = next((pattern for pattern in self.deny if fnmatchcase(name, pattern)), None)
            if denied is not None:
                problem = "The guard denies changes to this variable"
                raise refused(name, problem, f"none that matches {denied!r} (deny)", name, _OTHER_VARIABLE)
            if self.allow and not any(fnmatchcase(name, pattern) for pattern in self.allow):
                problem = "The guard does not allow changes to this variable"
                expected = f"one that matches {' or '.join(map(repr, self.allow))} (allow)"
                raise refused(name, problem, expected, name, _OTHER_VARIABLE)
        for name, several in by_variable(edit for edit in edits if edit.operation not in RESETS).items():
            if self.require_finite:
                for edit in several:
                    _check_finite(name, edit, schema.resolve(name).dtype)
            if self.max_norm is None and self.max_relative_change is None:
                continue
            live = functools.cache(lambda name=name: read([name])[name])  # read when it is first needed
            change = _norm_of_change(several, live)
            if self.max_norm is not None:
                _check_bound(name, "norm", "max_norm", self.max_norm, change)
            if self.max_relative_change is not None:
                if is_rate(schema.resolve(name)) and math.isfinite(change):
                    after = functools.reduce(lambda value, edit: apply_edit(edit, value), several, live())
                    if live() < 0 <= after or after == -1:  # in place of a schedule, or given back to it
                        continue
                size = math.sqrt(sum(_squares(_rows(live(), touched_rows(several)))))
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
        numbers["factor"] = factor_as(edit.factor, np.dtype(dtype))
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
                after = apply_edit(edit if rows is None else _of_touched(edit, rows), after)
            squares = sum(_squares(after, before))
        return math.sqrt(squares)


def _rows(value: Array, rows: Array | None) -> Array:
    return value if rows is None else value[rows]


def _squares(array: Array, subtracted: Array | None = None) -> Iterator[float]:
    """The sums of squares of an array, or of the difference of two, for each chunk, in float64."""
    others = None if subtracted is None else chunks_of(subtracted)
    for chunk in chunks_of(array):
        wide = chunk.astype(np.float64)
        if others is not None:
            wide -= next(others)
        yield float(np.dot(wide, wide))


# What edits have done to a variable.

MEASURED_BYTES = 2**28  # of what an update touches: the effects of a larger one are not measured
_EXACT = 2**13  # elements: so many are measured in float64, which takes about three times as long
_SAMPLED, _BINS = 2**13, 32  # elements in a histogram: 0.2 ms, which an author waits for; 2.5 of 2**16
_MOST_HISTOGRAMS = 16  # of one update: each takes some hundred bytes of its receipt
_AT_ONCE = 2**13  # elements: they stay in the cache, and are too few for the threads of a matrix library


def effects(
    edits: Sequence[Edit], schema: Schema, before: Mapping[str, Array], after: Mapping[str, Array]
) -> tuple[Effect, ...]:
    """What edits of a planned update have done to each variable, without resets of slots.

    `before` is what they overwrote, as far as it was kept; `after` what they touched: variables, or of those
    with edits of rows these rows, each once.
    """
    asked = by_variable(edit for edit in edits if edit.operation not in RESETS)
    found = [
        _effect(several, schema.resolve(name), before.get(name), after[name])
        for name, several in asked.items()
        if name in after
    ]
    rest = (structs.replace(effect, histogram=UNSET) for effect in found[_MOST_HISTOGRAMS:])
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
        return structs.replace(found, before=_finite(old.item()), after=_finite(new.item()))
    found = structs.replace(found, norm=_finite(math.sqrt(squares)), change=_finite(math.sqrt(changed)))
    if not sampled or not math.isfinite(greatest - least):
        return found
    values, span = np.concatenate(sampled).astype(np.float64), (float(least), float(greatest))
    counts = np.histogram(values, _BINS, span)[0] if least < greatest else np.array([values.size])
    return structs.replace(found, histogram=Histogram(*span, tuple(counts.tolist())))


def _of_touched(edit: Edit, rows: Array) -> Edit:
    """An edit of rows as one of a table that has only the touched ones, in order."""
    places = np.searchsorted(rows, edit.arrays["indices"])
    if edit.operation is EditKind.ADD_ROWS and len(places) == len(rows):  # each slice would search them all
        return Edit(EditKind.ADD, edit.variable, {"value": edit.arrays["rows"][np.argsort(places)]})
    return replace(edit, arrays={**edit.arrays, "indices": places})


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
