"""A measured process: carries out the orders of its parent until that ends.

Run by `python -m benchmarks.worker SOCKET GROUP`; GROUP is the function, as `module:function`, that gives
what the workers share. This file and what it imports need only numpy: peers have environments of their own.
A process that waits for its next order sleeps: it takes nothing from the one that is measured.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

from benchmarks.runner import Entry, Runner, load, runner_of


def rank_and_size() -> tuple[int, int]:
    """Set by the parent, or by mpiexec."""
    rank = os.environ.get("PMI_RANK", os.environ.get("RANK"))
    size = os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE"))
    assert rank is not None
    assert size is not None
    return int(rank), int(size)


class Worker:
    """What one process holds: the group, made on first use, and its contestants."""

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._group: Any = None
        self._runners: dict[Entry, Runner] = {}

    def carry_out(self, order: str, entry: Entry) -> Any:
        if order != "setup":
            return getattr(self._runners[entry], order)()
        if self._group is None:
            self._group = load(self._factory)()
        self._runners[entry] = runner_of(self._group, entry, *rank_and_size())
        return None


def main(address: str, factory: str) -> None:
    """The main loop: one order in, one answer out."""
    connection: Connection = Client(address, "AF_UNIX")
    connection.send_bytes(pickle.dumps(rank_and_size()[0]))
    worker = Worker(factory)
    while True:
        try:
            order, entry = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            if "mpi4py.MPI" in sys.modules:
                sys.modules["mpi4py.MPI"].Finalize()  # removes its shared memory
            os._exit(0)
        try:
            answer = ("returned", worker.carry_out(order, entry))
        except Exception:
            answer = ("raised", traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    # Under its importable name, so that this process can unpickle the parent's objects.
    importlib.import_module("benchmarks.worker").main(*sys.argv[1:3])
