"""Which workers agree on a variable, and which worker's value is the reference. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["majority", "checkpoint and journal", "coordinator"]
"""Why a worker's value is the reference."""
Groups: TypeAlias = dict[str, tuple[int, ...]]
"""For one variable: the workers that have each digest."""


def groups_of(digests: Mapping[int, Sequence[str]], names: Iterable[str]) -> dict[str, Groups]:
    """Groups the workers by digest, for each variable on which not all workers agree."""
    names = list(names)
    for rank, reported in digests.items():
        if len(reported) != len(names):
            raise ValueError(
                f"Worker {rank} must report one digest for each of {len(names)} variables. "
                f"Received: {len(reported)}"
            )
    found: dict[str, Groups] = {}
    for place, name in enumerate(names):
        groups: dict[str, list[int]] = {}
        for rank in sorted(digests):
            groups.setdefault(digests[rank][place], []).append(rank)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
            found[name] = {digest: tuple(ranks) for digest, ranks in ordered}
    return found


def reference_of(groups: Groups, expected: Callable[[], str | None] = lambda: None) -> tuple[int, Rule]:
    """Chooses the worker whose value of a variable is the reference, and says why.

    The value of the strict majority. Without a majority, the value with the expected digest; otherwise that
    of the coordinator, worker 0, which is always among the workers.
    """
    workers = sum(len(ranks) for ranks in groups.values())
    for ranks in groups.values():
        if 2 * len(ranks) > workers:
            return min(ranks), "majority"
    digest = expected()
    if digest is not None and digest in groups:
        return min(groups[digest]), "checkpoint and journal"
    return min(min(ranks) for ranks in groups.values()), "coordinator"


def reference_first(groups: Groups, reference: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a `Difference`: the reference's group first, then the others in the same order."""
    return tuple(sorted(groups.values(), key=lambda ranks: reference not in ranks))
