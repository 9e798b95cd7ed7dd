"""The position of a training in its script and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

Inside = Literal["fit", "stopped", "over", "loop"]
"""What a position refers to: the last `fit` that was begun; a `fit` that was stopped early, or that was over
in an earlier attempt; or a custom training loop."""


class Fit(NamedTuple):
    """One `fit` with the callback, as a restarted script recognizes it.

    Attributes:
        epochs: The number of epochs it was called with.
        batches: The number of batches per epoch; None if that is not known when it begins.
        ended: The epoch after its last one; None while it runs.
    """

    epochs: int
    batches: int | None = None
    ended: int | None = None

    def __str__(self) -> str:
        batches = "an unknown number of batches" if self.batches is None else f"{self.batches} batches"
        return f"fit with {self.epochs} epochs of {batches}"

    def is_like(self, other: Fit) -> bool:
        """Whether both were called with the same arguments."""
        return (self.epochs, self.batches) == (other.epochs, other.batches)


@dataclass(frozen=True, slots=True)
class Position:
    """How much of the data was used. Positions at the same place in their data are equal.

    Attributes:
        epoch: The current epoch, from 0; in a custom training loop, the pass over the data.
        batch: The number of finished batches of this epoch.
        fits: The calls of `fit` with the callback that the script has begun, in order; None if that is not
            known, as in checkpoints of earlier versions.
        inside: What the epoch and the batch refer to.
    """

    epoch: int = 0
    batch: int = 0
    fits: tuple[Fit, ...] | None = field(default=None, compare=False)
    inside: Inside = field(default="fit", compare=False)

    def in_passes_of(self, length: int) -> Position:
        """The same position, with each pass as long as the data. A length below 0 means unknown."""
        if length <= 0:
            return self
        passes, batch = divmod(self.batch, length)
        return replace(self, epoch=self.epoch + passes, batch=batch)

    def script(self) -> dict[str, Any]:
        """The position in the script, as JSON values."""
        return {
            "fits": None if self.fits is None else [list(fit) for fit in self.fits],
            "inside": self.inside,
        }

    def at(self, script: Mapping[str, Any] | None) -> Position:
        """This position in the data, combined with a position in the script, as given by `script()`."""
        if script is None or script["fits"] is None:
            return self
        return replace(self, fits=tuple(Fit(*fit) for fit in script["fits"]), inside=script["inside"])
