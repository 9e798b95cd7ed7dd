"""The question about rows: the gain of sending only the changed rows instead of the whole table."""

from __future__ import annotations

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.rows_task import TableTask

ADD_ROWS = Contestant("replicast add_rows", "replicast", "benchmarks.rows_replicast:AddRows")
ASSIGN = Contestant(
    "replicast assign of the whole table", "replicast", "benchmarks.rows_replicast:AssignTable"
)
BROADCAST = Contestant("TF broadcast of the whole table", "stock", "benchmarks.peers.table:BroadcastTable")
_PUSH = "benchmarks.rows_push:"
PUSH = Contestant("replicast push and wait, beyond the boundary", "replicast", f"{_PUSH}Push")
WHOLE = Contestant("the same with the wait for the boundary", "replicast", f"{_PUSH}Whole", role="part")
HANDED = Contestant(
    "floor: the same syncs, hand-overs and boundary, nothing else",
    "replicast",
    f"{_PUSH}Handed",
    role="floor",
)
PUSH_IDLE = Contestant("replicast, free cores", "replicast", f"{_PUSH}PushIdle")
HANDED_IDLE = Contestant("its floor, free cores", "replicast", f"{_PUSH}HandedIdle", role="part")
DURABLE = Contestant("the same bytes made durable, no training", "replicast", f"{_PUSH}Durable", role="part")
PUSH_TARGET_MS = 8.0
PUSH_ROWS = Question(
    name="push-rows",
    title=f"{TableTask()}, pushed by another process to 2 workers in training",
    unit="ms until its author is told",
    contestants=(PUSH, HANDED, WHOLE, PUSH_IDLE, HANDED_IDLE, DURABLE),
    task=TableTask(),
    ratios=(
        Ratio(f"push and wait / {PUSH_TARGET_MS:g} ms", PUSH, PUSH_TARGET_MS, "at most", 1.0),
        Ratio(f"floor / {PUSH_TARGET_MS:g} ms", HANDED, PUSH_TARGET_MS),
        Ratio("push and wait / floor", PUSH, HANDED),
        Ratio(f"push and wait with free cores / {PUSH_TARGET_MS:g} ms", PUSH_IDLE, PUSH_TARGET_MS),
        Ratio("push and wait / floor, free cores", PUSH_IDLE, HANDED_IDLE),
    ),
    notes=(
        TURNS,
        "The author is a process that has loaded the client already: no start of a command is in the time.",
        "Nor is the wait for the boundary, from the stored update to the last worker that stops.",
        "A step takes about 1 ms, and the steps keep both cores busy; with free cores each sleeps for 4 ms.",
    ),
    turns=3,
    budget_secs=90.0,
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
