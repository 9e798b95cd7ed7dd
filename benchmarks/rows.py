"""The question about rows: the gain of sending only the changed rows instead of the whole table."""

from __future__ import annotations

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.rows_task import TableTask

ADD_ROWS = Contestant("replicast add_rows", "replicast", "benchmarks.rows_replicast:AddRows")
ASSIGN = Contestant(
    "replicast assign of the whole table", "replicast", "benchmarks.rows_replicast:AssignTable"
)
BROADCAST = Contestant("TF broadcast of the whole table", "stock", "benchmarks.peers.table:BroadcastTable")
ROWS = Question(
    name="rows",
    title=f"{TableTask()} from worker 0 to 2 workers",
    unit="ms until the last has applied",
    contestants=(ADD_ROWS, ASSIGN, BROADCAST),
    task=TableTask(),
    ratios=(
        Ratio("TF broadcast of the table / add_rows", BROADCAST, ADD_ROWS, "at least", 50.0),
        Ratio("replicast's own assign of the table / add_rows", ASSIGN, ADD_ROWS),
    ),
    notes=(TURNS,),
    budget_secs=50.0,
)
