"""Updates that one worker computes from the live values at a boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy.typing as npt

from replicast.errors import UpdateRefused
from replicast.update.state import State
from replicast.update.update import Update

Function = Callable[[Mapping[str, npt.NDArray[Any]]], "Update | Mapping[str, Any] | None"]


class LiveValues(Mapping[str, "npt.NDArray[Any]"]):
    """The values of the variables at this boundary. Each lookup makes a copy.

    Any unique suffix of a name works, as in an update.
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
    """Runs a user's function on the live values and returns its update under the agreed id.

    Raises:
        UpdateRefused: The function raised, called `sys.exit`, or returned neither an `Update` nor a mapping.
        KeyboardInterrupt: Somebody pressed Ctrl-C meanwhile: that is for the job.
    """
    try:
        returned = function(LiveValues(state))
    except UpdateRefused:
        raise
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # An exit is an error of the function too: all workers wait for its result.
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
        f"The function {_name(function)} must return an Update, or a dict from variable names to new values",
        received=type(returned).__name__,
        worker=rank,
    )


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", repr(function))
