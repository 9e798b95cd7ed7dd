"""The update that undoes an update of the journal, for a job and for processes outside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replicast.core.entries import Committed
from replicast.core.history import History
from replicast.core.operations.revert import why_not
from replicast.errors import PayloadRemoved, UpdateRefused
from replicast.files import RunDir
from replicast.storage.entry_files import HELD_BY_ALL, read_before, read_payload
from replicast.storage.updates import Updates
from replicast.strictjson import parse_integer
from replicast.update.edits import EditKind
from replicast.update.inverse import NOT_KEPT, disturbs, inverse
from replicast.update.update import Update


@dataclass(frozen=True, slots=True)
class Undo:
    """How an update of the journal is undone.

    Attributes:
        record: The update's.
        update: The update that undoes it.
        since: What later updates have done to the same variables, so that it is not simply undone; in words.
    """

    record: Committed
    update: Update
    since: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `UpdateRefused` if later updates have changed what it would change."""
        if self.since:
            raise UpdateRefused(
                f"Update {self.record.sequence} is not the last one: {'; '.join(self.since)}",
                remedy="Revert those first, or revert it all the same: force=True",
            )


def undo(
    run_dir: RunDir, which: int | str, *, note: str = "", author: str = "", forced: bool = False
) -> Undo:
    """The update that undoes a committed update of a run. Changes nothing.

    Args:
        run_dir: The run directory.
        which: The update's number, or its id.
        note: Why; by default, what is reverted.
        author: Who.
        forced: Whether it may be reverted already.

    Raises:
        UpdateRefused: It cannot be reverted, or what that needs is not kept any more.
        FileDamaged: The journal is damaged.
    """
    run = Updates(run_dir)
    by_id = run.history.by_id.get(str(which))
    sequence = by_id.sequence if by_id is not None else number_of(which)
    problem = why_not(run.history, sequence, forced=forced)
    if problem:
        raise UpdateRefused(problem)
    record = run.history.committed[sequence]

    def load() -> Update:
        file, payload = run.payload(record.id, record.digest)
        return read_payload(file.payload_path(run_dir), payload)

    def load_before() -> Update | None:
        kept = run.before.get(sequence)
        return None if kept is None else read_before(kept[0].payload_path(run_dir), kept[1])

    def edits_of(one: Committed) -> tuple[Mapping[str, Any], ...]:
        return run.committed_update(*run.committed[one.sequence]).edits

    update = inverse_of(record, load, load_before, note=note, author=author)
    return Undo(record, update, changes_since(run.history, record, update, edits_of))


def changes_since(
    history: History,
    first: Committed,
    back: Update,
    edits_of: Callable[[Committed], Iterable[Mapping[str, Any]]],
) -> tuple[str, ...]:
    """What later updates have done that the undoing of one would discard or be wrong for, in words.

    Args:
        history: The journal.
        first: The update to undo.
        back: The update that undoes it.
        edits_of: Gives a summary of each edit of an update.
    """
    undoes = {edit.variable: edit.operation for edit in back.edits}
    found = []
    for record in history.after(frozenset()):
        if not _counts_after(history, record, first):
            continue
        done: dict[str, None] = {}
        for edit in edits_of(record):
            name, operation = edit["variable"], EditKind(edit["operation"])
            if name in undoes and disturbs(operation, undoes[name], heals=record.heals):
                done[f"{_DONE[operation]} {name}"] = None
        if done:
            found.append(f"update {record.sequence} has {', '.join(done)} since then")
    return tuple(found)


def _counts_after(history: History, record: Committed, first: Committed) -> bool:
    """Whether an update was applied after another one and still has an effect."""
    if (record.step, record.sequence) <= (first.step, first.sequence):
        return False
    decided = history.decided.get(record.sequence)
    if history.reverted_by(record.sequence) is not None or (decided is not None and not decided.kept):
        return False
    undone = None if record.reverts is None else history.committed.get(record.reverts)
    # What undoes a later update leaves nothing of it.
    return undone is None or (undone.step, undone.sequence) <= (first.step, first.sequence)


_DONE = {
    EditKind.ADD: "added to",
    EditKind.ADD_ROWS: "added to rows of",
    EditKind.ADD_LOW_RANK: "added to",
    EditKind.SCALE: "scaled",
    EditKind.BLEND: "blended",
    EditKind.ASSIGN: "assigned",
    EditKind.ASSIGN_ROWS: "assigned rows of",
    EditKind.RESET: "reset",
    EditKind.RESET_ROWS: "reset rows of",
}


def inverse_of(
    record: Committed,
    load: Callable[[], Update],
    load_before: Callable[[], Update | None],
    *,
    id_: str | None = None,
    note: str = "",
    author: str = "",
) -> Update:
    """The update that undoes another one, from what the journal keeps of it.

    Raises:
        UpdateRefused: What it needs is not kept, or not any more.
        FileDamaged: What it needs is damaged.
    """
    try:
        update = load()
    except PayloadRemoved as error:
        problem = f"The values of update {record.sequence} are not kept any more: {HELD_BY_ALL}"
        raise UpdateRefused(problem, remedy=NOT_KEPT) from error
    note = note or f"revert update {record.sequence} ({record.id})"
    return inverse(update, load_before(), id_=id_, note=note, author=author)


def number_of(which: int | str) -> int:
    """The number of an update, as somebody gave it.

    Raises:
        UpdateRefused: It is not one.
    """
    try:
        return parse_integer(str(which))
    except ValueError as error:
        raise UpdateRefused(
            "There is no such update",
            expected="the number or the id of a committed update",
            received=str(which)[:200],
            remedy="replicast log lists them",
        ) from error
