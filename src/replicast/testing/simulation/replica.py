"""A replica of a few integers, which trains and is updated in ways that do not commute."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from replicast.core.refusal import Refuse
from replicast.trial import Trial


class StoryFailed(AssertionError):  # noqa: N818 - read as a sentence
    """A promise was broken."""


PRIME = 10007
START = {"a": 1, "b": 2, "d": 3}
"""The variables of a fresh model. Training changes `a` and `b`; only `d` may drift on one worker."""

Edit = tuple[str, str, int]
"""An update: the operation, the variable and a number."""


def train(values: dict[str, int], step: int) -> None:
    """One step of training."""
    values["a"] = (values["a"] * 3 + step) % PRIME
    values["b"] = (values["b"] * 5 + values["a"]) % PRIME


def change(values: dict[str, int], edits: tuple[Edit, ...]) -> None:
    """Applies an update."""
    for operation, name, number in edits:
        if operation == "add":
            values[name] = (values[name] + number) % PRIME
        elif operation == "scale":
            values[name] = values[name] * number % PRIME
        else:
            values[name] = number % PRIME


def computed(values: dict[str, int], number: int) -> tuple[Edit, ...]:
    """What the function with this number returns for these values."""
    return (("assign", "b", (values["b"] * 7 + values["a"] + number) % PRIME),)


def digest_of(values: dict[str, int]) -> str:
    """Equal for equal values."""
    return f"{values['a']}.{values['b']}.{values['d']}"


class SimulatedReplica:
    """One worker's copy of the state.

    Args:
        rank: Which worker.
        step: The step that its state is of.
        values: The variables.
        holds: The updates in it.
        on_apply: Called with each update and its number, before it is applied.
        on_snapshot: Called with the number of each snapshot.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        values: dict[str, int],
        holds: frozenset[int],
        on_apply: Callable[[SimulatedReplica, str, int], None],
        on_snapshot: Callable[[SimulatedReplica, int], None],
    ) -> None:
        self.rank = rank
        self.step = step
        self.values = dict(values)
        self.holds = set(holds)
        self.applied: list[tuple[int, int, str]] = []
        self.functions: dict[str, int | None] = {}
        self.no_room = False
        self.copy: dict[str, int] | None = None
        self._on_apply = on_apply
        self._on_snapshot = on_snapshot
        self._snapshots = 0
        self._prepared: dict[tuple[str, str], tuple[Edit, ...]] = {}
        self._metrics: list[int] = []
        self._copied_at = 0

    def train(self, steps: int) -> None:
        """Trains some steps."""
        for _ in range(steps):
            self.step += 1
            train(self.values, self.step)
            self._metrics.append(self.values["a"] % 100 + 1)

    def prepare(self, id_: str, digest: str, content: Hashable) -> None:
        """As in `Replica`."""
        if self.no_room:
            self.no_room = False
            raise Refuse("There is no room for the update")
        edits: Any = content
        if any(name not in self.values for _, name, _ in edits):
            raise Refuse(f"There is no such variable. Received: {edits}")
        self._prepared[id_, digest] = edits

    def apply(self, id_: str, digest: str, sequence: int) -> str:
        """As in `Replica`."""
        self._on_apply(self, id_, sequence)
        if (id_, digest) not in self._prepared:
            raise StoryFailed(f"worker {self.rank} applies {id_}, which it has not prepared")
        edits = self._prepared.pop((id_, digest))
        change(self.values, edits)
        self.applied.append((self.step, sequence, id_))
        self.holds.add(sequence)
        return ",".join(f"{name}={self.values[name]}" for _, name, _ in edits)

    def discard(self, id_: str) -> None:
        """As in `Replica`."""
        self._prepared = {key: edits for key, edits in self._prepared.items() if key[0] != id_}

    def compute(self, id_: str) -> tuple[str, Hashable]:
        """As in `Replica`."""
        number = self.functions.pop(id_, None)
        if number is None:
            raise Refuse("The function raised ValueError")
        edits = computed(self.values, number)
        return str(edits), edits

    @property
    def on_trial(self) -> bool:
        """As in `Replica`."""
        return self.copy is not None

    def report(self, report: Any, *, raises: bool) -> None:
        """As in `Replica`: nobody reads it."""

    def leave(self) -> None:
        """As in `Replica`: the process does it."""

    def digest(self) -> str:
        """As in `Replica`."""
        return digest_of(self.values)

    def digests(self) -> dict[str, str]:
        """As in `Replica`."""
        return {name: str(value) for name, value in self.values.items()}

    def expected(self) -> dict[str, str]:
        """As in `Replica`: this one knows nothing."""
        return {}

    def publish(self, names: tuple[str, ...]) -> tuple[str, Hashable]:
        """As in `Replica`."""
        edits = tuple(("assign", name, self.values[name]) for name in names)
        return str(edits), edits

    def snapshot(self) -> tuple[str, Hashable, frozenset[int]]:
        """As in `Replica`."""
        self._snapshots += 1
        self._on_snapshot(self, self._snapshots)
        return self.digest(), (tuple(self.values.items()), self._snapshots), frozenset(self.holds)

    def keep_copy(self) -> None:
        """As in `Replica`."""
        self.copy = dict(self.values)
        self._copied_at = len(self._metrics)

    def go_back(self) -> None:
        """As in `Replica`."""
        if self.copy is not None:
            self.values = dict(self.copy)

    def drop_copy(self) -> None:
        """As in `Replica`."""
        self.copy = None

    def measure(self, trial: Trial) -> float | None:
        """As in `Replica`."""
        measured = self._metrics[-trial.steps :] if self.copy is None else self._metrics[self._copied_at :]
        return sum(measured) / len(measured) if measured else None
