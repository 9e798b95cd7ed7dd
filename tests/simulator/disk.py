"""The run directory that all groups of workers share: claims, entries, the inbox. It outlives processes."""

from __future__ import annotations

from typing import Any, TypeVar

from replicast.core.entries import Committed, Entry, History, Payload, Scheduled
from replicast.core.messages import Propose, Request, Withdraw
from tests.simulator.replica import Edit, overwrites, undone

Kind = TypeVar("Kind", Committed, Payload, Scheduled)


class Disk:
    """The durable state."""

    def __init__(self) -> None:
        self.groups: list[list[Entry]] = []  # in the order of the claims
        self.taken: list[int | None] = []  # how many entries of each group the next one took over
        self.inbox: dict[str, Propose | Withdraw] = {}  # without an outcome yet, by ticket
        self.requests: dict[str, Request] = {}  # not answered yet, by id
        self.full_until = -1.0  # writes fail until then

    def claim(self) -> int:
        """Claims the run directory for the next group; returns its number. `count` completes the claim."""
        self.groups.append([])
        self.taken.append(None)
        return len(self.groups) - 1

    def count(self, group: int) -> None:
        """Completes a claim: what earlier groups write from now on is void."""
        for earlier in range(group):
            if self.taken[earlier] is None:
                self.taken[earlier] = len(self.groups[earlier])

    def append(self, group: int, entry: Entry) -> None:
        """Adds an entry, even of a group that is superseded."""
        self.groups[group].append(entry)

    def is_fenced(self, group: int) -> bool:
        """Whether a later group has claimed the run directory."""
        return group < len(self.groups) - 1

    def entries(self) -> list[Entry]:
        """The valid entries, in order: of each group those that the next one took over."""
        groups = zip(self.groups, self.taken, strict=True)
        return [entry for entries, taken in groups for entry in entries[:taken]]

    def history(self) -> History:
        """The current history of the journal."""
        return History(self.entries())

    def undo(self, sequence: int) -> tuple[Edit, ...] | None:
        """The update that undoes another one; None if it does not count, or its values are not kept."""
        history = self.history()
        record = history.committed.get(sequence)
        if record is None:
            return None
        payload = self.find(Payload, record.id, record.digest)
        content: Any = None if payload is None else payload.content
        before: Any = history.before.get(sequence)
        if overwrites(content.edits):
            return None if before is None else undone(content.edits, dict(before.content))
        return undone(content.edits, None)

    def find(self, kind: type[Kind], id_: str, digest: str | None = None) -> Kind | None:
        """The valid entry of this kind for an update, or None; without a digest, for any content."""
        for entries, taken in zip(self.groups, self.taken, strict=True):
            for entry in entries[:taken]:
                if isinstance(entry, kind) and entry.id == id_ and digest in (None, entry.digest):
                    return entry
        return None
