"""Proposals of changes to all replicas."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from replicast.update.trial import Trial

Content = Hashable
"""Where the bytes of an update are. The core hands it on and never looks inside."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An update, a function that will compute one, or the number of an update to revert.

    Attributes:
        id: The update's id. The same id with the same content is one update, whoever proposes it.
        digest: Of the content; empty for a function.
        content: Where the bytes are; None for what is computed later: a function, or a revert by a worker.
        at_step: The step at which it must be applied; None for the next possible one.
        trial: What it has to prove.
        source: For a function: the worker that runs it.
        author: Who proposes it.
        note: Why.
        proposed_at: When, in seconds since 1970.
        reverts: The sequence number of the update that it undoes; None if it undoes none.
        forced: Revert it even if it is reverted already.
    """

    id: str
    digest: str
    content: Content = None
    at_step: int | None = None
    trial: Trial | None = None
    source: int | None = None
    author: str = ""
    note: str = ""
    proposed_at: float = 0.0
    reverts: int | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """An update that a worker has made at a boundary, and that all workers can fetch.

    Attributes:
        digest: Of the content.
        content: Where the bytes are.
        note: Why, in words; empty if not given.
    """

    digest: str
    content: Content
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """A proposal that a checkpoint holds because it was made before and is not committed.

    Attributes:
        tickets: Whose proposals it is: a refusal in the journal names them.
    """

    proposal: Proposal
    tickets: tuple[str, ...]
