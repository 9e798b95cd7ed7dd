"""Updates that one worker computes from the live values, at a boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy.typing as npt

from replicast.errors import UpdateRefused
from replicast.update.state import State
from replicast.update.update import Update

Function = Callable[[Mapping[str, npt.NDArray[Any]]], "Update | Mapping[str, Any] | None"]


class LiveValues(Mapping[str, "npt.NDArray[Any]"]):
    """The values of the variables at this boundary: copies, each made when it is looked at.

    Names may be shortened as in an update.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        full = self._state.schema.resolve(name).name
        return self._state.read([full])[full]

    def __iter__(self) -> Iterator[str]:
        return (variable.name for variable in self._state.schema)

    def __len__(self) -> int:
        return len(self._state.schema)


def computed_update(id_: str, function: Function, state: State, rank: int) -> Update:
    """What a user's function makes of the live values, under the id that was agreed.

    Raises:
        UpdateRefused: The function raised, or returned something else.
    """
    try:
        returned = function(LiveValues(state))
    except UpdateRefused:
        raise
    except Exception as error:
        said = f"The function {_name(function)} raised {type(error).__name__}: {error}"
        raise UpdateRefused(said, worker=rank) from error
    if isinstance(returned, Update):
        return Update.from_parts({**returned.describe(), "id": id_}, returned.arrays())
    if isinstance(returned, Mapping):
        update = Update(id=id_)
        for name, value in returned.items():
            update = update.assign(name, value)
        return update
    raise UpdateRefused(
        f"The function {_name(function)} must return an Update, or the new value of each variable by name",
        received=type(returned).__name__,
        worker=rank,
    )


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", repr(function))
