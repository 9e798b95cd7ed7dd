"""The question about rows: the gain of sending only the changed rows instead of the whole table."""

from __future__ import annotations

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.rows_task import TableTask

ADD_ROWS = Contestant("replicast add_rows", "replicast", "benchmarks.rows_replicast:AddRows")
ASSIGN = Contestant(
    "replicast assign of the whole table", "replicast", "benchmarks.rows_replicast:AssignTable"
)
BROADCAST = Contestant("TF broadcast of the whole table", "stock", "benchmarks.peers.table:BroadcastTable")
PUSH = Contestant("replicast push and wait, from outside", "replicast", "benchmarks.rows_push:Push")
APPLIED = Contestant(
    "of it: proposed by worker 0 until the last has applied",
    "replicast",
    "benchmarks.rows_push:Applied",
    role="part",
)
DURABLE = Contestant(
    "floor: the same bytes made durable, author and journal",
    "replicast",
    "benchmarks.rows_push:Durable",
    role="floor",
)
PUSH_TARGET_MS = 8.0
PUSH_ROWS = Question(
    name="push-rows",
    title=f"{TableTask()}, pushed by another process to 2 workers in training",
    unit="ms until its author is told",
    contestants=(PUSH, APPLIED, DURABLE),
    task=TableTask(),
    ratios=(Ratio(f"push and wait / {PUSH_TARGET_MS:g} ms", PUSH, PUSH_TARGET_MS, "at most", 1.0),),
    notes=(
        TURNS,
        "The author is a process that has loaded the client already: no start of a command is in the time.",
        "A step of the training takes about 1 ms: the longest wait for a boundary.",
    ),
    turns=3,
    budget_secs=60.0,
)
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
