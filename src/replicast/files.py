"""Writes files completely or not at all, and reads them defensively.

A file with a final name is complete: files are written under a temporary name in the same directory, fsynced
and renamed; then the directory is fsynced. Tensors have the safetensors format (`tensorfiles.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replicast import faults
from replicast.errors import FileDamaged
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
    "TensorFile",
    "check_tensor_file",
    "json_bytes",
    "loads_strictly",
    "make_durably",
    "open_plain",
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
MAX_JSON_BYTES = 256 * 2**20
"""About ten times the size of a manifest of a hundred thousand variables."""
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only; `os` has none.
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes a file that is complete even after a power failure.

    Raises:
        OSError: It could not be written. The temporary file is removed, and the file with the final name is
            unchanged; only if syncing the directory failed, the new file is already there and complete.
    """
    with _temporary(path) as (descriptor, temporary):
        for chunk in chunks:
            write_all(descriptor, chunk)
        faults.point("write")
        os.fsync(descriptor)
        faults.point("rename")
        temporary.rename(path)
    sync_directory(path.parent)


def write_quickly(path: Path, text: str) -> None:
    """Writes a small file completely, without waiting for the disk: it may be lost in a power failure."""
    with _temporary(path) as (descriptor, temporary):
        write_all(descriptor, text.encode())
        temporary.rename(path)


def start_writing(descriptor: int, place: int, nbytes: int) -> None:
    """Makes the kernel start to write these bytes to disk, so that the final fsync has less to do.

    Only a hint: no-op where the system does not support it.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, place, nbytes, _SYNC_FILE_RANGE_WRITE)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durably(directory: Path) -> None:
    """Creates a directory and its parents, so that their names survive a power failure.

    Raises:
        OSError: It cannot be created, or its name cannot be made durable.
    """
    if directory.is_dir():
        return
    make_durably(directory.parent)
    directory.mkdir(exist_ok=True)
    try:
        sync_directory(directory.parent)
    except OSError:
        with contextlib.suppress(OSError):
            directory.rmdir()  # Otherwise the next caller would find it and assume that it is durable.
        raise


def remove_leftovers(directory: Path, *, older_than_secs: float = 3600.0) -> None:
    """Removes temporary files of writers that died.

    Args:
        directory: The directory, which may not exist.
        older_than_secs: Younger files are kept, because they may still be being written.
    """
    if not directory.is_dir():
        return
    now = time.time()
    for path in directory.iterdir():
        if path.name.startswith(TEMPORARY):
            with contextlib.suppress(FileNotFoundError):
                if now - path.stat().st_mtime >= older_than_secs:
                    path.unlink()


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a run directory.

    Raises:
        FileDamaged: It is missing, not a regular file, too large, or not a JSON object.
    """
    return _read_with(parse_object, path, max_bytes)


def read_sealed(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file with a checksum (`strictjson.sealed`).

    Raises:
        FileDamaged: As in `read_json`, or it was changed after it was written.
    """
    return _read_with(unsealed, path, max_bytes)


def _read_with(parse: Callable[[bytes], dict[str, Any]], path: Path, max_bytes: int) -> dict[str, Any]:
    try:
        return parse(read_small(path, max_bytes=max_bytes))
    except OSError as error:
        raise FileDamaged(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        said = str(error)[:500]
        raise FileDamaged(path, said if parse is unsealed else f"it is not valid JSON ({said})") from error


def read_small(path: Path | str, *, max_bytes: int, directory: int | None = None) -> bytes:
    """Reads a regular file. Links, pipes and devices are not read, and do not block.

    Args:
        path: The file.
        max_bytes: The maximum size.
        directory: The descriptor of the directory that a relative path starts from.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        ValueError: It is larger than `max_bytes`.
    """
    descriptor = open_plain(path, directory=directory)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(min(max_bytes, os.fstat(descriptor).st_size) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def open_plain(path: Path | str, *, directory: int | None = None, follow: bool = False) -> int:
    """Opens a regular file for reading. Opening a pipe or a device could block or have side effects.

    Raises:
        OSError: It cannot be opened, or is not a regular file; also for a link, unless `follow` is true.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return descriptor


def read_tensor_bytes(
    path: Path, *, max_tensors: int, max_bytes: int | None = None, follow: bool = True
) -> memoryview:
    """Reads a safetensors file after checking its header against its size.

    Args:
        path: The file.
        max_tensors: The maximum number of tensors.
        max_bytes: The maximum size. Default: `MAX_BYTES`.
        follow: Whether it may be a link.

    Raises:
        FileDamaged: As in `read_bytes`, or it is not a safetensors file.
    """
    check = partial(_check_tensors, path.name, max_tensors)
    return read_bytes(path, max_bytes=max_bytes, follow=follow, check=check)


def check_tensor_file(path: Path, *, max_tensors: int) -> None:
    """Checks only the header of a safetensors file, against the size of the file. Links are refused.

    Raises:
        FileDamaged: It cannot be read, or is not a safetensors file.
    """
    with _opened(path, follow=False) as (descriptor, nbytes):
        _check_tensors(path.name, max_tensors, descriptor, nbytes)


def read_bytes(
    path: Path,
    *,
    max_bytes: int | None = None,
    follow: bool = True,
    check: Callable[[int, int], None] = lambda _descriptor, _nbytes: None,
) -> memoryview:
    """Reads a file into memory that numpy can use in place.

    Args:
        path: The file.
        max_bytes: The maximum size. Default: `MAX_BYTES`.
        follow: Whether it may be a link.
        check: Called with the descriptor and the size before memory is allocated for the content.

    Raises:
        FileDamaged: It is not a regular file, cannot be read, is too large, or changed while it was read.
    """
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
def _opened(path: Path, *, follow: bool) -> Iterator[tuple[int, int]]:
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


def _unreadable(path: Path, error: Exception) -> FileDamaged:
    return FileDamaged(path, getattr(error, "strerror", None) or str(error), verdict="cannot be read")


def _check_tensors(source: str, max_tensors: int, descriptor: int, nbytes: int) -> None:
    begin = os.pread(descriptor, header_bytes(os.pread(descriptor, 8, 0)), 0)
    check_header(begin, nbytes, source, max_tensors=max_tensors)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, Path]]:
    """A new temporary file in the directory of `path`, open for writing; removed unless it was renamed."""
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor, temporary
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)


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
