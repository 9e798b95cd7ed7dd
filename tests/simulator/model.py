"""The sequential model of a story: one process that trains and applies the journal in its order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from replicast.core.entries import Committed, Decided, Entry, History, Payload
from replicast.core.operations.apply import why_not
from tests.simulator.replica import START, StoryFailed, change, overwrites, train, undone


def model(entries: list[Any], steps: int, before: int = 0) -> dict[str, int]:
    """Where one process comes to that trains and applies the journal in its order."""
    contents: dict[tuple[str, str], Any] = {
        (one.id, one.digest): one.content for one in entries if isinstance(one, Payload)
    }
    records = [one for one in entries if isinstance(one, Committed)]
    decided = {one.sequence: one for one in entries if isinstance(one, Decided)}
    events: list[tuple[int, float, Any]] = [(one.step, one.sequence, one) for one in records]
    events += [(one.step, one.last + 0.5, one) for one in decided.values()]
    events.sort(key=lambda one: one[:2])
    values, copy, now = dict(START), dict(START), 0
    for step, _, event in [*events, (steps, 0.0, None)]:
        while now < step:
            now += 1
            train(values, now)
        if isinstance(event, Committed):
            if event.sequence == before:
                return values
            if event.trial is not None:
                copy = dict(values)
            change(values, contents[event.id, event.digest].edits)
        elif isinstance(event, Decided) and not event.kept:
            values = dict(copy)
    return values


def needs_before(history: History, record: Committed) -> bool:
    """Whether an update can be reverted only with the values before it."""
    decided = history.decided.get(record.sequence)
    if record.id.startswith(("sync-", "heal-")) or (decided is not None and not decided.kept):
        return False
    content: Any = history.content(record.id, record.digest)
    return overwrites(content.edits)


def check_before(entries: list[Entry], history: History, steps: int) -> None:
    """What is kept of each update are the values before it."""
    for sequence, kept in history.before.items():
        content: Any = kept.content
        values = model(entries, steps, before=sequence)
        if any(values[name] != value for name, value in content):
            raise StoryFailed(f"before update {sequence} the model has {values}: {kept}")


def check_reverts(entries: list[Entry], forced: Collection[str]) -> int:
    """What reverts an update may do so, and undoes it."""
    history, reverts = History(), 0
    if not any(isinstance(one, Committed) and one.reverts is not None for one in entries):
        return reverts
    for entry in entries:
        if isinstance(entry, Committed) and entry.reverts is not None:
            reverts += 1
            problem = why_not(history, entry.reverts, forced=entry.id in forced)
            if problem:
                raise StoryFailed(f"update {entry.sequence} reverts what it may not: {problem}")
            _check_revert(history, history.committed[entry.reverts], entry)
        history.add(entry)
    return reverts


def _check_revert(history: History, first: Committed, second: Committed) -> None:
    """What was added is subtracted; what was overwritten is brought back."""
    contents: list[Any] = [history.content(one.id, one.digest) for one in (first, second)]
    there, back = (content.edits for content in contents)
    before: Any = history.before.get(first.sequence) if overwrites(there) else None
    if back != undone(there, None if before is None else dict(before.content)):
        raise StoryFailed(f"{second} does not undo {first}: {there}, {back}")
