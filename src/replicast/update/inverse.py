"""How an update is undone: which values have to be kept before it is applied, and the update that undoes it.

    add, add_rows, add_low_rank     the same values are subtracted; nothing is kept
    scale by a factor               scaled by 1/factor; nothing is kept
    assign, assign_rows, blend      the values before are assigned; they are kept, of the touched rows only
    resets of optimizer slots       the same
    scale by 0                      the same: there is no factor that undoes it

If one edit of a variable needs the values before, they undo all its edits in this update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from replicast.update.edits import ADDITIONS, Array, Edit, EditKind, dtype_named, factor_as, refused
from replicast.update.schema import Schema
from replicast.update.state import Arrays, touched_parts
from replicast.update.update import Update


def parts_to_keep(edits: Sequence[Edit], schema: Schema) -> tuple[list[str], Arrays]:
    """What a revert needs of the values before these planned edits: whole variables, and rows of others."""
    overwritten = {edit.variable for edit in edits if not _has_inverse(edit, schema)}
    return touched_parts([edit for edit in edits if edit.variable in overwritten])


def bytes_to_keep(whole: Iterable[str], rows: Mapping[str, Array], schema: Schema) -> int:
    """The size of these values."""
    sizes = [schema.resolve(name).nbytes for name in whole]
    for name, indices in rows.items():
        variable = schema.resolve(name)
        sizes.append(variable.nbytes // max(1, variable.shape[0]) * len(indices))
    return sum(sizes)


def update_before(id_: str, whole: Arrays, rows: Mapping[str, tuple[Array, Array]]) -> Update:
    """The values before an update, as the update that assigns them."""
    before = Update(id=id_, note="the values before this update", allow_nonfinite=True)
    for name, value in whole.items():
        before = before.assign(name, value)
    for name, (indices, values) in rows.items():
        before = before.assign_rows(name, indices, values)
    return before


def inverse(
    update: Update, before: Update | None, *, id_: str | None = None, note: str = "", author: str = ""
) -> Update:
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
        edits.append(_inverse_edit(edit))
    edits += kept.values()
    return Update(note=note, author=author, id=id_, allow_nonfinite=True).replaced(edits)


NOT_KEPT = (
    "Take the values from a checkpoint of before the update (replicast pull, replicast checkpoint list), and "
    "push them with --assign"
)
"""What to do without the values before an update."""


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
    dtype = dtype_named(schema.resolve(edit.variable).dtype)
    both = [factor_as(factor, dtype).astype(np.float64) for factor in (edit.factor, 1.0 / edit.factor)]
    return all(np.isfinite(factor) and factor != 0.0 for factor in both)


def _inverse_edit(edit: Edit) -> Edit:
    if edit.operation is EditKind.SCALE:
        return Edit(edit.operation, edit.variable, {}, 1.0 / (edit.factor or 1.0))
    negated = {EditKind.ADD: "value", EditKind.ADD_ROWS: "rows", EditKind.ADD_LOW_RANK: "a"}
    key = negated[edit.operation]
    arrays = dict(edit.arrays)
    with np.errstate(all="ignore"):  # integers wrap around, and come back by wrapping around
        arrays[key] = np.asarray(np.negative(arrays[key]))
    arrays[key].flags.writeable = False
    return Edit(edit.operation, edit.variable, arrays)
