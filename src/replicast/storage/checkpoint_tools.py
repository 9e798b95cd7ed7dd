"""Applies an update to a checkpoint offline, in a stream, into a new checkpoint that names its parent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from replicast.errors import CheckpointError
from replicast.files import RunDir, RunPath
from replicast.storage import checkpoints
from replicast.storage.checkpoints import CheckpointReader, Manifest, Pieces, Progress, open_checkpoint
from replicast.storage.claims import checkpoint_parts
from replicast.strictjson import json_value
from replicast.update.distance import distance
from replicast.update.edits import Edit, apply_to_slice, by_variable, dtype_named, slices_of
from replicast.update.schema import Schema, Variable, planned
from replicast.update.update import Update


def patch(
    source: RunDir, update: Update, destination: Path | str, *, progress: Progress | None = None
) -> Manifest:
    """Writes the checkpoint that would exist if the update had been applied at its step.

    Needs little memory beyond that of the update, however large the checkpoint is. Every byte that is read
    is checked against its digest, so that damage is never copied.
    """
    target = RunPath(Path(destination).absolute().parent) / Path(destination).name
    with open_checkpoint(source) as reader:
        _check_destination(target, reader.manifest)
        plan = planned(update, reader.manifest.schema)
        with checkpoints.temporary_directory(target.parent) as temporary:
            before, path = reader.manifest, str(reader.path.as_path().resolve())
            parent = {"step": before.step, "path": path, "update_id": update.id}
            draft = replace(before, parent=parent, created_at=time.time(), metrics={})
            manifest = checkpoints.write_contents(temporary, draft, _patched(reader, plan, progress))
            _check_destination(target, manifest)  # It may exist by now.
            checkpoints.put_in_place(temporary, target)
    return manifest


def _check_destination(destination: RunPath, manifest: Manifest) -> None:
    try:
        step = checkpoint_parts(destination.name)[0]
    except ValueError:
        step = None  # Not the name of a run's checkpoint.
    beside = [destination]
    if step is not None:  # A job may find it there, so nothing else may have this step.
        beside += destination.parent.glob(f"{step:08d}-*")
    there = [path for path in beside if path.exists()]
    if there:
        raise CheckpointError(
            "The destination exists already",
            path=destination,
            received=str(there[0]),
            remedy="Use a directory that does not exist yet",
        )
    if step is not None and step != manifest.step:
        raise CheckpointError(
            "The destination has the name of another step",
            path=destination,
            expected=f"{manifest.step:08d}, or a name that is not a number",
            received=destination.name,
        )


def _patched(
    reader: CheckpointReader, plan: Update, progress: Progress | None
) -> Callable[[Variable], Pieces]:
    of_each = by_variable(plan.edits)
    done, total = 0, reader.layout.nbytes - len(reader.layout.header)

    def pieces_of(variable: Variable) -> Pieces:
        nonlocal done
        edits = of_each.get(variable.name)
        for piece in reader.pieces(variable.name) if edits is None else _edited(reader, variable.name, edits):
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)

    return pieces_of


def _edited(reader: CheckpointReader, name: str, edits: Sequence[Edit]) -> Iterator[memoryview]:
    variable = reader.layout.spans[name].variable
    dtype = dtype_named(variable.dtype)
    sizes = (block.shape[0] * block.shape[1] * dtype.itemsize for block in slices_of(variable.shape))
    blocks = slices_of(variable.shape)
    for piece in reader.pieces(name, sizes):
        block = next(blocks)
        current = np.frombuffer(piece, np.uint8).view(dtype).reshape(block.shape)
        after = apply_to_slice(edits, variable.shape, block, current)
        yield np.ascontiguousarray(after).reshape(-1).view(np.uint8).data


# Compares two checkpoints, or two models.

NOTHING = "nothing"


class Equality(StrEnum):
    EQUAL = "equal"  # every bit
    DIFFERENT = "different"  # other bits
    CHANGED = "changed"  # another shape or dtype, so that values cannot be compared
    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variable of two checkpoints or models. The numbers are None where values were not compared."""

    name: str
    verdict: Equality
    first: str
    second: str
    elements: int | None = None
    differing: int | None = None
    one_is_nan: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None

    def to_json(self) -> dict[str, Any]:
        numbers = {name: json_value(getattr(self, name)) for name in ("max_absolute", "max_relative")}
        return asdict(self) | numbers | {"verdict": str(self.verdict)}


def differences(a: Schema, b: Schema) -> list[Comparison]:
    """The variables whose shape or dtype differ, or that only one has: those of `a` first, in its order."""
    first, second = ({variable.name: _described(variable) for variable in schema} for schema in (a, b))
    found = []
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            verdict = Equality.ONLY_SECOND if name not in first else Equality.ONLY_FIRST
            verdict = Equality.CHANGED if name in first and name in second else verdict
            found.append(Comparison(name, verdict, first.get(name, NOTHING), second.get(name, NOTHING)))
    return found


def diff(a: RunDir, b: RunDir, *, values: bool = True, progress: Progress | None = None) -> list[Comparison]:
    """Compares two checkpoints variable by variable, in a stream.

    Every byte of both is read and checked against its digest, even if both have the same digest.
    """
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        changed = {each.name: each for each in differences(first.manifest.schema, second.manifest.schema)}
        names = tuple(dict.fromkeys((*first.names(), *second.names())))
        holders = {name: [one for one in (first, second) if name in one.layout.spans] for name in names}
        total = sum(one.layout.spans[name].nbytes for name in names for one in holders[name])
        done, made = 0, []
        for name in names:
            made.append(changed.get(name) or _compared(first, second, name, values=values))
            for reader in holders[name] if values else []:
                if made[-1].verdict is not Equality.DIFFERENT:  # Otherwise the comparison has read them.
                    for _ in reader.pieces(name):  # Equal digests in the manifests do not prove intact bytes.
                        pass
                done += reader.layout.spans[name].nbytes
                if progress is not None:
                    progress(done, total)
        return made


def _described(variable: Variable) -> str:
    return f"{variable.dtype} of shape {variable.shape}"


def _compared(first: CheckpointReader, second: CheckpointReader, name: str, *, values: bool) -> Comparison:
    variable = first.layout.spans[name].variable
    text, dtype = _described(variable), dtype_named(variable.dtype)
    if first.manifest.digests[name] == second.manifest.digests[name]:
        return Comparison(name, Equality.EQUAL, text, text, math.prod(variable.shape), 0, 0, 0.0, 0.0)
    if not values:
        return Comparison(name, Equality.DIFFERENT, text, text)
    sides = (reader.pieces(name) for reader in (first, second))
    values_of = ((np.frombuffer(piece, np.uint8).view(dtype) for piece in side) for side in sides)
    found = distance(zip(*values_of, strict=True))
    verdict = Equality.DIFFERENT if found.count else Equality.EQUAL
    numbers = found.of, found.count, found.one_is_nan, found.largest_absolute, found.largest_relative
    return Comparison(name, verdict, text, text, *numbers)
