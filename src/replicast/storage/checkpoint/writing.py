"""Writes the directory of a checkpoint: complete and durable under its final name, or not at all.

.tmp-<random>/              state.safetensors, manifest.json, COMMITTED: each fsynced, then the directory
00001200-3/                 the same directory, renamed; then its parent is fsynced
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from replicast import faults
from replicast.errors import CheckpointError
from replicast.files import TEMPORARY, RunPath, json_bytes, make_durably, start_writing, sync_directory
from replicast.storage.checkpoint.digests import PassingDigest, digest_of_digests
from replicast.storage.checkpoint.layout import Layout, dtype_of, layout_of
from replicast.storage.checkpoint.manifest import Draft, Manifest
from replicast.update.edits import Array
from replicast.update.schema import Variable

STATE, MANIFEST, COMMITTED = "state.safetensors", "manifest.json", "COMMITTED"
PIECE_BYTES = 4 * 2**20  # Written and digested while it is in the processor's cache.

Pieces = Iterable[memoryview]


@contextlib.contextmanager
def temporary_directory(parent: RunPath) -> Iterator[RunPath]:
    """A new directory in `parent`, removed afterwards unless it was renamed."""
    make_durably(parent)
    path = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmtree()


def write_contents(directory: RunPath, draft: Draft, variables: Iterable[tuple[str, Pieces]]) -> Manifest:
    """Writes the three files of a checkpoint, `COMMITTED` last, and makes them durable.

    Args:
        directory: A new directory under a temporary name.
        draft: What is known about the checkpoint.
        variables: Each variable's name and bytes, in any order; that of `file_order` is the fastest.

    Raises:
        CheckpointError: The variables do not match the draft's schema.
        OSError: It could not be written.
    """
    json_bytes(draft.to_json())  # A draft that is not valid JSON should fail before much is written.
    manifest = _write_state(directory / STATE, draft, variables)
    described = json_bytes(manifest.to_json())
    _write_file(directory / MANIFEST, described)
    _write_file(directory / COMMITTED, f"{hashlib.sha256(described).hexdigest()}\n".encode())
    sync_directory(directory)
    return manifest


def put_in_place(temporary: RunPath, path: RunPath) -> None:
    """Gives a written checkpoint its final name, which must not be taken.

    Raises:
        OSError: It could not be renamed, or the name is taken. If only the parent could not be synced, the
            checkpoint is in place and intact.
    """
    faults.point("rename")
    temporary.rename(path)
    sync_directory(path.parent)


def in_pieces(
    arrays: Iterable[tuple[str, Array]], variables: Mapping[str, Variable]
) -> Iterator[tuple[str, Pieces]]:
    """The bytes of arrays, after a check of their dtypes and shapes.

    Raises:
        CheckpointError: One does not match its variable.
    """
    for name, array in arrays:
        pieces = _pieces(array, variables.get(name), name)
        del array  # Free it before the next one is made.
        yield name, pieces
        del pieces


def _pieces(array: Array, variable: Variable | None, name: str) -> Pieces:
    """The bytes of an array, after a check of its dtype and shape."""
    if variable is None:
        return ()  # The writer raises: it does not know the name.
    array = np.asarray(array)
    if (array.dtype.name, array.shape) != (variable.dtype, variable.shape):
        raise CheckpointError(
            "A variable does not match the schema",
            variable=name,
            expected=f"{variable.dtype} of shape {variable.shape}",
            received=f"{array.dtype.name} of shape {array.shape}",
        )
    if not array.nbytes:
        return ()
    native = np.ascontiguousarray(array, dtype_of(variable)).reshape(-1).view(np.uint8).data
    return (native[start : start + PIECE_BYTES] for start in range(0, len(native), PIECE_BYTES))


def _write_state(path: RunPath, draft: Draft, variables: Iterable[tuple[str, Pieces]]) -> Manifest:
    layout = layout_of(draft.schema)
    descriptor = path.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        writer = _StateWriter(descriptor, layout)
        for name, pieces in variables:
            writer.write(name, pieces)
        digests = writer.finish()
        faults.point("write")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Manifest.completed(
        draft,
        digests=digests,
        state_digest=digest_of_digests(digests),
        nbytes=layout.nbytes,
    )


class _StateWriter:
    """Writes each variable at its place, and computes its digest at the same time."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self._descriptor, self._layout = descriptor, layout
        self._digests: dict[str, str] = {}
        _write_at(descriptor, memoryview(layout.header), 0)

    def write(self, name: str, pieces: Pieces) -> None:
        span = self._layout.spans.get(name)
        if span is None or name in self._digests:
            problem = "does not belong to the model" if span is None else "was given twice"
            raise CheckpointError(f"A variable {problem}", variable=name, received=name)
        digest, place, end = PassingDigest(span.variable), span.start, span.start + span.nbytes
        for piece in pieces:
            if place + len(piece) > end:
                place += len(piece)
                break
            _write_at(self._descriptor, piece, place)
            start_writing(self._descriptor, place, len(piece))
            digest.update(piece)
            place += len(piece)
        if place != end:
            raise CheckpointError(
                "A variable has the wrong size",
                variable=name,
                expected=f"{span.nbytes} bytes",
                received=f"{'more' if place > end else place - span.start}",
            )
        self._digests[name] = digest.hexdigest()

    def finish(self) -> dict[str, str]:
        missing = [name for name in self._layout.spans if name not in self._digests]
        if missing:
            raise CheckpointError(
                "A variable of the model is missing", variable=missing[0], received=f"none of {missing[:5]}"
            )
        return {name: self._digests[name] for name in self._layout.spans}


def _write_file(path: RunPath, content: bytes) -> None:
    descriptor = path.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _write_at(descriptor, memoryview(content), 0)
        faults.point("write")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, piece: memoryview, place: int) -> None:
    while piece:
        written = os.pwrite(descriptor, piece, place)
        piece, place = piece[written:], place + written
