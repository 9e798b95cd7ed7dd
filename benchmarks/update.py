"""The `update` table: a change of 100 MB on one worker, added on every worker, in different ways."""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path

from benchmarks.fit import Contestant, Say
from benchmarks.peers.mpi_group import MpiGroup, mpiexec
from benchmarks.race import TURNS, Group, PoolGroup, Race
from benchmarks.report import Ratio, Result, Row
from benchmarks.update_task import Task

WORKERS = (2, 4)
BUDGET_SECS = 100.0
"""Per number of workers: after this time no further round starts."""
PEERS = "benchmarks.peers"

REPLICAST = Contestant(
    "replicast propose", "replicast", "benchmarks.update_replicast:Propose", "replicast.replicas"
)
FROM_ARRAYS = Contestant(
    "replicast, making the update included",
    "replicast",
    "benchmarks.update_replicast:MakeAndPropose",
    "replicast.replicas",
)
FLOOR = Contestant("floor: assign_add alone, no transfer", "stock", f"{PEERS}.mirrored:Floor")
MPI_EACH = Contestant("mpi4py Bcast per variable + add", "mpi", f"{PEERS}.mpi:Each", "mpi4py")
MPI_FUSED = Contestant("mpi4py Bcast fused + add", "mpi", f"{PEERS}.mpi:Fused", "mpi4py")
GLOO_EACH = Contestant("torch gloo broadcast per variable + add", "torch", f"{PEERS}.gloo:Each", "torch")
GLOO_FUSED = Contestant("torch gloo broadcast fused + add", "torch", f"{PEERS}.gloo:Fused", "torch")
BROADCAST_EACH = Contestant("TF broadcast per variable + add", "stock", f"{PEERS}.mirrored:BroadcastEach")
BROADCAST_FUSED = Contestant("TF broadcast fused + add", "stock", f"{PEERS}.mirrored:BroadcastFused")
CHECKPOINT = Contestant("checkpoint write, barrier, read", "stock", f"{PEERS}.mirrored:Checkpoint")
ALL_REDUCE = Contestant("MWMS all_reduce of delta or zeros + add", "stock", f"{PEERS}.mirrored:AllReduce")
CONTESTANTS = (
    REPLICAST,
    FROM_ARRAYS,
    FLOOR,
    MPI_EACH,
    MPI_FUSED,
    GLOO_EACH,
    GLOO_FUSED,
    BROADCAST_EACH,
    BROADCAST_FUSED,
    CHECKPOINT,
    ALL_REDUCE,
)


def measure(workers: int, rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        workers: How many processes each of them has.
        rounds: How many turns each gets, if time allows.
        say: Called with a progress message.
    """
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        task = Task(Path(directory))
        groups: dict[str, Group] = {
            "stock": PoolGroup("stock_strategy", workers),
            "replicast": PoolGroup("replicast_strategy", workers),
            "torch": PoolGroup("torch_group", workers),
            "mpi": MpiGroup(workers, task.directory),
        }
        race = Race(f"update, {workers} workers", CONTESTANTS, groups, workers, task, say)
        rows = race.run(rounds, BUDGET_SECS)
    return Result(
        title=f"update on {workers} workers, {task} from worker 0 added on all",
        unit=f"ms until the last has applied, {race.done} rounds",
        rows=tuple(rows.values()),
        ratios=_ratios(rows),
        notes=(
            TURNS,
            "A ratio: median of the rounds' ratios, and range. No contestant writes with fsync.",
            f"MPI: {_mpi()}.",
        ),
    )


def _ratios(rows: dict[Contestant, Row]) -> tuple[Ratio, ...]:
    ours = rows[REPLICAST]
    return (
        Ratio.of("replicast / mpi4py per variable", ours, rows[MPI_EACH], "at most", 2.0),
        Ratio.of("replicast / mpi4py fused", ours, rows[MPI_FUSED], "at most", 2.0),
        Ratio.of("replicast, making included / mpi4py fused", rows[FROM_ARRAYS], rows[MPI_FUSED]),
        Ratio.of("all_reduce / replicast", rows[ALL_REDUCE], ours, "at least", 8.0),
        Ratio.of("TF broadcast per variable / replicast", rows[BROADCAST_EACH], ours, "at least", 4.0),
        Ratio.of("TF broadcast fused / replicast", rows[BROADCAST_FUSED], ours, "at least", 4.0),
        Ratio.of("checkpoint / replicast", rows[CHECKPOINT], ours, "at least", 8.0),
    )


def _mpi() -> str:
    versions = []
    for package in ("mpi4py", "mpich"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return ", ".join([*versions, "mpiexec found" if mpiexec() else "no mpiexec"])
