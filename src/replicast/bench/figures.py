"""The figures of a run: what workers have written, combined, and as data for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from replicast.bench.plan import MEASURES, Plan

FLOOR = "copy"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure."""

    name: str
    secs: tuple[float, ...]

    def median(self) -> float:
        """The median over the rounds."""
        return median(self.secs)


def line(name: str, number: int, secs: float) -> str:
    """What a worker writes after each measure, in one line."""
    return json.dumps({"name": name, "round": number, "secs": secs})


def parse(text: str) -> dict[tuple[str, int], float]:
    """The times of one worker, by measure and round; an unfinished last line does not count."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    read = [json.loads(words) for words in whole]
    return {(one["name"], one["round"]): one["secs"] for one in read}


def combine(workers: Iterable[dict[tuple[str, int], float]], rounds: int) -> list[Figure]:
    """The slowest worker's times."""
    each = list(workers)
    try:
        return [
            Figure(name, tuple(max(times[name, number] for times in each) for number in range(rounds)))
            for name in MEASURES
        ]
    except KeyError as missing:
        raise ValueError(f"A worker has not measured {missing}") from None


def ratio_to_floor(figure: Figure, figures: Iterable[Figure]) -> float:
    """How many copies in memory it takes: the median over the rounds, each with its own copy."""
    floor = next(one for one in figures if one.name == FLOOR)
    return median(time / copy for time, copy in zip(figure.secs, floor.secs, strict=True))


def as_json(plan: Plan, figures: list[Figure], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        **facts,
        "workers": plan.workers,
        "bytes": plan.nbytes,
        "rounds": plan.rounds,
        "figures": [
            {
                "name": figure.name,
                "what": MEASURES[figure.name],
                "secs": list(figure.secs),
                "median_secs": figure.median(),
                "bytes_per_sec": plan.nbytes / figure.median(),
                "ratio_to_copy": ratio_to_floor(figure, figures),
            }
            for figure in figures
        ],
    }
