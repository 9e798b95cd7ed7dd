"""Compares checkouts of replicast in one interleaved run: the effect of a change on the time of an update.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.versions ../before --workers 2 --rounds 30

All run this checkout's benchmark code, in turns. The figures are those of the `update` table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.fit import Contestant
from benchmarks.race import PoolGroup, Race
from benchmarks.report import Row
from benchmarks.runner import Entry
from benchmarks.update_task import Task
from benchmarks.workers import REPOSITORY

BUDGET_SECS = 900.0
FIGURES = {"MakeAndPropose": "making the update included", "Propose": "propose alone"}


class CheckoutGroup(PoolGroup):
    """Workers that run the replicast of one checkout."""

    def __init__(self, checkout: str, workers: int) -> None:
        super().__init__("replicast_strategy", workers)
        self._source = str(Path(checkout).resolve() / "src")

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        os.environ["PYTHONPATH"] = self._source  # of the processes that are started now
        super().prepare(entry, timeout_secs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares this checkout of replicast with others.")
    parser.add_argument("others", nargs="+", help="directories of other checkouts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--figure", choices=FIGURES, default="MakeAndPropose")
    given = parser.parse_args()
    checkouts = [str(REPOSITORY), *given.others]
    contestants = [
        Contestant(name, name, f"benchmarks.update_replicast:{given.figure}") for name in checkouts
    ]
    groups = {name: CheckoutGroup(name, given.workers) for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        race = Race("versions", contestants, groups, given.workers, Task(Path(directory)), lambda _: None)
        this, *others = race.run(given.rounds, BUDGET_SECS).values()
    sys.stdout.write(f"{given.workers} workers, {FIGURES[given.figure]}, {race.done} rounds\n")
    for row in (this, *others):
        sys.stdout.write(f"{row.name}: {row.problem or _compared(row, this)}\n")


def _compared(row: Row, this: Row) -> str:
    ratios = [a / b for a, b in zip(row.times, this.times, strict=True) if a is not None and b is not None]
    low, middle, high = statistics.quantiles(ratios, n=4)
    median = statistics.median(row.measured())
    return f"{median:.1f} ms, by this checkout's: {middle:.2f} (middle half {low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
