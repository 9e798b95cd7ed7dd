"""The `hosts` table: the change of the `update` table between two hosts, both simulated by this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.fit import Contestant, Say
from benchmarks.race import TURNS, PoolGroup, Race
from benchmarks.report import Ratio, Result
from benchmarks.update import BROADCAST_EACH, BROADCAST_FUSED
from benchmarks.update_task import Task

WORKERS = 2
BUDGET_SECS = 45.0
REPLICAST = Contestant("replicast propose, a host id each", "hosts", "benchmarks.update_replicast:Propose")
CONTESTANTS = (REPLICAST, BROADCAST_FUSED, BROADCAST_EACH)


def measure(rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        rounds: How many turns each gets, if time allows.
        say: Called with a progress message.
    """
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        task = Task(Path(directory))
        groups = {
            "stock": PoolGroup("stock_strategy", WORKERS),
            "hosts": PoolGroup("replicast_strategy_of_several_hosts", WORKERS),
        }
        race = Race("hosts", CONTESTANTS, groups, WORKERS, task, say)
        rows = race.run(rounds, BUDGET_SECS)
    ours = rows[REPLICAST]
    return Result(
        title=f"update between {WORKERS} hosts, {task} from worker 0 added on all",
        unit=f"ms until the last has applied, {race.done} rounds",
        rows=tuple(rows.values()),
        ratios=(
            Ratio.of("replicast / TF broadcast fused", ours, rows[BROADCAST_FUSED], "at most", 1.0),
            Ratio.of("replicast / TF broadcast per variable", ours, rows[BROADCAST_EACH]),
        ),
        notes=(
            TURNS,
            "One machine simulates both hosts: no bytes are shared in memory, and none cross a network.",
        ),
    )
