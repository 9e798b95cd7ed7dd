"""Messages, entries and orders as short text."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def described(thing: Any) -> str:
    """A message, entry or order in one line: its fields that are set."""
    if is_dataclass(thing) and not isinstance(thing, type):
        pairs = [(field.name, getattr(thing, field.name), field.default) for field in fields(thing)]
        said = [f"{name}={described(value)}" for name, value, default in pairs if value != default]
        return f"{type(thing).__name__}({', '.join(said)})"
    return str(thing)
