"""The optimizers of a model: its attributes, and those in its layers, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras

_LONGEST = 1000
"""A longer list or dict holds data, not optimizers. A step that uses an optimizer in it is refused."""


def held_optimizers(model: Any) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model and of all of its layers, each once, by name.

    The one that `compile` sets is "optimizer". Others are named after their attribute, with the name of the
    layer before it, and the index in a list or the key in a dict after it: "critic_optimizer",
    "dense_1/optimizer", "optimizers/0". A duplicate name gets a number: "optimizer#2".
    """
    found: dict[str, keras.optimizers.Optimizer] = {}
    ids: set[int] = set()
    for name, optimizer in _all_held(model):
        if id(optimizer) not in ids:
            ids.add(id(optimizer))
            found[_unused(name, found)] = optimizer
    return found


def optimizers_of(model: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model and of all of its layers, each once."""
    return list(held_optimizers(model).values())


def _unused(name: str, used: Mapping[str, Any]) -> str:
    unused, number = name, 1
    while unused in used:
        number += 1
        unused = f"{name}#{number}"
    return unused


def _all_held(model: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    seen: dict[int, Any] = {}
    yield from _inside("optimizer", getattr(model, "optimizer", None), seen)
    yield from _attributes("", model, seen)
    # Private: all layers at any depth; the public `layers` are those of the first level.
    for layer in model._flatten_layers(include_self=False):
        yield from _attributes(f"{layer.name}/", layer, seen)


def _attributes(
    prefix: str, holder: Any, seen: dict[int, Any]
) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    for name, value in list(vars(holder).items()):
        yield from _inside(prefix + name.lstrip("_"), value, seen)


def _inside(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    """The optimizers in a value.

    Args:
        name: The name of the value.
        value: Any value.
        seen: The lists and dicts visited so far, by id, because one may contain itself. Holds references,
            because the id of a deleted list may be reused.
    """
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen and len(value) <= _LONGEST:
        seen[id(value)] = value
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _inside(f"{name}/{key}", item, seen)
