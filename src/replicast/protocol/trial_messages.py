"""What is said in a trial: Cut, Settle, to all; Tried, Settled, back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cut:
    """The training ends before the trial of this update: it is decided here, where all workers stand."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Settle:
    """A trial is decided: every replica goes back to the state before the update, or stays as it is."""

    sequence: int
    outcome: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tried:
    """What one worker has measured of a trial.

    Attributes:
        step: Where it stands.
        before: The mean before the update, at the boundary where that was applied; None without any.
        during: The mean since; None without any.
        measured: Of how many steps that is.
    """

    step: int
    before: float | None
    during: float | None
    measured: int


@dataclass(frozen=True, slots=True)
class Settled:
    """One worker has done what was decided of a trial; the digest is that of its whole state."""

    digest: str
