"""Applies an update to a checkpoint offline, in a stream, into a new checkpoint that names its parent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from replicast.errors import CheckpointError
from replicast.files import RunDir, RunPath
from replicast.storage.checkpoint.layout import dtype_of
from replicast.storage.checkpoint.manifest import Draft, Manifest
from replicast.storage.checkpoint.reading import CheckpointReader, Progress, open_checkpoint
from replicast.storage.checkpoint.slices import apply_edits, blocks_of
from replicast.storage.checkpoint.writing import Pieces, put_in_place, temporary_directory, write_contents
from replicast.storage.groups import checkpoint_parts
from replicast.update.edits import Edit
from replicast.update.update import Update
from replicast.update.validate import planned


def patch(
    source: RunDir, update: Update, destination: Path | str, *, progress: Progress | None = None
) -> Manifest:
    """Writes the checkpoint that would exist if the update had been applied at its step.

    Needs little memory beyond that of the update, however large the checkpoint is. Every byte that is read
    is checked against its digest, so that damage is never copied.

    Args:
        source: The checkpoint's directory; not modified.
        update: What to change, with names and values as for a running job.
        destination: The new checkpoint's directory, which must not exist yet.
        progress: Called with the number of bytes done, and the total.

    Returns:
        The new checkpoint's manifest. It names its parent, has the parent's place in the journal, and has no
        metrics, since none were measured.

    Raises:
        UpdateRefused: The update does not fit the checkpoint.
        CheckpointError: The source is not a committed checkpoint, or the destination exists.
        FileDamaged: The source is damaged.
        OSError: The destination cannot be written; nothing is left there.
    """
    target = RunPath(Path(destination).absolute().parent) / Path(destination).name
    with open_checkpoint(source) as reader:
        _check_destination(target, reader.manifest)
        plan = planned(update, reader.manifest.schema)
        with temporary_directory(target.parent) as temporary:
            variables = patched_variables(reader, plan, progress)
            manifest = write_contents(temporary, patched_draft(reader, update), variables)
            _check_destination(target, manifest)  # It may exist by now.
            put_in_place(temporary, target)
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


def patched_draft(reader: CheckpointReader, update: Update) -> Draft:
    """The draft of the checkpoint that an update makes of another one, whose place it has in the journal."""
    manifest = reader.manifest
    known = {each.name: getattr(manifest, each.name) for each in fields(Draft)}
    parent = {"step": manifest.step, "path": str(reader.path.as_path().resolve()), "update_id": update.id}
    return Draft(**known | {"parent": parent, "created_at": time.time(), "metrics": {}})


def patched_variables(
    reader: CheckpointReader, plan: Update, progress: Progress | None
) -> Iterator[tuple[str, Pieces]]:
    """The name and bytes of each variable after a planned update, in a stream.

    Raises:
        FileDamaged: The bytes before are not those that were written.
    """
    by_variable: dict[str, list[Edit]] = {}
    for edit in plan.edits:
        by_variable.setdefault(edit.variable, []).append(edit)
    done, total = 0, reader.layout.nbytes - len(reader.layout.header)

    def counted(pieces: Iterator[memoryview]) -> Pieces:
        nonlocal done
        for piece in pieces:
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)

    for name in reader.layout.spans:
        edits = by_variable.get(name)
        yield name, counted(_copied(reader, name) if edits is None else _edited(reader, name, edits))


def _copied(reader: CheckpointReader, name: str) -> Iterator[memoryview]:
    return (memoryview(piece) for piece in reader.pieces(name))


def _edited(reader: CheckpointReader, name: str, edits: Sequence[Edit]) -> Iterator[memoryview]:
    variable = reader.layout.spans[name].variable
    dtype = dtype_of(variable)
    sizes = (block.shape[0] * block.shape[1] * dtype.itemsize for block in blocks_of(variable))
    blocks = blocks_of(variable)
    for piece in reader.pieces(name, sizes):
        block = next(blocks)
        current = np.frombuffer(piece, np.uint8).view(dtype).reshape(block.shape)
        after = apply_edits(edits, variable, block, current)
        yield np.ascontiguousarray(after).reshape(-1).view(np.uint8).data
