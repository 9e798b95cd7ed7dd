"""Files that are written whole or not at all, and read with suspicion.

Whatever has a final name is complete: files are written beside their place, fsynced, renamed, and then their
directory is fsynced. Tensors lie in the safetensors format (`tensorfiles.py`).
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
    "write_durably",
    "write_quickly",
]

TEMPORARY = ".tmp-"
MAX_BYTES = 4 * 2**30
MAX_JSON_BYTES = 256 * 2**20
"""A manifest of a hundred thousand variables has about a tenth of this."""
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only; `os` has none.
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes a file that is there, whole, even after a power cut.

    Raises:
        OSError: It could not be written. Nothing is left under a temporary name, and under the final name
            nothing new; unless it was the directory that could not be synced: the file is there then, whole.
    """
    with _temporary(path) as (descriptor, temporary):
        for chunk in chunks:
            _write_all(descriptor, chunk)
        faults.point("write")
        os.fsync(descriptor)
        faults.point("rename")
        temporary.rename(path)
    sync_directory(path.parent)


def write_quickly(path: Path, text: str) -> None:
    """Writes a small file whole, without waiting for the disk: a power cut may take it."""
    with _temporary(path) as (descriptor, temporary):
        _write_all(descriptor, text.encode())
        temporary.rename(path)


def start_writing(descriptor: int, place: int, nbytes: int) -> None:
    """Has the kernel begin to write these bytes to disk, so that the fsync at the end finds less to do.

    Only a hint: where the system does not know it, nothing happens.
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
    """Makes a directory, and those above it, so that their names outlive a power cut.

    Raises:
        OSError: It cannot be made, or its name cannot be made durable.
    """
    if directory.is_dir():
        return
    make_durably(directory.parent)
    directory.mkdir(exist_ok=True)
    try:
        sync_directory(directory.parent)
    except OSError:
        with contextlib.suppress(OSError):
            directory.rmdir()  # Or the next one who comes would find it, and think it durable.
        raise


def remove_leftovers(directory: Path, *, older_than_secs: float = 3600.0) -> None:
    """Removes what writers that died left under temporary names.

    Args:
        directory: Where to look, if it is there.
        older_than_secs: Younger files are left alone, since somebody may be writing them.
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
        FileDamaged: It is not there, no plain file, too large, or holds something else.
    """
    return _read_with(parse_object, path, max_bytes)


def read_sealed(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file that checks itself (`strictjson.sealed`).

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
        raise FileDamaged(path, said if parse is unsealed else f"it holds no valid JSON ({said})") from error


def read_small(path: Path | str, *, max_bytes: int, directory: int | None = None) -> bytes:
    """The bytes of a plain file that is no link: whatever else has its name neither blocks nor is read.

    Args:
        path: The file.
        max_bytes: The most that it may have.
        directory: The descriptor of the directory that a relative path starts from.

    Raises:
        OSError: It cannot be read, or is no plain file.
        ValueError: It is larger.
    """
    descriptor = open_plain(path, directory=directory)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(min(max_bytes, os.fstat(descriptor).st_size) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def open_plain(path: Path | str, *, directory: int | None = None, follow: bool = False) -> int:
    """Opens a plain file for reading. A pipe or a device would block, or do something.

    Raises:
        OSError: It cannot be opened, or is something else; a link too, unless `follow`.
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
    """The bytes of a safetensors file, once its header is found to fit its size.

    Args:
        path: The file.
        max_tensors: The most tensors it may have.
        max_bytes: The most that is read; `MAX_BYTES` unless given.
        follow: Whether it may be a link.

    Raises:
        FileDamaged: As in `read_bytes`, or it is no safetensors file.
    """
    check = partial(_check_tensors, path.name, max_tensors)
    return read_bytes(path, max_bytes=max_bytes, follow=follow, check=check)


def check_tensor_file(path: Path, *, max_tensors: int) -> None:
    """Reads only the header of a safetensors file that is no link, and compares it with the file's size.

    Raises:
        FileDamaged: It cannot be read, or is no safetensors file.
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
    """A file's bytes in memory that numpy can use in place.

    Args:
        path: The file.
        max_bytes: The most that is read; `MAX_BYTES` unless given.
        follow: Whether it may be a link.
        check: Called with the descriptor and the size before memory is taken for all of it.

    Raises:
        FileDamaged: It is no plain file, cannot be read, is larger, or changed while it was read.
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
    """A plain file that somebody gave us: its descriptor and its size."""
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
    """A new file beside `path`, open for writing; gone afterwards unless it was renamed."""
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


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    rest = memoryview(chunk).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_all(descriptor: int, content: memoryview) -> int:
    done = 0
    while done < len(content) and (count := os.readv(descriptor, [content[done:]])):
        done += count
    return done
