"""Writes files completely or not at all, and reads them defensively.

A file with a final name is complete: files are written under a temporary name in the same directory, fsynced
and renamed; then the directory is fsynced. Tensors have the safetensors format (`tensorfiles.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replicast import faults
from replicast.errors import FileDamaged
from replicast.paths import (
    WALKED,
    RunDir,
    RunPath,
    below,
    check_name,
    make_durably,
    open_plain,
    read_small,
    rename_new,
    sync_directory,
)
from replicast.strictjson import json_bytes, parse_object, unsealed
from replicast.tensorfiles import (
    TensorFile,
    check_header,
    header_bytes,
    loads_strictly,
    parse_tensors,
    tensor_chunks,
)

__all__ = [
    "MAX_BYTES",
    "TEMPORARY",
    "RunDir",
    "RunPath",
    "TensorFile",
    "below",
    "json_bytes",
    "loads_strictly",
    "make_durably",
    "open_plain",
    "outline_of",
    "parse_tensors",
    "read_bytes",
    "read_json",
    "read_sealed",
    "read_small",
    "read_tensor_bytes",
    "remove_leftovers",
    "start_writing",
    "sync_directory",
    "tensor_chunks",
    "write_all",
    "write_durably",
    "write_quickly",
]

TEMPORARY = ".tmp-"
MAX_BYTES = 4 * 2**30
MAX_JSON_BYTES = 256 * 2**20  # About ten times the size of a manifest of a hundred thousand variables.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only; `os` has none.
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2
# How much less than its size a file from outside may take on disk. Not 0: ZFS stores zeros as holes.
_MOST_HOLES_BYTES = 64 * 2**20


def write_durably(
    path: RunPath | Path, chunks: Iterable[bytes | memoryview], *, replace: bool = True
) -> None:
    """Writes a file that is complete even after a power failure. `replace=False`: FileExistsError."""
    path = _as_entry(path)
    with path.parent.entered() as directory:
        with _temporary(path, directory) as (descriptor, temporary):
            for chunk in chunks:
                write_all(descriptor, chunk)
            faults.point("write")
            os.fsync(descriptor)
            faults.point("rename")
            rename = os.rename if replace else rename_new
            rename(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)


def write_quickly(path: RunPath | Path, text: str) -> None:
    """Writes a small file completely, without waiting for the disk: it may be lost in a power failure."""
    path = _as_entry(path)
    with path.parent.entered(WALKED) as directory, _temporary(path, directory) as (descriptor, temporary):
        write_all(descriptor, text.encode())
        os.rename(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)


def _as_entry(path: RunPath | Path) -> RunPath:
    return path if isinstance(path, RunPath) else RunPath(path.parent) / path.name


def start_writing(descriptor: int, place: int, nbytes: int) -> None:
    """Makes the kernel start to write these bytes to disk, so that the final fsync has less to do.

    Only a hint: no-op where the system does not support it.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, place, nbytes, _SYNC_FILE_RANGE_WRITE)


def remove_leftovers(directory: RunDir, *, older_than_secs: float = 3600.0) -> None:
    """Removes temporary files of writers that died."""
    now = time.time()
    for path in below(directory).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime >= older_than_secs:
                path.unlink()


