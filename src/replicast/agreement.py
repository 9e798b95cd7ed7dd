"""Who agrees with whom about a variable, and whose value of it counts. Pure planning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["majority", "checkpoint and journal", "coordinator"]
"""Why one worker's value is the one that counts."""
Groups: TypeAlias = dict[str, tuple[int, ...]]
"""The workers that have each digest of one variable."""


def groups_of(digests: Mapping[int, Sequence[str]], names: Iterable[str]) -> dict[str, Groups]:
    """Who agrees with whom, for each variable on which not all workers agree.

    Args:
        digests: What each worker reported, by rank: one digest for each name, in their order.
        names: The variables.

    Returns:
        By variable: the workers that have each digest, the largest group first, then the lowest ranks.

    Raises:
        ValueError: A worker reported another number of digests.
    """
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
    """Whose value of a variable counts, and why.

    The strict majority's. Without one, that of whoever has the digest that is expected; else the
    coordinator's, which is worker 0 and always among them.

    Args:
        groups: The workers that have each digest.
        expected: The digest that checkpoint and journal give, if they do. Asked for only if there is no
            majority, since it takes long.

    Returns:
        The lowest rank of the group whose value counts, and the rule that chose it.
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
    """The groups of a `Difference`: the one that the reference is in, then the others as they were."""
    return tuple(sorted(groups.values(), key=lambda ranks: reference not in ranks))
