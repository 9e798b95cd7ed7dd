"""The state of a worker while nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replicast.edits import Edit, Operation
from replicast.protocol import Member
from replicast.state import Arrays


class Held:
    """Variables that stay as they are, whatever the script or its callbacks do: it was done before.

    What is changed by an update is no such thing: then all stays as it is. For the training thread.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._copy: Arrays = {}
        self._digests: dict[str, str] = {}
        self._applied: set[int] = set()

    def keep(self, names: Iterable[str] | None = None) -> None:
        """Keeps the values of these variables; by default, of all."""
        if self._copy and self._applied == self._member.applied:
            return
        state = self._member.state
        chosen = [variable.name for variable in state.schema] if names is None else [*names]
        self._copy, self._digests = state.read(chosen), state.digests(chosen)
        self._applied = set(self._member.applied)

    def put_back(self) -> None:
        """Gives the variables that were changed since `keep` their values again."""
        if not self._copy or self._applied != self._member.applied:
            return
        state = self._member.state
        for name, digest in state.digests(self._copy).items():
            if digest != self._digests[name]:
                # A copy: assigning may take the memory over, and training would change it.
                state.apply([Edit(Operation.ASSIGN, name, {"value": np.array(self._copy[name])})])

    def release(self) -> None:
        """Lets go of them."""
        self._copy, self._digests = {}, {}
