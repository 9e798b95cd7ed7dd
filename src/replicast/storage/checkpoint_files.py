"""A checkpoint on disk: its manifest, the layout of its state, how it is written, read and verified.

    .tmp-<random>/    state.safetensors, manifest.json, COMMITTED: each fsynced, then the directory
    00001200-3/       the same directory, renamed; then its parent is fsynced

So a checkpoint is complete and durable under its final name, or not there at all. COMMITTED has the SHA-256
of the manifest, which has the digest of every variable. Damaged data is an error, never a value.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_128

from replicast import faults
from replicast.core.entries import Saved
from replicast.core.records import Pending
from replicast.errors import CheckpointError, FileDamaged
from replicast.files import (
    MAX_JSON_BYTES,
    TEMPORARY,
    RunDir,
    RunPath,
    below,
    make_durably,
    open_plain,
    read_small,
    start_writing,
    sync_directory,
)
from replicast.strictjson import described, json_bytes, json_value, parse_object, reading
from replicast.tensorfiles import tensor_chunks
from replicast.update.digest import begun_digest, digest_of_digests
from replicast.update.edits import BFLOAT16, Array
from replicast.update.schema import Schema, Variable

# The manifest of a checkpoint: where in the training it was made, and the digests of its variables.

FORMAT = 2
MAX_SEQUENCE = 2**24  # The largest to accept: a restart counts up to it, and a file may contain anything.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """What the caller knows about a checkpoint before it is written."""

    step: int
    sequence: int = 0
    missing: tuple[int, ...] = ()
    epoch: int
    batch: int
    created_at: float
    workers: int
    attempt: int
    schema: Schema
    pending: tuple[Pending, ...] = ()  # Without their content: the journal has it.
    script: Mapping[str, Any] | None = None
    measured: str = "[]"
    run: str = ""
    line: int = 0
    parent: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(Draft)}

    def to_json(self) -> dict[str, Any]:
        metrics = {name: json_value(float(value)) for name, value in self.metrics.items()}
        encoded = msgspec.json.encode(replace(self, metrics={}), enc_hook=_json_of_schema)
        made: dict[str, Any] = msgspec.json.decode(encoded)
        return made | {"metrics": metrics}

    def with_updates(self, saved: Saved) -> Draft:
        """The draft with the updates that the state contains according to the core, and the pending ones."""
        latest = max(saved.holds, default=0)
        missing = tuple(sequence for sequence in range(1, latest) if sequence not in saved.holds)
        pending = tuple(_pending(one, content=None, source=None, proposed_at=0.0) for one in saved.pending)
        return replace(self, sequence=latest, missing=missing, pending=pending)

    def position(self) -> bytes:
        """Everything but the state that determines how training resumes from here, as comparable JSON."""
        names = ("step", "sequence", "missing", "epoch", "batch", "pending", "script", "measured", "line")
        known = self.to_json()
        return json_bytes([known[name] for name in names])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest(Draft):
    """A written checkpoint."""

    digests: Mapping[str, str]
    state_digest: str
    nbytes: int
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not 0 <= self.sequence <= MAX_SEQUENCE:
            raise ValueError(f"sequence must be from 0 to {MAX_SEQUENCE}. Received: {self.sequence}")
        if set(self.digests) != {variable.name for variable in self.schema}:
            raise ValueError("its digests do not match its variables")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.step, self.state_digest))

    def seen_by(self, run: str) -> Manifest:
        """The manifest as valid in a run: update numbers in a copy from another run have no meaning here."""
        if self.run in ("", run):
            return self
        return replace(self, sequence=0, missing=(), pending=())

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Manifest:
        if given.get("format") != FORMAT:
            raise ValueError(
                f"This version of replicast reads format {FORMAT} of a checkpoint. Use the version that "
                f"wrote it. Received: {given.get('format')!r}"
            )
        with reading("manifest", given):
            metrics = {name: float(value) for name, value in given["metrics"].items()}
        return described(cls, "manifest", {**given, "metrics": metrics})


def _json_of_schema(value: object) -> dict[str, Any]:
    if isinstance(value, Schema):
        return value.to_json()
    raise TypeError(f"A checkpoint cannot contain this type. Received: {type(value).__name__}")


def saved_of(manifest: Draft) -> Saved:
    """A checkpoint as the core knows it. Its state is its step."""
    holds = frozenset(range(1, manifest.sequence + 1)) - set(manifest.missing)
    # The content of a payload in the journal is the tuple of its id and digest.
    pending = tuple(_pending(one, content=(one.proposal.id, one.proposal.digest)) for one in manifest.pending)
    return Saved(manifest.step, manifest.attempt, holds, pending, manifest.step)


def _pending(one: Pending, **changes: Any) -> Pending:
    return Pending(msgspec.structs.replace(one.proposal, **changes), one.tickets)


# The layout of `state.safetensors`: a function of the schema, known before a byte is written.
#
# A reader compares the file's header with the expected one and never interprets it: either it is equal to
# the last byte, or the file is damaged.

METADATA = {"replicast": "checkpoint 1"}
_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Span:
    variable: Variable
    start: int
    nbytes: int

    def hasher(self) -> xxh3_128:
        """For the variable's bytes in row-major order, in pieces: the digest is that of `digest_array`."""
        return begun_digest(dtype_of(self.variable), self.variable.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The file of a state."""

    header: bytes
    spans: Mapping[str, Span]
    nbytes: int


def dtype_of(variable: Variable) -> np.dtype[np.generic]:
    return BFLOAT16 if variable.dtype == "bfloat16" else np.dtype(variable.dtype)


def layout_of(schema: Schema) -> Layout:
    if _RESERVED in schema:
        raise CheckpointError(
            "A variable has a name that safetensors reserves", variable=_RESERVED, remedy="Rename it"
        )
    shapes: dict[str, Array] = {
        variable.name: np.broadcast_to(np.zeros((), dtype_of(variable)), variable.shape)
        for variable in schema
    }
    header = bytes(next(tensor_chunks(shapes, METADATA)))  # Only the header: there are no arrays yet.
    entries = json.loads(header[8:])
    variables = {variable.name: variable for variable in schema}
    spans = {
        name: Span(
            variables[name],
            len(header) + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if name != _RESERVED
    }
    size = len(header) + sum(span.nbytes for span in spans.values())
    return Layout(header, MappingProxyType(spans), size)


def file_order(schema: Schema) -> tuple[str, ...]:
    """The names in the fastest order for writing a checkpoint: that of their bytes in the file."""
    return tuple(layout_of(schema).spans)


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
    """Writes the three files of a checkpoint, `COMMITTED` last, and makes them durable."""
    json_bytes(draft.to_json())  # A draft that is not valid JSON should fail before much is written.
    manifest = _write_state(directory / STATE, draft, variables)
    described = json_bytes(manifest.to_json())
    _write_file(directory / MANIFEST, described)
    _write_file(directory / COMMITTED, f"{hashlib.sha256(described).hexdigest()}\n".encode())
    sync_directory(directory)
    return manifest


def put_in_place(temporary: RunPath, path: RunPath) -> None:
    """Gives a written checkpoint its final name, which must not be taken."""
    faults.point("rename")
    temporary.rename(path)
    sync_directory(path.parent)


def in_pieces(
    arrays: Iterable[tuple[str, Array]], variables: Mapping[str, Variable]
) -> Iterator[tuple[str, Pieces]]:
    """The bytes of arrays, after a check of their dtypes and shapes."""
    for name, array in arrays:
        pieces = _pieces(array, variables.get(name), name)
        del array  # Free it before the next one is made.
        yield name, pieces
        del pieces


def _pieces(array: Array, variable: Variable | None, name: str) -> Pieces:
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
    """Writes each variable at its place, and computes its digest at the same time."""
    layout, digests = layout_of(draft.schema), dict[str, str]()
    descriptor = path.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        _write_at(descriptor, memoryview(layout.header), 0)
        for name, pieces in variables:
            span = layout.spans.get(name)
            if span is None or name in digests:
                problem = "does not belong to the model" if span is None else "was given twice"
                raise CheckpointError(f"A variable {problem}", variable=name, received=name)
            digests[name] = _write_variable(descriptor, span, pieces)
        missing = [name for name in layout.spans if name not in digests]
        if missing:
            raise CheckpointError(
                "A variable of the model is missing", variable=missing[0], received=f"none of {missing[:5]}"
            )
        faults.point("write")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    in_order = {name: digests[name] for name in layout.spans}
    state_digest = digest_of_digests(digests)
    return Manifest(**draft.known(), digests=in_order, state_digest=state_digest, nbytes=layout.nbytes)


def _write_variable(descriptor: int, span: Span, pieces: Pieces) -> str:
    digest, place, end = span.hasher(), span.start, span.start + span.nbytes
    for piece in pieces:
        if place + len(piece) > end:
            place += len(piece)
            break
        _write_at(descriptor, piece, place)
        start_writing(descriptor, place, len(piece))
        digest.update(piece)
        place += len(piece)
    if place != end:
        raise CheckpointError(
            "A variable has the wrong size",
            variable=span.variable.name,
            expected=f"{span.nbytes} bytes",
            received=f"{'more' if place > end else place - span.start}",
        )
    return digest.hexdigest()


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


Progress = Callable[[int, int], None]  # Called with the number of bytes done, and the total.
_MAX_COMMITTED = 1000


class CheckpointReader:
    """A committed checkpoint, open for reading until `close`, or until the reader is garbage-collected.

    Its files stay readable until then, even if the checkpoint is removed or replaced meanwhile.
    """

    def __init__(self, path: RunPath, manifest: Manifest, layout: Layout, descriptor: int) -> None:
        self.path = path
        self.manifest = manifest
        self.layout = layout
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Arrays that were read stay valid."""
        self._close()

    def names(self) -> tuple[str, ...]:
        """The variables, in the order of the state."""
        return tuple(variable.name for variable in self.manifest.schema)

    def read(self, name: str) -> Array:
        """Reads a variable's value into new memory: a truncated file, if mapped, would crash the process."""
        variable = self._span(name).variable
        value: Array = np.empty(variable.shape, dtype_of(variable))
        if not self.read_into(name, value):
            raise self._damaged([f"the bytes of {name} are not those that were written"])
        value.flags.writeable = False
        return value

    def read_rows(self, name: str, ranges: Iterable[tuple[int, int]]) -> Array:
        """Reads some rows of a variable, and nothing else: their digest cannot be compared."""
        span = self._span(name)
        shape = span.variable.shape
        row_bytes = span.nbytes // max(1, shape[0])
        parts = [
            self._read_at(span.start + start * row_bytes, (stop - start) * row_bytes)
            for start, stop in ranges
        ]
        content = b"".join(parts)
        rows: Array = np.frombuffer(content, dtype_of(span.variable))
        return rows.reshape(-1, *shape[1:]) if row_bytes else np.empty((0, *shape[1:]), rows.dtype)

    def read_into(self, name: str, target: Array) -> bool:
        """Reads a variable's bytes into memory of its size. Returns False if their digest is wrong."""
        span, digest, done = self._span(name), self._span(name).hasher(), 0
        view = target.reshape(-1).view(np.uint8).data if span.nbytes else memoryview(b"")
        self._check_open()
        while done < span.nbytes:
            piece = view[done : done + PIECE_BYTES // 8]
            try:
                read = os.preadv(self._descriptor, [piece], span.start + done)
            except OSError as error:
                raise self._damaged([f"it cannot be read ({error.strerror})"]) from error
            if not read:
                raise self._damaged([f"it became shorter. Received: {span.start + done} bytes"])
            digest.update(piece[:read])
            done += read
        return digest.hexdigest() == self.manifest.digests[name]

    def pieces(self, name: str, sizes: Iterator[int] | None = None) -> Iterator[bytes]:
        """Reads a variable's bytes in pieces, without mapping, and checks its digest at the end."""
        digest = self._span(name).hasher()
        yield from self._digested(name, sizes, digest)
        if problem := self._difference(name, digest.hexdigest()):
            raise self._damaged([problem])

    def verify(self, progress: Progress | None = None) -> None:
        """Reads every byte and compares all digests with the manifest's."""
        problems, done = [], 0
        for name, span in self.layout.spans.items():
            digest = span.hasher()
            for piece in self._digested(name, None, digest):
                done += len(piece)
                if progress is not None:
                    progress(done, self.layout.nbytes - len(self.layout.header))
            if problem := self._difference(name, digest.hexdigest()):
                problems.append(problem)
        if problems:
            raise self._damaged(problems)

    def _digested(self, name: str, sizes: Iterator[int] | None, digest: xxh3_128) -> Iterator[bytes]:
        span, done = self._span(name), 0
        while done < span.nbytes:
            wanted = PIECE_BYTES if sizes is None else next(sizes)
            piece = self._read_at(span.start + done, min(wanted, span.nbytes - done))
            digest.update(piece)
            done += len(piece)
            yield piece

    def _span(self, name: str) -> Span:
        span = self.layout.spans.get(name)
        if span is None:
            raise CheckpointError(
                "There is no such variable in the checkpoint",
                path=self.path,
                variable=name,
                expected=f"one of its {len(self.layout.spans)}",
                received=name,
            )
        return span

    def _read_at(self, place: int, nbytes: int) -> bytes:
        self._check_open()
        parts, start = [], place
        while place < start + nbytes:
            try:
                part = os.pread(self._descriptor, start + nbytes - place, place)
            except OSError as error:
                raise self._damaged([f"it cannot be read ({error.strerror})"]) from error
            if not part:
                raise self._damaged([f"it became shorter. Received: {place} bytes"])
            parts.append(part)
            place += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_open(self) -> None:
        if not self._close.alive:  # The descriptor may belong to another file by now.
            raise ValueError(f"The checkpoint is closed: open it again. Received: {self.path}")

    def _difference(self, name: str, received: str) -> str:
        expected = self.manifest.digests[name]
        if received == expected:
            return ""
        return (
            f"the bytes of {name} are not those that were written (digest {expected}). Received: {received}"
        )

    def _damaged(self, problems: list[str]) -> FileDamaged:
        return _damaged(self.path / STATE, "; ".join(problems))


def advice(path: RunPath) -> str:
    return f"Use another checkpoint, or replace this one with a backup copy; remove {path} to discard it"


def _unreadable(file: RunPath, error: OSError | ValueError) -> FileDamaged:
    return _damaged(file, f"it cannot be read ({getattr(error, 'strerror', None) or error})")


def _damaged(file: RunPath, problem: str) -> FileDamaged:
    return FileDamaged(file, f"{problem.rstrip('.')}. {advice(file.parent)}")


def open_checkpoint(path: RunDir, *, verify: bool = False) -> CheckpointReader:
    """Opens a committed checkpoint by its directory.

    Checks everything but the variables' bytes: that it is committed, that the manifest is intact, and that
    the state's file has the expected header and size.
    """
    path = below(path)
    with contextlib.ExitStack() as stack:
        try:
            # All files are opened relative to it: they belong to one checkpoint, even if it is replaced.
            directory = stack.enter_context(path.entered())
        except OSError as error:
            raise CheckpointError(
                f"There is no checkpoint here ({error.strerror})", path=path, received=str(path)
            ) from error
        manifest = _read_manifest(path, directory)
        layout = layout_of(manifest.schema)
        reader = CheckpointReader(path, manifest, layout, _open_state(path, directory, manifest, layout))
    if verify:
        reader.verify()
    return reader


def _read_manifest(path: RunPath, directory: int) -> Manifest:
    try:
        committed = read_small(COMMITTED, max_bytes=_MAX_COMMITTED, directory=directory)
    except FileNotFoundError:
        raise CheckpointError(
            "The checkpoint is not committed: its writer did not finish, or it is not a checkpoint",
            path=path,
            expected=f"a file {COMMITTED}",
            received="none",
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path / COMMITTED, error) from error
    try:
        content = read_small(MANIFEST, max_bytes=MAX_JSON_BYTES, directory=directory)
    except (OSError, ValueError) as error:
        raise _unreadable(path / MANIFEST, error) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if committed != f"{sha256}\n".encode():
        said = committed[:100].decode("utf-8", "replace").strip()
        raise _damaged(
            path / MANIFEST,
            f"its sha256 does not match {COMMITTED}, which has {said!r}. Received: {sha256}",
        )
    try:
        return Manifest.from_json(parse_object(content))
    except ValueError as error:
        raise _damaged(path / MANIFEST, f"it is not a valid manifest: {error}") from error


def _open_state(path: RunPath, directory: int, manifest: Manifest, layout: Layout) -> int:
    try:
        descriptor = open_plain(STATE, directory=directory)
    except OSError as error:
        raise _unreadable(path / STATE, error) from error
    try:
        size = os.fstat(descriptor).st_size
        if not size == manifest.nbytes == layout.nbytes:
            raise _damaged(path / STATE, f"it must have {manifest.nbytes} bytes. Received: {size}")
        if os.pread(descriptor, len(layout.header), 0) != layout.header:
            raise _damaged(path / STATE, "its header does not match the variables in the manifest")
    except OSError as error:
        os.close(descriptor)
        raise _damaged(path / STATE, f"it cannot be read ({error.strerror})") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
