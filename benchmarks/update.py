"""The questions about an update: a change of one worker, added on every worker, in different ways."""

from __future__ import annotations

from benchmarks.question import QUICK_SECS, TURNS, Contestant, Question, Ratio
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
FIRST = Contestant(
    "replicast, first update of a job, making it included",
    "replicast",
    "benchmarks.update_replicast:First",
    "replicast.replicas",
)
NEW_MEMORY = Contestant(
    "new memory of this size, private and shared, filled",
    "replicast",
    "benchmarks.update_replicast:NewMemory",
    role="part",
)
UNAVOIDABLE = Contestant(
    "an update of one number, one copy, assign_add",
    "replicast",
    "benchmarks.update_replicast:Unavoidable",
    role="part",
)
VERIFIED = Contestant(
    "an update of one number, one copy with digests, their verification, assign_add",
    "replicast",
    "benchmarks.update_replicast:Verified",
    role="part",
)
FLOOR = Contestant("floor: assign_add alone, no transfer", "stock", f"{PEERS}.mirrored:Floor", role="floor")
MPI_EACH = Contestant("mpi4py Bcast per variable + add", "mpi", f"{PEERS}.mpi:Each", "mpi4py")
MPI_FUSED = Contestant("mpi4py Bcast fused + add", "mpi", f"{PEERS}.mpi:Fused", "mpi4py")
MPI_TENSORS = Contestant("mpi4py Bcast + TensorFlow assign_add", "mpi", f"{PEERS}.mpi:Tensors", "mpi4py")
GLOO_EACH = Contestant("torch gloo broadcast per variable + add", "torch", f"{PEERS}.gloo:Each", "torch")
GLOO_FUSED = Contestant("torch gloo broadcast fused + add", "torch", f"{PEERS}.gloo:Fused", "torch")
BROADCAST_EACH = Contestant("TF broadcast per variable + add", "stock", f"{PEERS}.mirrored:BroadcastEach")
BROADCAST_FUSED = Contestant("TF broadcast fused + add", "stock", f"{PEERS}.mirrored:BroadcastFused")
CHECKPOINT = Contestant("checkpoint write, barrier, read", "stock", f"{PEERS}.mirrored:Checkpoint")
ALL_REDUCE = Contestant("MWMS all_reduce of delta or zeros + add", "stock", f"{PEERS}.mirrored:AllReduce")
CONTESTANTS = (
    REPLICAST,
    FROM_ARRAYS,
    FIRST,
    FLOOR,
    UNAVOIDABLE,
    VERIFIED,
    NEW_MEMORY,
    MPI_EACH,
    MPI_FUSED,
    MPI_TENSORS,
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
    Ratio("replicast / mpi4py + TensorFlow", REPLICAST, MPI_TENSORS, "at most", 1.3),
    Ratio("replicast, making included / mpi4py + TensorFlow", FROM_ARRAYS, MPI_TENSORS, "at most", 2.0),
    Ratio("replicast / an update of one number, one copy, assign_add", REPLICAST, UNAVOIDABLE),
    Ratio("replicast / the same with digests and their verification", REPLICAST, VERIFIED),
    Ratio("an update of one number, one copy, assign_add / mpi4py + TensorFlow", UNAVOIDABLE, MPI_TENSORS),
    Ratio("the same with digests and their verification / mpi4py + TensorFlow", VERIFIED, MPI_TENSORS),
    Ratio("first update of a job / a later one, making included", FIRST, FROM_ARRAYS, "at most", 2.0),
    Ratio("new memory of this size / a later update, making included", NEW_MEMORY, FROM_ARRAYS),
    Ratio("all_reduce / replicast", ALL_REDUCE, REPLICAST, "at least", 8.0),
    Ratio("TF broadcast per variable / replicast", BROADCAST_EACH, REPLICAST, "at least", 4.0),
    Ratio("TF broadcast fused / replicast", BROADCAST_FUSED, REPLICAST, "at least", 4.0),
    Ratio("checkpoint / replicast", CHECKPOINT, REPLICAST, "at least", 8.0),
)
NOTES = (TURNS, "A ratio: median of the rounds' ratios, and range. No contestant writes with fsync.")


def update(workers: int, budget_secs: float, megabytes: int = 100) -> Question:
    """An update on so many workers."""
    return Question(
        name=f"update-{workers}",
        title=f"An update of {Task(megabytes=megabytes)} from worker 0 added on {workers} workers",
        unit="ms until the last has applied",
        contestants=CONTESTANTS,
        task=Task(megabytes=megabytes),
        workers=workers,
        ratios=RATIOS,
        notes=NOTES,
        budget_secs=budget_secs,
    )


QUESTIONS = (update(2, 90.0), update(4, 90.0))
QUICK = (update(2, QUICK_SECS, megabytes=10),)
