"""MPI with mpi4py: a broadcast and an addition in numpy, and the process that runs them.

Run by `mpiexec -n N python -m benchmarks.peers.mpi DIRECTORY`. Each rank reads its orders from its own pipe:
a rank that waited inside MPI would keep a core busy while others are measured.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.mpi_group import ANSWERS, Line, orders_of
from benchmarks.runner import SOURCE, Array, Entry, Runner, runner_of
from benchmarks.update_task import Adding, Task
from replicast.supervisor.bootstrap import die_with

if TYPE_CHECKING:
    from typing import TextIO


class Fused(Adding):
    """One broadcast of all variables, which are in one buffer."""

    def setup(self) -> None:
        self.variables = np.zeros((self.task.variables, *self.task.shape), np.float32)
        self.delta = np.zeros_like(self.variables)

    def weights(self) -> Iterable[Array]:
        return self.variables

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.delta[:] = self.task.change(index)

    def round(self, index: int) -> tuple[int | None, int]:
        start = time.monotonic_ns()
        self._transfer_and_add()
        return start if self.is_source else None, time.monotonic_ns()

    def _transfer_and_add(self) -> None:
        self.group.Bcast(self.delta, root=SOURCE)
        np.add(self.variables, self.delta, out=self.variables)


class Each(Fused):
    """One broadcast for each variable."""

    def _transfer_and_add(self) -> None:
        for variable, delta in zip(self.variables, self.delta, strict=True):
            self.group.Bcast(delta, root=SOURCE)
            np.add(variable, delta, out=variable)


def main(directory: Path) -> None:
    """The main loop of a rank: one order in, one answer out, until the orders end."""
    die_with(os.getppid())
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with (
        (directory / ANSWERS).open("w", buffering=1) as answers,
        orders_of(directory, world.rank).open() as orders,
    ):
        print(Line(world.rank, "here"), file=answers)
        serve(world, orders, answers, directory)


def serve(world: Any, orders: TextIO, answers: TextIO, directory: Path) -> None:
    runners: dict[str, Runner] = {}
    for line in orders:
        order, contestant = line.split()
        try:
            if order == "prepare":
                entry = Entry(contestant, Task(directory))
                runners[contestant] = runner_of(world, entry, world.rank, world.size)
            else:
                getattr(runners[contestant], order)()
            answer = "done"
        except Exception:
            answer = traceback.format_exc().strip().splitlines()[-1][:200]
        print(Line(world.rank, answer), file=answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
