"""The questions about an update: a change of one worker, added on every worker, in different ways."""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.update_task import Task

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
FLOOR = Contestant("floor: assign_add alone, no transfer", "stock", f"{PEERS}.mirrored:Floor", role="floor")
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
RATIOS = (
    Ratio("replicast / mpi4py per variable", REPLICAST, MPI_EACH, "at most", 2.0),
    Ratio("replicast / mpi4py fused", REPLICAST, MPI_FUSED, "at most", 2.0),
    Ratio("replicast, making included / mpi4py fused", FROM_ARRAYS, MPI_FUSED),
    Ratio("all_reduce / replicast", ALL_REDUCE, REPLICAST, "at least", 8.0),
    Ratio("TF broadcast per variable / replicast", BROADCAST_EACH, REPLICAST, "at least", 4.0),
    Ratio("TF broadcast fused / replicast", BROADCAST_FUSED, REPLICAST, "at least", 4.0),
    Ratio("checkpoint / replicast", CHECKPOINT, REPLICAST, "at least", 8.0),
)
NOTES = (TURNS, "A ratio: median of the rounds' ratios, and range. No contestant writes with fsync.")


def update(workers: int, budget_secs: float) -> Question:
    """An update of 100 MB on so many workers."""
    return Question(
        name=f"update-{workers}",
        title=f"An update of {Task()} from worker 0 added on {workers} workers",
        unit="ms until the last has applied",
        contestants=CONTESTANTS,
        task=Task(),
        workers=workers,
        ratios=RATIOS,
        notes=NOTES,
        budget_secs=budget_secs,
    )


LINES = {"replicast propose": REPLICAST, "mpi4py Bcast fused + add": MPI_FUSED, "assign_add alone": FLOOR}
"""The contestants whose growth is shown, one line each."""
MEGABYTES = (1, 10, 100, 1000)
COPIES = 20
"""So many times the bytes of an update are in memory at once, over all contestants and workers."""
WORKERS = (1, 2, 4, 8)


def bytes_that_have_room() -> tuple[int, ...]:
    """The sizes for which this machine has memory, in megabytes."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 1e6
    return tuple(size for size in MEGABYTES if size * COPIES < available)


GROWTH_BYTES = Question(
    name="growth-bytes",
    title="How an update on 2 workers grows with its size, in 50 variables",
    unit="ms until the last has applied",
    contestants=tuple(
        replace(one, name=f"{series}, {size:,} MB", series=series, at=size, task=Task(megabytes=size))
        for series, one in LINES.items()
        for size in bytes_that_have_room()
    ),
    task=Task(),
    notes=(TURNS, "All sizes take turns. A slope of 1 is in proportion to the bytes; 0 does not grow."),
    budget_secs=120.0,
    axis="MB",
)
GROWTH_WORKERS = Question(
    name="growth-workers",
    title="How an update of 10 MB grows with the number of workers, which share the cores",
    unit="ms until the last has applied",
    contestants=tuple(
        replace(one, name=f"{series}, {number} workers", series=series, at=number, workers=number)
        for series, one in LINES.items()
        for number in WORKERS
    ),
    task=Task(megabytes=10),
    notes=(TURNS, "One number of workers after the other. All processes share this machine's cores."),
    turns=2,
    budget_secs=160.0,
    axis="workers",
    staged=True,
)
QUESTIONS = (update(2, 90.0), update(4, 100.0))
GROWTH = (GROWTH_BYTES, GROWTH_WORKERS)
