"""What somebody wants to be done to all replicas."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from replicast.trial import Trial

Content = Hashable
"""Where the bytes of an update are. The core hands it on and never looks inside."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An update, or a function that will compute one.

    Attributes:
        id: The update's id. The same id with the same content is one update, whoever proposes it.
        digest: Of the content; empty for a function.
        content: Where the bytes are; None for a function.
        at_step: The step at which it must be applied; None for the next possible one.
        trial: What it has to prove.
        source: For a function: the worker that runs it.
    """

    id: str
    digest: str
    content: Content = None
    at_step: int | None = None
    trial: Trial | None = None
    source: int | None = None
