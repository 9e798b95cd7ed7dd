"""The `rows` table: the gain of sending only the changed rows instead of the whole table."""

from __future__ import annotations

from benchmarks.fit import Contestant, Say
from benchmarks.race import TURNS, WORKERS, race_of_two
from benchmarks.report import Ratio, Result
from benchmarks.rows_task import TableTask

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
        say: Called with a progress message.
    """
    results, done, task = race_of_two("rows", CONTESTANTS, TableTask, rounds, BUDGET_SECS, say)
    return Result(
        title=f"rows on {WORKERS} workers, {task} from worker 0 to all",
        unit=f"ms until the last has applied, {done} rounds",
        rows=tuple(results.values()),
        ratios=(
            Ratio.of(
                "TF broadcast of the table / add_rows", results[BROADCAST], results[ROWS], "at least", 50.0
            ),
            Ratio.of("replicast's own assign of the table / add_rows", results[ASSIGN], results[ROWS]),
        ),
        notes=(TURNS,),
    )
