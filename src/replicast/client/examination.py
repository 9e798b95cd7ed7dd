"""What an update would do, and all that is wrong with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np

from replicast.errors import UpdateRefused
from replicast.strictjson import View
from replicast.update.edits import RESETS, Array, Edit, EditKind, low_rank_norm, refused
from replicast.update.schema import Schema, planned
from replicast.update.trial import Trial
from replicast.update.update import Update

_POSITIVE = "A learning rate that trains is positive"
_SETTING = {EditKind.ASSIGN: "", EditKind.SCALE: "multiplied by "}
_ITERATIONS = (
    "Learning rate schedules and the bias correction of Adam follow it; the step of the job stays as it is"
)
_CHUNK = 2**20  # Elements that are widened to float64 at a time.


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
    if schema is None:
        views = views_of(update.edits, None)
        return Examination(tuple(views), tuple(_problems_by_themselves(update, views)))
    problems: list[UpdateRefused] = []
    edits: list[Edit] = []
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
    views = views_of(edits, schema)
    return Examination(tuple(views), tuple(problems), tuple(warnings_of(edits)))


def check_types(update: object, trial: object = None) -> None:
    """A dictionary is a common mistake, and would fail later with an error about an attribute."""
    if not isinstance(update, Update):
        example = 'replicast.Update().add("dense/bias", delta)'
        raise TypeError(f"Expected an Update, such as {example}. Received: {type(update).__name__}")
    if not isinstance(trial, Trial | None):
        raise TypeError(f"Expected a Trial, such as replicast.Trial(50). Received: {type(trial).__name__}")


def views_of(edits: Iterable[Edit], schema: Schema | None) -> list[EditView]:
    """Edits in short; the schema tells shape and dtype where an edit itself does not."""
    return [_view(edit, schema) for edit in edits]


def values_of(array: Array) -> Values:
    """The values of an array in short; needs little memory."""
    flat = array.reshape(-1)
    nonfinite, squares, low, high = 0, 0.0, math.inf, -math.inf
    for start in range(0, flat.size, _CHUNK):
        with np.errstate(all="ignore"):
            chunk = flat[start : start + _CHUNK].astype(np.float64)
            finite = chunk[np.isfinite(chunk)]
            nonfinite += chunk.size - finite.size
            squares += float(np.dot(finite, finite))
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        low = high = math.nan
    return Values(flat.size, nonfinite, low, high, math.sqrt(squares))


def _view(edit: Edit, schema: Schema | None) -> EditView:
    arrays, shape, dtype, rank, values = edit.arrays, None, "", None, None
    if schema is not None:
        with contextlib.suppress(UpdateRefused):
            variable = schema.resolve(edit.variable)
            shape, dtype = variable.shape, variable.dtype
    written = arrays.get("value", arrays.get("rows"))
    if edit.operation is EditKind.ADD_LOW_RANK:
        shape, rank = (*arrays["a"].shape[:1], *arrays["b"].shape[-1:]), arrays["a"].shape[-1]
        dtype, values = arrays["a"].dtype.name, _low_rank_values(arrays["a"], arrays["b"])
    elif written is not None:
        shape, dtype, values = written.shape, written.dtype.name, values_of(written)
    rows = arrays["indices"].size if "indices" in arrays else None
    return EditView(edit.variable, edit.operation, edit.factor, shape, dtype, edit.nbytes, rows, rank, values)


def _problems_by_themselves(update: Update, views: list[EditView]) -> Iterator[UpdateRefused]:
    """What is wrong whatever the state is."""
    expected = "finite values, or allow_nonfinite=True"
    if not views:
        yield UpdateRefused("The update has no edits", expected="at least one", received="none")
    for view in () if update.allow_nonfinite else views:
        if view.values is not None and view.values.nonfinite:
            problem = f"{view.values.nonfinite} of {view.values.size} values are not finite"
            yield refused(view.variable, problem, expected, "NaN or infinity")
        elif view.factor is not None and not math.isfinite(view.factor):
            yield refused(view.variable, "The factor is not finite", expected, str(view.factor))


def warnings_of(edits: Iterable[Edit]) -> Iterator[str]:
    """What is allowed and hardly meant. Cheap: looks at the values of scalars only."""
    for edit in edits:
        name = edit.variable.rpartition("/")[2]
        if name in ("iteration", "iterations") and edit.operation not in RESETS:
            yield f"{edit.variable} is the optimizer's own count of steps. {_ITERATIONS}"
        elif name == "learning_rate" and edit.operation in _SETTING:
            given = edit.arrays.get("value", np.array(edit.factor)).astype(np.float64)
            lowest = float(given.min(initial=math.inf))
            if lowest <= 0:
                yield f"{edit.variable} would be {_SETTING[edit.operation]}{lowest:g}. {_POSITIVE}"


def _low_rank_values(a: Array, b: Array) -> Values:
    """Of both factors; but the norm is that of their product, which is never computed as a whole."""
    first, second = values_of(a), values_of(b)
    norm = math.nan
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
        norm = low_rank_norm(a, b)
    extremes = min(first.minimum, second.minimum), max(first.maximum, second.maximum)
    return Values(first.size + second.size, first.nonfinite + second.nonfinite, *extremes, norm)
