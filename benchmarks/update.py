"""The `update` table: one worker's change of 100 MB, added on every worker, by whatever way there is."""

from __future__ import annotations

import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Protocol

from benchmarks.fit import Contestant, Say, order_of_round
from benchmarks.peers.mpi_group import MpiGroup, mpiexec
from benchmarks.report import Ratio, Result, Row
from benchmarks.update_task import Clock, Task
from benchmarks.update_worker import Entry
from benchmarks.workers import Crew, Failed, Ready

WORKERS = (2, 4)
PATIENCE_SECS = 60.0
BUDGET_SECS = 180.0
"""For one number of workers: no round begins after this."""
MODULE = "benchmarks.update_worker"
PEERS = "benchmarks.peers"

REPLICAST = Contestant(
    "replicast propose", "replicast", "benchmarks.update_replicast:Propose", "replicast.replicas"
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


class Group(Protocol):
    """Processes that stay up and run one contestant at a time."""

    def prepare(self, entry: Entry, patience_secs: float) -> None:
        """Sets up and runs once, unless that was done before."""

    def arrange(self, entry: Entry, patience_secs: float) -> None:
        """Checks the rounds until now and prepares the next."""

    def race(self, entry: Entry, patience_secs: float) -> None:
        """Runs a round, after which the clock has its times."""

    def end(self) -> None: ...


class CrewGroup:
    """A crew as a group."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def prepare(self, entry: Entry, patience_secs: float) -> None:
        for order in ("arrange", "race"):
            self._crew.prepare(Ready(f"{MODULE}:{order}", (entry,)), patience_secs)

    def arrange(self, entry: Entry, patience_secs: float) -> None:
        self._crew.seconds(Ready(f"{MODULE}:arrange", (entry,)), patience_secs)

    def race(self, entry: Entry, patience_secs: float) -> None:
        self._crew.seconds(Ready(f"{MODULE}:race", (entry,)), patience_secs)

    def end(self) -> None:
        self._crew.end()


def measure(workers: int, rounds: int, say: Say) -> Result:
    """Lets the contestants take turns.

    Args:
        workers: How many processes each of them has.
        rounds: How many turns each gets, if time allows.
        say: Told what is being done now.
    """
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        race = _Race(workers, Task(Path(directory)), say)
        try:
            done = race.run(rounds)
        finally:
            race.end()
    rows = {c: Row(c.name, tuple(race.times[c]), race.problems.get(c)) for c in CONTESTANTS}
    return Result(
        title=f"update on {workers} workers, {race.task} from worker 0 added on all",
        unit=f"ms until the last has applied, {done} rounds",
        rows=tuple(rows.values()),
        ratios=_ratios(rows),
        notes=(
            "Contestants take turns in every round; every round's weights are checked, number by number.",
            "A ratio: median of the rounds' ratios, and range. No contestant writes with fsync.",
            f"MPI: {_mpi()}.",
        ),
    )


class _Race:
    """One interleaved run."""

    def __init__(self, workers: int, task: Task, say: Say) -> None:
        self.task = task
        self.problems = {c: problem for c in CONTESTANTS if (problem := c.missing()) is not None}
        self.times: dict[Contestant, list[float | None]] = {c: [] for c in CONTESTANTS}
        self._workers = workers
        self._say = say
        self._clock = Clock(task.clock, workers)
        module = "benchmarks.contestants"
        self._groups: dict[str, Group] = {
            "stock": CrewGroup(Crew(f"{module}:stock_strategy", workers)),
            "replicast": CrewGroup(Crew(f"{module}:replicast_strategy", workers)),
            "torch": CrewGroup(Crew(f"{module}:torch_group", workers)),
            "mpi": MpiGroup(workers, task.directory),
        }

    def run(self, rounds: int) -> int:
        """Runs up to that many rounds after one that does not count; says how many it were."""
        begun = time.monotonic()
        for contestant in CONTESTANTS:
            self._turn(contestant, "warming up")
        done = 0
        while done < rounds and time.monotonic() - begun < BUDGET_SECS:
            for contestant in order_of_round(CONTESTANTS, done):
                self.times[contestant].append(self._turn(contestant, f"round {done + 1} of {rounds}"))
            done += 1
        for contestant in CONTESTANTS:
            self._check_last_round(contestant)
        return done

    def end(self) -> None:
        for group in self._groups.values():
            group.end()

    def _turn(self, contestant: Contestant, what: str) -> float | None:
        if contestant in self.problems:
            return None
        self._say(f"update, {self._workers} workers: {what}, {contestant.name}")
        group, entry = self._groups[contestant.crew], Entry(contestant.factory, self.task)
        try:
            group.prepare(entry, PATIENCE_SECS)  # nothing to do, unless another one has cost us the group
            group.arrange(entry, PATIENCE_SECS)
            self._clock.clear()
            group.race(entry, PATIENCE_SECS)
        except Failed as failure:
            self.problems[contestant] = str(failure)
            return None
        return self._clock.milliseconds()

    def _check_last_round(self, contestant: Contestant) -> None:
        if contestant in self.problems:
            return
        try:
            entry = Entry(contestant.factory, self.task)
            self._groups[contestant.crew].arrange(entry, PATIENCE_SECS)
        except Failed as failure:
            self.problems[contestant] = str(failure)


def _ratios(rows: dict[Contestant, Row]) -> tuple[Ratio, ...]:
    ours = rows[REPLICAST]
    return (
        Ratio.of("replicast / mpi4py per variable", ours, rows[MPI_EACH], "at most", 2.0),
        Ratio.of("replicast / mpi4py fused", ours, rows[MPI_FUSED], "at most", 2.0),
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
