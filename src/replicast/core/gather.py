"""One answer from each of some workers: the only place where the coordinator collects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from replicast.core.refusal import Refusal


class Gather:
    """The answers to one order.

    Args:
        what: What the workers are asked to do, for the timeout error.
        ranks: The workers that must answer.
    """

    __slots__ = ("answers", "missing", "what")

    def __init__(self, what: str, ranks: Iterable[int]) -> None:
        self.what = what
        self.missing = set(ranks)
        self.answers: dict[int, Any] = {}

    def add(self, rank: int, answer: Any) -> bool:
        """Adds an answer; returns whether it was the last one."""
        if rank not in self.missing:
            return False
        self.missing.discard(rank)
        self.answers[rank] = answer
        return not self.missing

    def refusal(self) -> Refusal | None:
        """The first refusal among the answers, if there is one."""
        refusals = {rank: one for rank, one in self.answers.items() if isinstance(one, Refusal)}
        if not refusals:
            return None
        first = min(refusals)
        refusal = refusals[first]
        return Refusal(refusal.problem, refusal.workers or (first,), refusal.details)

    def timed_out(self, secs: float) -> Refusal:
        """A refusal that names the workers that did not answer."""
        return self.refused_by(self.missing, f" within {secs:g} s")

    def refused_by(self, ranks: Iterable[int], why: str = "") -> Refusal:
        """A refusal that names workers that did not answer and will not."""
        missing = tuple(sorted(ranks))
        return Refusal(f"Worker {', '.join(map(str, missing))} did not {self.what}{why}", missing)
