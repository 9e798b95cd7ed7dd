"""The `rows` table: what it saves to send the rows that change instead of the table that they are in."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.fit import Contestant, Say
from benchmarks.race import TURNS, CrewGroup, Race
from benchmarks.report import Ratio, Result, Row
from benchmarks.rows_task import TableTask

WORKERS = 2
BUDGET_SECS = 60.0
ROWS = Contestant("replicast add_rows", "replicast", "benchmarks.rows_replicast:AddRows")
ASSIGN = Contestant(
    "replicast assign of the whole table", "replicast", "benchmarks.rows_replicast:AssignTable"
)
BROADCAST = Contestant("TF broadcast of the whole table", "stock", "benchmarks.peers.table:BroadcastTable")
CONTESTANTS = (ROWS, ASSIGN, BROADCAST)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        rounds: How many turns each gets, if time allows.
        say: Told what is being done now.
    """
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        task = TableTask(Path(directory))
        groups = {
            "stock": CrewGroup("stock_strategy", WORKERS),
            "replicast": CrewGroup("replicast_strategy", WORKERS),
        }
        race = Race("rows", CONTESTANTS, groups, WORKERS, task, say)
        results = race.run(rounds, BUDGET_SECS)
    fastest, slowest = by_speed(results[ASSIGN], results[BROADCAST])
    return Result(
        title=f"rows on {WORKERS} workers, {task} from worker 0 to all",
        unit=f"ms until the last has applied, {race.done} rounds",
        rows=tuple(results.values()),
        ratios=(
            Ratio.of(f"{fastest.name} / add_rows", fastest, results[ROWS], "at least", 50.0),
            Ratio.of(f"{slowest.name} / add_rows", slowest, results[ROWS]),
        ),
        notes=(TURNS, "The target is for the faster way to send the whole table."),
    )


def by_speed(*rows: Row) -> list[Row]:
    """The rows, that with the lowest median first; what was not measured comes last."""
    return sorted(rows, key=lambda row: median(row.measured() or [float("inf")]))
