"""Two checkouts of replicast in one interleaved race: what a change has done to the time of an update.

    python -m benchmarks.versions --old ../replicast-before --workers 2 --rounds 30

Both run this checkout's benchmark code. The figure is that of the `update` table, making the update included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.fit import Contestant
from benchmarks.race import CrewGroup, Race
from benchmarks.report import Row
from benchmarks.seats import Entry
from benchmarks.update_task import Task
from benchmarks.workers import REPOSITORY

BUDGET_SECS = 900.0


class CheckoutGroup(CrewGroup):
    """Workers that run the replicast of one checkout."""

    def __init__(self, checkout: Path, workers: int) -> None:
        super().__init__("replicast_strategy", workers)
        self._source = str(checkout.resolve() / "src")

    def prepare(self, entry: Entry, patience_secs: float) -> None:
        os.environ["PYTHONPATH"] = self._source  # of the processes that are started now
        super().prepare(entry, patience_secs)


def ratios(one: Row, other: Row) -> list[float]:
    """The times of one row by those of the other, round by round."""
    return [a / b for a, b in zip(one.times, other.times, strict=True) if a is not None and b is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Races two checkouts of replicast.")
    parser.add_argument("--old", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--new", type=Path, default=REPOSITORY, help="default: this one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        contestants = [
            Contestant(f"{version}, {name}", version, f"benchmarks.update_replicast:{factory}")
            for name, factory in (("making included", "MakeAndPropose"), ("propose alone", "Propose"))
            for version in ("old", "new")
        ]
        groups = {
            version: CheckoutGroup(getattr(given, version), given.workers) for version in ("old", "new")
        }
        race = Race("versions", contestants, groups, given.workers, Task(Path(directory)), lambda said: None)
        rows = list(race.run(given.rounds, BUDGET_SECS).values())
    for old, new in (rows[:2], rows[2:]):
        for row in (old, new):
            times = row.measured()
            told = row.problem or f"median {statistics.median(times):.1f} ms of {len(times)} rounds"
            sys.stdout.write(f"{given.workers} workers, {row.name}: {told}\n")
        found = ratios(new, old)
        if found:
            low, middle, high = statistics.quantiles(found, n=4)
            sys.stdout.write(f"    new / old: median {middle:.3f}, middle half {low:.3f} to {high:.3f}\n")


if __name__ == "__main__":
    main()
