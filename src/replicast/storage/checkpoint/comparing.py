"""Compares two checkpoints, or two models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from replicast.audits.distances import Distance, distance
from replicast.files import RunDir
from replicast.storage.checkpoint.layout import dtype_of
from replicast.storage.checkpoint.reading import CheckpointReader, Progress, open_checkpoint
from replicast.update.edits import Array
from replicast.update.parts import factor_to_json
from replicast.update.schema import Schema, Variable

NOTHING = "nothing"
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable that differs between two models.

    Attributes:
        name: The variable.
        expected: What the first has: dtype and shape, or nothing.
        received: What the second has.
    """

    name: str
    expected: str
    received: str


class Verdict(StrEnum):
    """How a variable of two checkpoints compares."""

    EQUAL = "equal"  # every bit
    DIFFERENT = "different"  # other bits
    CHANGED = "changed"  # another shape or dtype, so that values cannot be compared
    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variable of two checkpoints. The numbers are None where values were not compared.

    Attributes:
        name: The variable.
        verdict: How it compares.
        first: What the first checkpoint has: dtype and shape, or nothing.
        second: What the second has.
        elements: How many elements it has.
        differing: How many of them differ in their bits.
        one_is_nan: How many are NaN in one checkpoint only.
        max_absolute: The largest absolute difference of elements that are not NaN.
        max_relative: The largest difference relative to the larger of the two.
    """

    name: str
    verdict: Verdict
    first: str
    second: str
    elements: int | None = None
    differing: int | None = None
    one_is_nan: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        numbers = {name: factor_to_json(getattr(self, name)) for name in ("max_absolute", "max_relative")}
        return asdict(self) | numbers | {"verdict": str(self.verdict)}


def differences(a: Schema, b: Schema) -> list[Difference]:
    """The variables whose shape or dtype differ, or that only one has: those of `a` first, in its order."""
    first, second = ({variable.name: _described(variable) for variable in schema} for schema in (a, b))
    return [
        Difference(name, first.get(name, NOTHING), second.get(name, NOTHING))
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    ]


def diff(a: RunDir, b: RunDir, *, values: bool = True, progress: Progress | None = None) -> list[Comparison]:
    """Compares two checkpoints variable by variable, in a stream.

    Every byte of both is read and checked against its digest, even if both have the same digest.

    Args:
        a: The first checkpoint's directory.
        b: The second's.
        values: Whether to read the values and report by how much they differ. Otherwise only the digests in
            the manifests are compared, and later damage to the bytes is not noticed.
        progress: Called with the number of bytes done, and the total.

    Raises:
        CheckpointError: One does not exist, or is not committed.
        FileDamaged: One is damaged.
    """
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        changed = {each.name: each for each in differences(first.manifest.schema, second.manifest.schema)}
        done, total = 0, sum(_nbytes(first, name) + _nbytes(second, name) for name in _names(first, second))
        made = []
        for name in _names(first, second):
            if name in changed:
                made.append(_changed(changed[name]))
            elif first.manifest.digests[name] == second.manifest.digests[name]:
                made.append(_same(first.layout.spans[name].variable))
            elif values:
                made.append(_compared(first, second, first.layout.spans[name].variable))
            else:
                text = _described(first.layout.spans[name].variable)
                made.append(Comparison(name, Verdict.DIFFERENT, text, text))
            if values:
                if made[-1].verdict is not Verdict.DIFFERENT:  # Otherwise the comparison has read them.
                    _check(name, first, second)
                done += _nbytes(first, name) + _nbytes(second, name)
                if progress is not None:
                    progress(done, total)
        return made


def _names(first: CheckpointReader, second: CheckpointReader) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first.names(), *second.names())))


def _nbytes(reader: CheckpointReader, name: str) -> int:
    return reader.layout.spans[name].nbytes if name in reader.layout.spans else 0


def _check(name: str, *readers: CheckpointReader) -> None:
    """Reads a variable where it exists: equal digests in the manifests do not prove intact bytes."""
    for reader in readers:
        if name in reader.layout.spans:
            for _ in reader.pieces(name):
                pass


def _described(variable: Variable) -> str:
    return f"{variable.dtype} of shape {variable.shape}"


def _changed(difference: Difference) -> Comparison:
    verdict = Verdict.CHANGED
    if NOTHING in (difference.expected, difference.received):
        verdict = Verdict.ONLY_FIRST if difference.received == NOTHING else Verdict.ONLY_SECOND
    return Comparison(difference.name, verdict, difference.expected, difference.received)


def _same(variable: Variable) -> Comparison:
    text, elements = _described(variable), int(np.prod(variable.shape, dtype=np.int64))
    return Comparison(variable.name, Verdict.EQUAL, text, text, elements, 0, 0, 0.0, 0.0)


def _compared(first: CheckpointReader, second: CheckpointReader, variable: Variable) -> Comparison:
    elements, found = 0, Distance()
    for left, right in zip(_pieces(first, variable), _pieces(second, variable), strict=True):
        found = found.then(distance(left, right), elements)
        elements += left.size
    text = _described(variable)
    verdict = Verdict.DIFFERENT if found.differing else Verdict.EQUAL
    numbers = elements, found.differing, found.one_is_nan, found.absolute, found.relative
    return Comparison(variable.name, verdict, text, text, *numbers)


def _pieces(reader: CheckpointReader, variable: Variable) -> Iterator[Array]:
    dtype = dtype_of(variable)
    sizes = iter(lambda: _PIECE_BYTES, None)
    return (np.frombuffer(piece, np.uint8).view(dtype) for piece in reader.pieces(variable.name, sizes))
