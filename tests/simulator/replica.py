"""A replica of a few integers; training and updates change it in ways that do not commute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from replicast.core.messages import Applied, Published, Refuse, SeenDigests, Snapshot
from replicast.update.trial import Trial


class StoryFailed(AssertionError):  # noqa: N818 - read as a sentence
    """An invariant was violated."""


PRIME = 10007
START = {"a": 1, "b": 2, "d": 3}
"""The variables of a fresh model. Training changes `a` and `b`; only `d` may drift on one worker."""

Edit = tuple[str, str, int]
"""An update: the operation, the variable and a number."""


class InMemory(NamedTuple):
    """The bytes of an update, which only the workers of one attempt can fetch."""

    attempt: int
    edits: tuple[Edit, ...]


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


def overwrites(edits: tuple[Edit, ...]) -> bool:
    """Whether only the values before can undo an update."""
    return any(operation == "assign" for operation, _, _ in edits)


def undone(edits: tuple[Edit, ...], before: dict[str, int] | None) -> tuple[Edit, ...]:
    """The update that undoes another one."""
    if before is not None:
        return tuple(("assign", name, before[name]) for _, name, _ in edits)
    return tuple(
        ("add", name, -number) if operation == "add" else ("scale", name, pow(number, -1, PRIME))
        for operation, name, number in reversed(edits)
    )


def computed(values: dict[str, int], number: int) -> tuple[Edit, ...]:
    """The result of the function with this number for these values."""
    return (("assign", "b", (values["b"] * 7 + values["a"] + number) % PRIME),)


def digest_of(values: dict[str, int]) -> str:
    """Equal for equal values."""
    return f"{values['a']}.{values['b']}.{values['d']}"


class SimulatedReplica:
    """One worker's copy of the state."""

    def __init__(
        self,
        attempt: int,
        rank: int,
        step: int,
        values: dict[str, int],
        holds: frozenset[int],
        *,
        read: Callable[[str, str], tuple[Edit, ...] | None],
        undo: Callable[[int], tuple[Edit, ...]],
        on_apply: Callable[[SimulatedReplica, str, int], None],
    ) -> None:
        self.attempt = attempt
        self.rank = rank
        self.step = step
        self.values = dict(values)
        self.expected_d = values["d"]  # according to checkpoint and journal: training does not change it
        self.holds = set(holds)
        self.applied: list[tuple[int, int, str]] = []
        self.functions: dict[str, int | None] = {}
        self.no_room = False
        self.report_to_raise: Any = None
        self.place: Callable[[], int] = lambda: 0  # in the script behind the current boundary
        self._copy: tuple[dict[str, int], int] | None = None
        self._read = read
        self._undo = undo
        self._before: dict[int, tuple[tuple[str, int], ...]] = {}
        self.pulled: dict[str, tuple[int, frozenset[int], int]] = {}
        self._on_apply = on_apply
        self.prepared: dict[tuple[str, str], tuple[Edit, ...]] = {}
        self.fetching: dict[int, str] = {}  # ids of updates, by the number of the order
        self._metrics: list[int] = []
        self._copied_at = 0

    def train(self, steps: int) -> None:
        """Trains some steps."""
        for _ in range(steps):
            self.step += 1
            train(self.values, self.step)
            self._metrics.append(self.values["a"] % 100 + 1)

    def load(self, id_: str, digest: str) -> InMemory:
        """As in `Replica`."""
        edits = self._read(id_, digest)
        if edits is None:
            raise StoryFailed(f"the payload of {id_} is not in the journal")
        return InMemory(self.attempt, edits)

    def prepare(self, id_: str, digest: str, content: Any) -> None:
        """As in `Replica`."""
        if content.attempt != self.attempt:
            raise StoryFailed(
                f"worker {self.rank} fetches {id_} from attempt {content.attempt}, which is over"
            )
        if self.no_room:
            self.no_room = False
            raise Refuse("There is no room for the update")
        if any(name not in self.values for _, name, _ in content.edits):
            raise Refuse(f"There is no such variable. Received: {content.edits}")
        self.prepared[id_, digest] = content.edits

    def _edits(self, id_: str, digest: str) -> tuple[Edit, ...]:
        if (id_, digest) not in self.prepared:
            raise StoryFailed(f"worker {self.rank} needs {id_}, which it has not prepared")
        return self.prepared[id_, digest]

    def apply(self, id_: str, digest: str, sequence: int, keep: bool) -> Applied:
        """As in `Replica`."""
        self._on_apply(self, id_, sequence)
        edits = self._edits(id_, digest)
        del self.prepared[id_, digest]
        keeps = keep and self.rank == 0 and overwrites(edits)
        if keeps:
            self._before[sequence] = tuple((name, self.values[name]) for _, name, _ in edits)
        expected = {**self.values, "d": self.expected_d}
        change(self.values, edits)
        change(expected, edits)
        self.expected_d = expected["d"]
        self.applied.append((self.step, sequence, id_))
        self.holds.add(sequence)
        touched = ",".join(f"{name}={self.values[name]}" for _, name, _ in edits)
        return Applied(touched, trained=self.step, keeps=keeps)

    def write_before(self, sequence: int) -> tuple[Any, str]:
        """As in `Replica`."""
        if sequence not in self._before:
            raise StoryFailed(f"worker {self.rank} does not hold the values before update {sequence}")
        return self._before.pop(sequence), ""

    def drop_before(self, sequence: int) -> None:
        """As in `Replica`."""
        self._before.pop(sequence, None)

    def invert(self, id_: str, sequence: int, forced: bool) -> Published:
        """As in `Replica`."""
        return self._published(self._undo(sequence))

    def pull(self, id_: str, name: str, rows: tuple[tuple[int, int], ...]) -> str:
        """As in `Replica`."""
        self.pulled[id_] = self.step, frozenset(self.holds), self.values[name]
        return str(self.values[name])

    def discard(self, id_: str) -> None:
        """As in `Replica`."""
        self.prepared = {key: edits for key, edits in self.prepared.items() if key[0] != id_}
        self.fetching = {number: other for number, other in self.fetching.items() if other != id_}

    def compute(self, id_: str) -> Published:
        """As in `Replica`."""
        number = self.functions.pop(id_, None)
        if number is None:
            raise Refuse("The function raised ValueError")
        return self._published(computed(self.values, number))

    def publish(self, id_: str, names: tuple[str, ...], devices: tuple[str, ...] = ()) -> Published:
        """As in `Replica`."""
        return self._published(tuple(("assign", name, self.values[name]) for name in names))

    def _published(self, edits: tuple[Edit, ...]) -> Published:
        return Published(str(edits), InMemory(self.attempt, edits))

    def held(self) -> set[int]:
        """The updates whose values before are held and not written."""
        return set(self._before)

    @property
    def on_trial(self) -> bool:
        """As in `Replica`."""
        return self._copy is not None

    def report(self, report: Any, raises: bool) -> None:
        """As in `Replica`: only what is raised matters."""
        if raises:
            self.report_to_raise = report

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """As in `Replica`: the process does it."""

    def digest(self) -> str:
        """As in `Replica`."""
        return digest_of(self.values)

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        """As in `Replica`."""
        return {name: str(self.values[name]) for name in names or self.values}

    def examine(self) -> SeenDigests:
        """As in `Replica`."""
        return SeenDigests(self.step, self.digests(), trained=self.step)

    def glance(self) -> SeenDigests:
        """The digest that a planned audit compares."""
        return SeenDigests(self.step, {"state": self.digest()}, trained=self.step)

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        """As in `Replica`."""
        return {"d": str(self.expected_d)} if "d" in names else {}

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> dict[str, int]:
        """As in `Replica`."""
        values = {name: number for _, name, number in self._edits(id_, digest)}
        return {name: self.values[name] - values[name] for name in names}

    def snapshot(self, id_: str, *, due: bool, again: bool) -> Snapshot:
        """As in `Replica`."""
        details = tuple(self.values.items()), self.place()
        return Snapshot(self.step, self.digest(), frozenset(self.holds), details)

    def keep_copy(self) -> None:
        """As in `Replica`."""
        self._copy = dict(self.values), self.expected_d
        self._copied_at = len(self._metrics)

    def go_back(self) -> None:
        """As in `Replica`."""
        if self._copy is not None:
            values, self.expected_d = self._copy
            self.values = dict(values)

    def drop_copy(self) -> None:
        """As in `Replica`."""
        self._copy = None

    def measure(self, trial: Trial) -> tuple[float | None, int]:
        """As in `Replica`."""
        measured = self._metrics[self._copied_at :] if self.on_trial else self._metrics[-trial.steps :]
        return (sum(measured) / len(measured) if measured else None), len(measured)
