"""How a worker takes an update that another proposes: the bytes, and a look at every value.

Whether a value is finite is looked for by all workers together, each at its share, and by the proposing one
not at all: it is busy enough. A large update is looked at while its bytes still arrive.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy.typing as npt

from replicast.schema import Schema
from replicast.transport import Parcel, Transport
from replicast.update import Update
from replicast.validate import Limits, planned, surely_finite

EXPECTED_AT_ONCE = 4


class Receiving:
    """Takes updates from the transport. For the follower's thread.

    Args:
        schema: The state that they are to change.
        rank: Which worker this is.
        size: The number of workers.
    """

    def __init__(self, transport: Transport, schema: Schema, limits: Limits, rank: int, size: int) -> None:
        self._transport = transport
        self._schema = schema
        self._limits = limits
        self._rank = rank
        self._size = size
        self._finite: dict[str, Counter[tuple[int, int]]] = {}

    def expect(self, parcel: Parcel) -> None:
        """The bytes are on their way: looks at them as they come."""
        # Bytes by place and address; written by the arrival's thread until `receive` returns.
        finite: Counter[tuple[int, int]] = Counter()
        self._finite[parcel.id] = finite
        while len(self._finite) > EXPECTED_AT_ONCE:
            del self._finite[next(iter(self._finite))]

        mine = {place for place in range(len(parcel.arrays)) if self._is_mine(place, parcel)}

        def look(place: int, array: npt.NDArray[Any], part: npt.NDArray[Any]) -> None:
            if place in mine and (array.dtype.kind in "iub" or surely_finite(part)):
                finite[place, array.ctypes.data] += part.nbytes

        self._transport.expect(parcel, look)

    def take(self, parcel: Parcel, timeout_secs: float) -> Update:
        """The update in a parcel, as it will be applied.

        Raises:
            UpdateRefused: The bytes did not arrive, or something about the update is wrong.
        """
        *arrays, described = self._transport.receive(parcel, timeout_secs)
        update = Update.from_parts(json.loads(described.tobytes()), arrays)
        known = self._finite.pop(parcel.id, Counter())
        # By address, because what was looked at may not be what was received in the end.
        seen = [known[place, array.ctypes.data] == array.nbytes for place, array in enumerate(arrays)]
        first = [0]
        for edit in update.edits:
            first.append(first[-1] + len(edit.arrays))

        def look_at(place: int) -> bool:
            arrays_of_edit = seen[first[place] : first[place + 1]]
            was_looked_at = bool(arrays_of_edit) and all(arrays_of_edit)  # a factor is no array
            return self._is_mine(place, parcel) and not was_looked_at

        return planned(update, self._schema, self._limits, look_at=look_at)

    def _is_mine(self, place: int, parcel: Parcel) -> bool:
        others = [rank for rank in range(self._size) if rank != parcel.source] or [parcel.source]
        return others[place % len(others)] == self._rank
