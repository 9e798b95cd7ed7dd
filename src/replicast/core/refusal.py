"""Why an operation was refused: a record that is sent between processes, and the exception for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing was changed.

    Attributes:
        problem: What is wrong, in one sentence.
        workers: The workers that refused, or that did not answer before the timeout.
        details: Further fields of the author's error: variable, expected, received, what to do.
    """

    problem: str
    workers: tuple[int, ...] = ()
    details: Mapping[str, Any] | None = None


class Refuse(Exception):  # noqa: N818 - read as a sentence: raise Refuse("...")
    """Raised by a script or an order to refuse the operation. Nothing has changed."""

    def __init__(
        self, problem: str, workers: tuple[int, ...] = (), details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(problem)
        self.refusal = Refusal(problem, workers, details)


class JobEnds(Exception):  # noqa: N818 - read as a sentence: raise JobEnds("...")
    """Raised by a script that can be neither carried out nor refused: every worker must exit."""
