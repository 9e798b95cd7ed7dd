"""The optimizers of a model: its own, and those that its layers, lists and dicts hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras


def held_optimizers(model: Any) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model and of all of its layers, by where they are held.

    The one that `compile` sets is "optimizer". Others are named after the attribute, with the name of the
    layer before it, and the index in a list or the key in a dict after it: "critic_optimizer",
    "dense_1/optimizer", "optimizers/0".
    """
    found: dict[str, keras.optimizers.Optimizer] = {}
    for name, optimizer in _all_held(model):
        if not any(optimizer is other for other in found.values()):
            found[name] = optimizer
    return found


def optimizers_of(model: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model and of all of its layers, each once."""
    return list(held_optimizers(model).values())


def _all_held(model: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    yield from _inside("optimizer", getattr(model, "optimizer", None))
    yield from _attributes("", model)
    # Private: all layers at any depth; the public `layers` are those of the first level.
    for layer in model._flatten_layers(include_self=False):
        yield from _attributes(f"{layer.name}/", layer)


def _attributes(prefix: str, holder: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    for name, value in list(vars(holder).items()):
        yield from _inside(prefix + name.lstrip("_"), value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _inside(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _inside(f"{name}/{place}", item)
