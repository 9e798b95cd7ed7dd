"""Proposals of changes to all replicas."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from replicast.update.trial import Trial

Content = Hashable
"""Where the bytes of an update are. Opaque to the core."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An update, a function that will compute one, or the number of an update to revert.

    Attributes:
        id: The id of the update. Proposals with the same id and content are one update.
        digest: The digest of the content; empty for a function.
        content: Where the bytes are; None for what is made later: a function, or a revert.
        at_step: The step at which it must be applied; None for the next possible one.
        trial: The condition of its trial, if it has one.
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
    """An update that a worker has created at a boundary, and that all workers can fetch.

    Attributes:
        digest: The digest of the content.
        content: Where the bytes are.
        note: Why; empty if not given.
    """

    digest: str
    content: Content
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """An uncommitted proposal in a checkpoint, made before its boundary.

    Attributes:
        tickets: The tickets of the proposal: a refusal in the journal names them.
    """

    proposal: Proposal
    tickets: tuple[str, ...]
