"""Variables that keep their values while a restarted script repeats work that is already in the state."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replicast.runtime import Session
from replicast.update.edits import Edit, EditKind
from replicast.update.state import Arrays, State


class FrozenVariables:
    """Variables whose values are restored after a restarted script or its callbacks change them again.

    An update still changes them, and ends the freeze. For the training thread.
    """

    def __init__(self, session: Session, state: State) -> None:
        self._session = session
        self._state = state
        self._copy: Arrays = {}
        self._digests: dict[str, str] = {}
        self._holds: set[int] = set()

    def keep(self, names: Iterable[str] | None = None) -> None:
        """Freezes these variables; by default, all."""
        holds = self._session.replica.holds
        if self._copy and self._holds == holds:
            return
        chosen = [variable.name for variable in self._state.schema] if names is None else [*names]
        self._copy, self._digests = self._state.read(chosen), self._state.digests(chosen)
        self._holds = set(holds)

    def put_back(self) -> None:
        """Restores the values of the variables that have changed since `keep`."""
        if not self._copy or self._holds != self._session.replica.holds:
            return
        for name, digest in self._state.digests(self._copy).items():
            if digest != self._digests[name]:
                # A copy: the variable may take over the assigned memory, and training would change it.
                self._state.apply([Edit(EditKind.ASSIGN, name, {"value": np.array(self._copy[name])})])

    def release(self) -> None:
        """Ends the freeze."""
        self._copy, self._digests = {}, {}
