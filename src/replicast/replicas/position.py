"""Where in its data a training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """How much of the data was used.

    Attributes:
        epoch: The epoch that training is in, from 0 on.
        batch: How many batches of it are done.
    """

    epoch: int = 0
    batch: int = 0