def read_json(path: RunPath, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a run directory."""
    return _read_with(parse_object, path, max_bytes)


def read_sealed(path: RunPath, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file with a checksum (`strictjson.sealed`)."""
    return _read_with(lambda content: parse_object(unsealed(content)[0]), path, max_bytes)


def _read_with(parse: Callable[[bytes], dict[str, Any]], path: RunPath, max_bytes: int) -> dict[str, Any]:
    try:
        return parse(read_small(path, max_bytes=max_bytes))
    except OSError as error:
        raise FileDamaged(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise FileDamaged(path, str(error)[:500]) from error


def read_tensor_bytes(
    path: RunPath | Path,
    *,
    max_tensors: int,
    max_bytes: int | None = None,
    follow: bool = True,
    holes: bool = True,
    check: Callable[[TensorFile], object] = lambda _outline: None,
) -> memoryview:
    """Reads a safetensors file after checking its header against its size."""

    def check_first(descriptor: int, nbytes: int) -> None:
        if not holes:
            _check_holes(path, descriptor, nbytes)
        check(_outline(path.name, max_tensors, descriptor, nbytes))

    return read_bytes(path, max_bytes=max_bytes, follow=follow, check=check_first)


def outline_of(path: RunPath, *, max_tensors: int, max_bytes: int | None = None) -> TensorFile:
    """The metadata and the tensors of a safetensors file in outline, from its header. Links are refused."""
    with _opened(path, follow=False) as (descriptor, nbytes):
        _check_holes(path, descriptor, nbytes)
        if max_bytes is not None and header_bytes(os.pread(descriptor, 8, 0)) > max_bytes:
            raise FileDamaged(path, verdict="is too large", expected=f"a header of at most {max_bytes} bytes")
        return _outline(path.name, max_tensors, descriptor, nbytes)


def read_bytes(
    path: RunPath | Path,
    *,
    max_bytes: int | None = None,
    follow: bool = True,
    check: Callable[[int, int], None] = lambda _descriptor, _nbytes: None,
) -> memoryview:
    """Reads a file into memory that numpy can use in place."""
    limit = MAX_BYTES if max_bytes is None else max_bytes
    with _opened(path, follow=follow) as (descriptor, nbytes):
        if nbytes > limit:
            expected, received = f"at most {limit} bytes", f"{nbytes} bytes"
            raise FileDamaged(path, verdict="is too large", expected=expected, received=received)
        check(descriptor, nbytes)
        content = np.empty(nbytes, np.uint8).data
        read = _read_all(descriptor, content)
    if read != nbytes:
        raise FileDamaged(
            path,
            verdict="became shorter while it was read",
            expected=f"{nbytes} bytes",
            received=f"{read} bytes",
            remedy="Write it under another name and rename it when it is complete",
        )
    return content


@contextlib.contextmanager
def _opened(path: RunPath | Path, *, follow: bool) -> Iterator[tuple[int, int]]:
    """Opens a user's file: its descriptor and its size. Errors become `FileDamaged`."""
    try:
        descriptor = open_plain(path, follow=follow)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        yield descriptor, os.fstat(descriptor).st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def _unreadable(path: RunPath | Path, error: Exception) -> FileDamaged:
    return FileDamaged(path, getattr(error, "strerror", None) or str(error), verdict="cannot be read")


def _outline(source: str, max_tensors: int, descriptor: int, nbytes: int) -> TensorFile:
    begin = os.pread(descriptor, header_bytes(os.pread(descriptor, 8, 0)), 0)
    return check_header(begin, nbytes, source, max_tensors=max_tensors)


def _check_holes(path: RunPath | Path, descriptor: int, nbytes: int) -> None:
    """Refuses a file that costs its reader far more than its author: 4 GiB may take 4 KiB on disk."""
    on_disk = 512 * os.fstat(descriptor).st_blocks
    # The size on disk alone would also refuse files that are compressed, not yet written back, or on a file
    # system that does not tell it. Where holes are not told either, the first one is at the end.
    if nbytes - on_disk <= _MOST_HOLES_BYTES:
        return
    has_holes = os.lseek(descriptor, 0, os.SEEK_HOLE) < nbytes
    os.lseek(descriptor, 0, os.SEEK_SET)
    if has_holes:
        raise FileDamaged(
            path,
            verdict="has holes",
            expected=f"{nbytes} bytes on disk",
            received=f"{on_disk} bytes on disk",
            remedy="Write all bytes (cp --sparse=never); instead of many zeros, send the rows that change",
        )


@contextlib.contextmanager
def _temporary(path: RunPath, directory: int) -> Iterator[tuple[int, str]]:
    """A new temporary file in the directory of `path`, open for writing; removed unless it was renamed."""
    temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        check_name(path.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666, dir_fd=directory)
        try:
            yield descriptor, temporary
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = str(path)
        del error.filename2  # That of a rename.
        raise


def write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    """Writes all of it: a disk that is nearly full takes the beginning without an error."""
    rest = memoryview(chunk).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_all(descriptor: int, content: memoryview) -> int:
    done = 0
    while done < len(content) and (count := os.readv(descriptor, [content[done:]])):
        done += count
    return done
