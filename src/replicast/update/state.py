"""The state as the protocol uses it: named variables that can be changed by edits and digested.

`replicast.training.TensorFlowState` has variables of TensorFlow; its twin in the tests, numpy arrays.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from replicast.update.edits import Edit, EditKind, by_variable, touched_rows
from replicast.update.schema import Schema

Arrays = dict[str, npt.NDArray[Any]]
Held: TypeAlias = Callable[[], tuple[Arrays, Arrays]]


class State(abc.ABC):
    """Named variables of one worker. For the training thread at a boundary; any thread may use `schema`."""

    schema: Schema
    devices: tuple[str, ...] = ()  # if this worker has several replicas: the device of each

    @abc.abstractmethod
    def apply(self, edits: Sequence[Edit]) -> None:
        """Applies edits that were checked against the schema, in order."""

    @abc.abstractmethod
    def digest(self, edits: Sequence[Edit]) -> str:
        """The digest of the bits that these edits touch: variables, or rows of them."""

    def digest_later(self, edits: Sequence[Edit]) -> Callable[[], str]:
        """As `digest`, of the bits as they are now. Any thread may call the result, at any time."""
        found = self.digest(edits)
        return lambda: found

    @abc.abstractmethod
    def read(self, names: Iterable[str], devices: Sequence[str] = ()) -> Arrays:
        """Copies of these variables' values; those on one of `devices` for each, if there are several."""

    def read_rows(self, name: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A copy of some rows of a variable."""
        rows: npt.NDArray[Any] = self.read([name])[name][indices]
        return rows

    def hold(self, whole: Iterable[str], rows: Mapping[str, npt.NDArray[np.int64]]) -> Held:
        """The values of these variables, and of these rows of others, as they are now."""
        values = self.read(whole)
        parts = {name: self.read_rows(name, indices) for name, indices in rows.items()}
        return lambda: (values, parts)

    @abc.abstractmethod
    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """The digest of each of these variables."""

    def written_by_rows(self) -> frozenset[str]:
        """The variables of which training writes single rows: the same on all workers at a boundary."""
        return frozenset()

    @abc.abstractmethod
    def snapshot(self, buffers: Arrays, replica: int | None = None) -> None:
        """Copies every variable of one replica into the buffers; allocates missing buffers.

        Without a number, the value that stands for all local replicas.
        """

    def restore_snapshot(self, buffers: Arrays, replica: int = 0) -> None:
        """Restores the bits that every variable of this replica had at `snapshot`."""
        for name, value in buffers.items():
            # Copy one at a time: assigning may take over the memory, which training would then change.
            self.apply([Edit(EditKind.ASSIGN, name, {"value": np.array(value)})])


def of_replicas(digests: Sequence[str]) -> str:
    """One digest for all replicas of a worker; if theirs differ, all of them: see `audit_report.agree`."""
    return digests[0] if len(set(digests)) == 1 else ",".join(digests)


def touched_parts(edits: Sequence[Edit]) -> tuple[list[str], Arrays]:
    """The variables that these edits touch completely, and the touched rows of others."""
    rows = {name: touched_rows(several) for name, several in sorted(by_variable(edits).items())}
    whole = [name for name, indices in rows.items() if indices is None]
    return whole, {name: indices for name, indices in rows.items() if indices is not None}
