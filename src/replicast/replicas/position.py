"""Where in its script and its data a training stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

Inside = Literal["fit", "stopped", "over", "loop"]
"""What a position is of: the last `fit` that was begun; one that something stopped, or that was over in an
earlier life of the job; or an own loop."""


class Fit(NamedTuple):
    """One training with the callback, by which a script that runs again recognises it.

    Attributes:
        epochs: How many it was called with.
        batches: How many an epoch has; None if that is not known when it begins.
        ended: The epoch after its last one; None while it runs.
    """

    epochs: int
    batches: int | None = None
    ended: int | None = None

    def __str__(self) -> str:
        batches = "batches whose number is not known" if self.batches is None else f"{self.batches} batches"
        return f"fit with {self.epochs} epochs of {batches}"

    def is_like(self, other: Fit) -> bool:
        """Whether both were called alike."""
        return (self.epochs, self.batches) == (other.epochs, other.batches)


@dataclass(frozen=True, slots=True)
class Position:
    """How much of the data was used. Positions at the same place in their data are equal.

    Attributes:
        epoch: The epoch that training is in, from 0 on; in an own loop, the pass over the data.
        batch: How many batches of it are done.
        fits: The trainings with the callback that the script has begun, in their order; None if that is not
            known, as in checkpoints of earlier versions.
        inside: Of what the epoch and the batch are.
    """

    epoch: int = 0
    batch: int = 0
    fits: tuple[Fit, ...] | None = field(default=None, compare=False)
    inside: Inside = field(default="fit", compare=False)

    def in_passes_of(self, length: int) -> Position:
        """The same place, if every pass ends with the data. A length below 0 is not known."""
        if length <= 0:
            return self
        passes, batch = divmod(self.batch, length)
        return replace(self, epoch=self.epoch + passes, batch=batch)

    def script(self) -> dict[str, Any]:
        """The place in the script, as JSON values."""
        return {
            "fits": None if self.fits is None else [list(fit) for fit in self.fits],
            "inside": self.inside,
        }

    def at(self, script: Mapping[str, Any] | None) -> Position:
        """This place in the data, at the place in the script that `script` described; None if nobody did."""
        if script is None or script["fits"] is None:
            return self
        return replace(self, fits=tuple(Fit(*fit) for fit in script["fits"]), inside=script["inside"])
