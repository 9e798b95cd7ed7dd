"""Checks of replicas: the bytes of their state, and whether they are the same on all workers."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def rank() -> int:
    """Which worker this process is."""
    return int(os.environ["RANK"])


def state(model_or_variables: Any) -> dict[str, np.ndarray]:
    """The local value of each variable by its path: weights, seeds and the optimizer's, not metrics.

    Nothing is asked of the other workers: what this one holds is what is returned. A path that occurs again,
    and each further replica of this worker, is told apart by a number.
    """
    values: dict[str, np.ndarray] = {}
    for variable in _variables(model_or_variables):
        name = getattr(variable, "path", variable.name)
        for value in _local_values(variable):
            values[_unused(name, values)] = value
    return values


def digest(model_or_variables: Any) -> dict[str, str]:
    """As `state`, with a SHA-256 of dtype, shape and bytes in place of each value."""
    return {name: _hash(value) for name, value in state(model_or_variables).items()}


def assert_equal_on_all(results: Sequence[Any]) -> None:
    """Asserts that every worker returned the same values and nested dicts and lists of them, bit for bit."""
    __tracebackhide__ = True
    expected = dict(_leaves(results[0]))
    differences = []
    for worker, result in enumerate(results[1:], start=1):
        found = dict(_leaves(result))
        for name in expected.keys() | found.keys():
            difference = _difference(name, expected, found)
            if difference:
                differences.append(f"{name or 'the result'}: worker {worker} {difference}")
    if differences:
        raise AssertionError("\n".join(["Worker 0 and others differ.", *sorted(differences)]))


def _variables(model_or_variables: Any) -> list[Any]:
    if not hasattr(model_or_variables, "variables"):
        return list(model_or_variables)
    optimizer = getattr(model_or_variables, "optimizer", None)
    of_optimizer = optimizer.variables if optimizer is not None else []
    return [*model_or_variables.variables, *of_optimizer]


def _local_values(variable: Any) -> list[np.ndarray]:
    held = getattr(variable, "value", variable)
    held = variable if callable(held) else held  # of Keras a property, of TensorFlow a method
    # Reading a distributed variable as a whole may be a collective; reading its local parts never is.
    parts = getattr(held, "values", None)
    return [np.asarray(part) for part in ([held] if parts is None else parts)]


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    candidates = itertools.chain([name], (f"{name} #{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _hash(value: np.ndarray) -> str:
    found = hashlib.sha256(f"{value.dtype} {value.shape}".encode())
    found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name} > {key}" if name else str(key))


def _difference(name: str, expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    if name not in found:
        return "does not have it"
    if name not in expected:
        return "has it, worker 0 does not"
    ours, theirs = expected[name], found[name]
    if not isinstance(ours, np.ndarray | np.generic | float):
        return None if type(ours) is type(theirs) and ours == theirs else f"has {theirs!r}, worker 0 {ours!r}"
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"has {theirs.dtype}{list(theirs.shape)}, worker 0 {ours.dtype}{list(ours.shape)}"
    if ours.tobytes() == theirs.tobytes():
        return None
    if ours.ndim == 0:
        return f"has {theirs}, worker 0 {ours}"
    unequal = int(np.sum(ours != theirs))
    if unequal == 0:
        return "differs in its bytes only: the sign of a zero"
    if ours.dtype.kind not in "fiu":
        return f"differs in {unequal} of {ours.size} elements"
    with np.errstate(invalid="ignore"):  # infinity less infinity
        furthest = np.max(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)))
    return f"differs in {unequal} of {ours.size} elements, at most by {furthest:.3g}"
