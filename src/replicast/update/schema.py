"""The schema of the state: names, shapes and dtypes, against which updates are checked."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import xxhash

from replicast.errors import UpdateRefused
from replicast.update.edits import DTYPES

Kind: TypeAlias = Literal["trainable", "non_trainable", "optimizer"]
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**48
"""More than any array has; numpy raises on sizes that overflow."""
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the state.

    Attributes:
        name: Its unique full name.
        shape: Its dimensions.
        dtype: The name of its dtype.
        kind: Its role in the model.
        slots: The optimizer variables that belong to it, each with the value it is reset to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    slots: tuple[tuple[str, float], ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of its value in bytes."""
        bits = "".join(character for character in self.dtype if character.isdigit())
        return math.prod(self.shape) * (int(bits) // 8 if bits else 1)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "kind": self.kind,
            "slots": [[name, value] for name, value in self.slots],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Variable:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a variable.
        """
        try:
            variable = cls(
                name=str(fields["name"]),
                shape=tuple(fields["shape"]),
                dtype=str(fields["dtype"]),
                kind=fields["kind"],
                slots=tuple((str(name), float(value)) for name, value in fields["slots"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Invalid variable ({error!r}). Received: {str(fields)[:200]}") from error
        if (
            variable.dtype not in DTYPES
            or variable.kind not in get_args(Kind)
            or len(variable.shape) > MAX_DIMENSIONS
            or any(type(size) is not int or size < 0 for size in variable.shape)  # `type`: True is an int
            # Zeros count as 1: numpy multiplies the other dimensions too, and they may overflow.
            or math.prod(max(size, 1) for size in variable.shape) >= MAX_ELEMENTS
        ):
            raise ValueError(f"Invalid dtype, kind or shape of a variable. Received: {str(fields)[:200]}")
        return variable


class Schema:
    """All variables of the state, found by name.

    Args:
        variables: The variables, in the order of the state.
        hints: Explanations for names that users may expect to exist, but that do not.

    Raises:
        ValueError: Two variables have the same name, or a slot is not a variable.
    """

    def __init__(
        self, variables: Iterable[Variable], hints: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._variables: dict[str, Variable] = {}
        for variable in variables:
            if variable.name in self._variables:
                raise ValueError(f"Variable names must be unique. Received twice: {variable.name}")
            self._variables[variable.name] = variable
        for variable in self._variables.values():
            missing = [slot for slot, _ in variable.slots if slot not in self._variables]
            if missing:
                raise ValueError(f"A slot of {variable.name} is not a variable. Received: {missing[0]}")
        self._hints = dict(hints)
        self._by_suffix: dict[str, list[str]] = {}
        for name in self._variables:
            for suffix in _suffixes(name):
                self._by_suffix.setdefault(suffix, []).append(name)

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._variables.values())

    def __len__(self) -> int:
        return len(self._variables)

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def resolve(self, name: str) -> Variable:
        """Finds a variable by its full name, or by any unique suffix of it that starts after a "/".

        Raises:
            UpdateRefused: No variable matches, or several do; the message lists similar or matching names.
        """
        if name in self._variables:
            return self._variables[name]
        matches = self._by_suffix.get(name, [])
        if len(matches) == 1:
            return self._variables[matches[0]]
        if matches:
            raise UpdateRefused(
                f"The name matches {len(matches)} variables",
                variable=name,
                expected=f"one of {_listed(matches, 20)}",
                received=name,
            )
        hint = self._hint(name)
        near = self._near(name)
        raise UpdateRefused(
            f"There is no variable with this name: {hint}" if hint else "There is no variable with this name",
            variable=name,
            expected=f"perhaps {_listed(near)}" if near else f"one of {_listed(list(self._variables))}",
            received=name,
        )

    def to_json(self) -> dict[str, Any]:
        """The schema as JSON values."""
        return {"variables": [variable.to_json() for variable in self], "hints": dict(self._hints)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Schema:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a schema.
        """
        variables, hints = fields.get("variables"), fields.get("hints", {})
        if not isinstance(variables, list) or not isinstance(hints, dict):
            raise ValueError(f"Invalid schema. Received: {str(fields)[:200]}")
        return cls(
            [Variable.from_json(variable) for variable in variables],
            {str(name): str(hint) for name, hint in hints.items()},
        )

    def digest(self) -> str:
        """A digest that is equal on two workers if they have the same variables in the same order."""
        described = [variable.to_json() for variable in self]
        return xxhash.xxh3_128(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def _hint(self, name: str) -> str | None:
        if name in self._hints:
            return self._hints[name]
        matches = [hint for full, hint in self._hints.items() if name in _suffixes(full)]
        return matches[0] if len(matches) == 1 else None

    def _near(self, name: str) -> list[str]:
        """Full names that this one abbreviates, as `lr`, that are similar to it, or have a suffix that is."""
        near = [suffix for suffix in self._by_suffix if _initials(suffix) == name.rpartition("/")[2].lower()]
        near += difflib.get_close_matches(name, list(self._by_suffix), n=4 * _MAX_NAMES, cutoff=0.6)
        return list(dict.fromkeys(full for suffix in near for full in self._by_suffix[suffix]))[:_MAX_NAMES]


def _suffixes(name: str) -> list[str]:
    """Every suffix of a name that starts after a "/", the full name first."""
    parts = name.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _initials(name: str) -> str:
    """The first letters of the words of a name without a "/": "lr" for learning_rate; empty for one word."""
    words = name.split("_")
    return "".join(word[:1] for word in words).lower() if len(words) > 1 and "/" not in name else ""


def _listed(names: list[str], limit: int = _MAX_NAMES) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
