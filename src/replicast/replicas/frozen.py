"""Variables that keep their values while a restarted script repeats what was done before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replicast.runtime import Session
from replicast.update.edits import Edit, Operation
from replicast.update.state import Arrays, State


class FrozenVariables:
    """Variables that stay as they are, whatever the script or its callbacks do: it was done before.

    An update changes them all the same, and ends that. For the training thread.
    """

    def __init__(self, session: Session, state: State) -> None:
        self._session = session
        self._state = state
        self._copy: Arrays = {}
        self._digests: dict[str, str] = {}
        self._holds: set[int] = set()

    def keep(self, names: Iterable[str] | None = None) -> None:
        """Keeps the values of these variables; by default, of all."""
        holds = self._session.replica.holds
        if self._copy and self._holds == holds:
            return
        chosen = [variable.name for variable in self._state.schema] if names is None else [*names]
        self._copy, self._digests = self._state.read(chosen), self._state.digests(chosen)
        self._holds = set(holds)

    def put_back(self) -> None:
        """Gives the variables that were changed since `keep` their values again."""
        if not self._copy or self._holds != self._session.replica.holds:
            return
        for name, digest in self._state.digests(self._copy).items():
            if digest != self._digests[name]:
                # A copy: assigning may take the memory over, and training would change it.
                self._state.apply([Edit(Operation.ASSIGN, name, {"value": np.array(self._copy[name])})])

    def release(self) -> None:
        """Lets go of them."""
        self._copy, self._digests = {}, {}
