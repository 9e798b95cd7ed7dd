"""Reads and verifies a checkpoint: damaged data is an error, never a value."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

import numpy as np

from replicast.errors import CheckpointError, FileDamaged
from replicast.files import MAX_JSON_BYTES, RunDir, RunPath, below, open_plain, read_small
from replicast.storage.checkpoint.digests import PassingDigest
from replicast.storage.checkpoint.layout import Layout, Span, dtype_of, layout_of
from replicast.storage.checkpoint.manifest import Manifest
from replicast.storage.checkpoint.writing import COMMITTED, MANIFEST, PIECE_BYTES, STATE
from replicast.strictjson import parse_object
from replicast.update.edits import Array

Progress = Callable[[int, int], None]
"""Called from time to time with the number of bytes done, and the total."""
_MAX_COMMITTED = 1000


class CheckpointReader:
    """A committed checkpoint, open for reading until `close`, or until the reader is garbage-collected.

    Its files stay readable until then, even if the checkpoint is removed or replaced meanwhile.

    Attributes:
        path: The directory.
        manifest: The checkpoint's manifest.
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
        """Reads a variable's value into new memory: a truncated file, if mapped, would crash the process.

        Raises:
            CheckpointError: There is no such variable.
            FileDamaged: The bytes are not those that were written.
        """
        variable = self._span(name).variable
        value: Array = np.empty(variable.shape, dtype_of(variable))
        if not self.read_into(name, value):
            raise self._damaged([f"the bytes of {name} are not those that were written"])
        value.flags.writeable = False
        return value

    def read_rows(self, name: str, ranges: Iterable[tuple[int, int]]) -> Array:
        """Reads some rows of a variable, and nothing else: their digest cannot be compared.

        Args:
            name: The variable.
            ranges: Each from its first row to the one behind its last; the variable has them.

        Raises:
            CheckpointError: There is no such variable.
            FileDamaged: The file cannot be read, or became shorter.
        """
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
        """Reads a variable's bytes into memory of its size. Returns False if their digest is wrong.

        Raises:
            CheckpointError: There is no such variable.
            FileDamaged: The file cannot be read, or became shorter.
        """
        span, digest, done = self._span(name), PassingDigest(self._span(name).variable), 0
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
        """Reads a variable's bytes in pieces, without mapping, and checks its digest at the end.

        Args:
            name: The variable.
            sizes: The size of each piece. Default: pieces of equal size.

        Raises:
            CheckpointError: There is no such variable.
            FileDamaged: The bytes are not those that were written; raised after the last piece.
        """
        span, digest, done = self._span(name), PassingDigest(self._span(name).variable), 0
        while done < span.nbytes:
            wanted = PIECE_BYTES if sizes is None else next(sizes)
            piece = self._read_at(span.start + done, min(wanted, span.nbytes - done))
            digest.update(piece)
            done += len(piece)
            yield piece
        if digest.hexdigest() != self.manifest.digests[name]:
            raise self._damaged([self._difference(name, digest.hexdigest())])

    def verify(self, progress: Progress | None = None) -> None:
        """Reads every byte and compares all digests with the manifest's.

        Raises:
            FileDamaged: Some digests differ; the message names the variables.
        """
        problems, done = [], 0
        for name, span in self.layout.spans.items():
            digest, end = PassingDigest(span.variable), span.start + span.nbytes
            for place in range(span.start, end, PIECE_BYTES):
                piece = self._read_at(place, min(PIECE_BYTES, end - place))
                digest.update(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, self.layout.nbytes - len(self.layout.header))
            if digest.hexdigest() != self.manifest.digests[name]:
                problems.append(self._difference(name, digest.hexdigest()))
        if problems:
            raise self._damaged(problems)

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
        return (
            f"the bytes of {name} are not those that were written (digest {expected}). Received: {received}"
        )

    def _damaged(self, problems: list[str]) -> FileDamaged:
        return _damaged(self.path / STATE, "; ".join(problems))


def advice(path: RunPath) -> str:
    """What to do about a damaged checkpoint."""
    return f"Use another checkpoint, or replace this one with a backup copy; remove {path} to discard it"


def _unreadable(file: RunPath, error: OSError | ValueError) -> FileDamaged:
    return _damaged(file, f"it cannot be read ({getattr(error, 'strerror', None) or error})")


def _damaged(file: RunPath, problem: str) -> FileDamaged:
    return FileDamaged(file, f"{problem.rstrip('.')}. {advice(file.parent)}")


def open_checkpoint(path: RunDir, *, verify: bool = False) -> CheckpointReader:
    """Opens a committed checkpoint by its directory.

    Checks everything but the variables' bytes: that it is committed, that the manifest is intact, and that
    the state's file has the expected header and size.

    Args:
        path: The directory.
        verify: Also read all bytes and compare their digests.

    Raises:
        CheckpointError: It does not exist, or is not committed.
        FileDamaged: One of its files is damaged.
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
