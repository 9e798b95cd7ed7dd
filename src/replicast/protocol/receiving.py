"""How a worker takes an update that another proposes: the bytes, and a look at every value.

Whether a value is finite is looked for by all workers of a host together, each at the share of the bytes
that it checks, while the processor has them at hand.
"""

from __future__ import annotations

import json
from typing import Any

import numpy.typing as npt

from replicast.finite import is_finite
from replicast.schema import Schema
from replicast.transport import Look, Parcel, Transport
from replicast.update import Update
from replicast.validate import Limits, planned


class Receiving:
    """Takes updates from the transport. For the follower's thread.

    Args:
        schema: The state that they are to change.
    """

    def __init__(self, transport: Transport, schema: Schema, limits: Limits) -> None:
        self._transport = transport
        self._schema = schema
        self._limits = limits

    def take(self, parcel: Parcel, timeout_secs: float) -> Update:
        """The update in a parcel, as it will be applied.

        Raises:
            UpdateRefused: The bytes did not arrive, or something about the update is wrong.
        """
        doubtful: set[int] = set()  # the places of arrays
        *arrays, described = self._transport.receive(parcel, timeout_secs, _looking(doubtful))
        update = Update.from_parts(json.loads(described.tobytes()), arrays)
        first = [0]
        for edit in update.edits:
            first.append(first[-1] + len(edit.arrays))

        def look_at(place: int) -> bool:  # to say which value it is, and where
            return not doubtful.isdisjoint(range(first[place], first[place + 1]))

        return planned(update, self._schema, self._limits, look_at=look_at)


def _looking(doubtful: set[int]) -> Look:
    def look(place: int, part: npt.NDArray[Any]) -> None:
        if place not in doubtful and not is_finite(part):
            doubtful.add(place)

    return look
