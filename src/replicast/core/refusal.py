"""Why an operation was refused: data that crosses processes, and the exception that carries it."""

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
        details: What else the author's error says, by field: variable, expected, received, what to do.
    """

    problem: str
    workers: tuple[int, ...] = ()
    details: Mapping[str, Any] | None = None


class Refuse(Exception):  # noqa: N818 - read as a sentence: raise Refuse("...")
    """Raised by a script or by a worker's part of an operation: it ends, and nothing has changed."""

    def __init__(
        self, problem: str, workers: tuple[int, ...] = (), details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(problem)
        self.refusal = Refusal(problem, workers, details)


class JobEnds(Exception):  # noqa: N818 - read as a sentence: raise JobEnds("...")
    """Raised by a script that can neither be carried out nor refused: every worker has to end."""
