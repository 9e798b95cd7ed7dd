"""The questions about growth: an update by its bytes, and by the number of workers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.machine import available_memory
from benchmarks.question import QUICK_SECS, TURNS, Contestant, Question, Ratio
from benchmarks.update import FIRST, FLOOR, FROM_ARRAYS, MPI_TENSORS, REPLICAST, UNAVOIDABLE
from benchmarks.update_task import Task

OURS, PEER, BARE = "replicast propose", "mpi4py Bcast + TensorFlow assign_add", "floor: assign_add alone"
MADE, FIRST_ONE = "replicast, making included", "replicast, first of a job"
NUMBER = "an update of one number, one copy, assign_add"
LINES = {
    OURS: REPLICAST,
    PEER: MPI_TENSORS,
    BARE: FLOOR,
    NUMBER: UNAVOIDABLE,
    MADE: FROM_ARRAYS,
    FIRST_ONE: FIRST,
}
"""The contestants whose growth is shown, one line each."""
FEW = (OURS, PEER, BARE)
"""Those that are shown where not all have room."""
TARGETS = ((OURS, PEER, 1.3), (NUMBER, PEER, None), (MADE, PEER, 2.0), (FIRST_ONE, MADE, 2.0))
MEGABYTES = (1, 10, 100, 1000)
WORKERS = (1, 2, 4, 8)
UNIT = "ms until the last has applied"


def lines_with_room(megabytes: int, workers: int) -> tuple[str, ...]:
    """The lines for which this machine has memory: two copies for each line and worker, and some more."""
    for lines in (tuple(LINES), FEW):
        if megabytes * 1e6 * (2 * len(lines) * workers + 4) < available_memory():
            return lines
    return ()


def by_bytes(workers: int, budget_secs: float, most: int = MEGABYTES[-1]) -> Question:
    """An update by its size, one size after the other: the largest needs all the memory."""
    found: dict[tuple[str, int], Contestant] = {}
    for size in MEGABYTES:
        for series in lines_with_room(size, workers) if size <= most else ():
            name = f"{series}, {size:,} MB"
            task = Task(megabytes=size)
            found[series, size] = replace(LINES[series], name=name, series=series, at=size, task=task)
    ratios = [
        Ratio(f"{above} / {below}, {size:,} MB", found[above, size], found[below, size], "at most", target)
        for size in MEGABYTES
        for above, below, target in TARGETS
        if (above, size) in found
    ]
    return Question(
        name=f"growth-bytes-{workers}",
        title=f"How an update on {workers} workers grows with its size, in 50 variables",
        unit=UNIT,
        contestants=tuple(sorted(found.values(), key=lambda one: list(LINES).index(one.series or OURS))),
        task=Task(),
        workers=workers,
        ratios=tuple(ratios),
        notes=(
            TURNS,
            "One size after the other. A slope of 1 is in proportion to the bytes; 0 does not grow.",
        ),
        budget_secs=budget_secs,
        axis="MB",
        staged=True,
    )


BY_WORKERS = Question(
    name="growth-workers",
    title="How an update of 10 MB grows with the number of workers, which share the cores",
    unit=UNIT,
    contestants=tuple(
        replace(LINES[series], name=f"{series}, workers: {number}", series=series, at=number, workers=number)
        for series in FEW
        for number in WORKERS
    ),
    task=Task(megabytes=10),
    notes=(TURNS, "One number of workers after the other. All processes share this machine's cores."),
    turns=2,
    budget_secs=150.0,
    axis="workers",
    staged=True,
)
QUESTIONS = (by_bytes(2, 160.0), by_bytes(4, 120.0), BY_WORKERS)
QUICK = (by_bytes(2, QUICK_SECS, most=100),)
