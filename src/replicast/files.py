"""Files: below a run directory no link is followed, what has a final name is complete, and reads are limited.

Others than the owner of a job may be allowed to write into its run directory. Whoever may do so can replace
any name in it by a link, at any moment, also between a check and an open. So everything below a run directory
is a `RunPath`: each operation starts from a descriptor of the run directory and follows no link on its way.
A `Path` is what a user named: it is used as it is, links included.

A file is written under a temporary name in the same directory, fsynced and renamed; then the directory is
fsynced. Without numpy, which the launcher may not import before it has started the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from replicast import faults
from replicast.codec import parse_object, unsealed
from replicast.errors import FileDamaged, printable

TEMPORARY = ".tmp-"
MAX_JSON_BYTES = 256 * 2**20  # About ten times the size of a manifest of a hundred thousand variables.
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WALKED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Only Linux has it.
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2
_LINK = "it is a symbolic link, and links in a run directory are not followed"


@dataclass(frozen=True, order=True, slots=True)
class RunPath:
    """A file or directory below a run directory. No operation follows a link below the root.

    It has no `__fspath__`: `open(path)` and `os.stat(path)` raise TypeError. A name that no file can have,
    such as "..", names nothing: FileNotFoundError. Every OSError has the whole path as its `filename`.
    """

    root: Path
    parts: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> RunPath:
        return RunPath(self.root, (*self.parts, name))

    def __str__(self) -> str:
        """For messages: characters that are not printable are escaped, since others choose the names."""
        return printable(self.as_path())

    def as_path(self) -> Path:
        """For users and other programs. Whoever opens it follows links; nothing in this package may."""
        return self.root.joinpath(*self.parts)

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else self.root.name

    @property
    def parent(self) -> RunPath:
        """The directory that it is in; never one above the root."""
        if not self.parts:
            raise ValueError(f"The parent of a run directory does not belong to it. Received: {self}")
        return RunPath(self.root, self.parts[:-1])

    def with_name(self, name: str) -> RunPath:
        return self.parent / name

    def stat(self) -> os.stat_result:
        with self._place() as (directory, name):
            return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def exists(self) -> bool:
        return self._mode() != 0

    def is_dir(self) -> bool:
        return stat.S_ISDIR(self._mode())

    def is_file(self) -> bool:
        return stat.S_ISREG(self._mode())

    def iterdir(self) -> list[RunPath]:
        with self.entered() as directory:
            return [self / name for name in os.listdir(directory)]  # noqa: PTH208 - a descriptor

    def glob(self, pattern: str) -> list[RunPath]:
        """What is in this directory under such a name; nothing if there is no such directory."""
        try:
            return [path for path in self.iterdir() if fnmatchcase(path.name, pattern)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, flags: int, mode: int = 0o666) -> int:
        """Opens a regular file, returns its descriptor. A pipe or device could block or have side effects."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        with self._place() as (directory, name):
            return _regular(os.open(name, flags, mode, dir_fd=directory))

    def mkdir(self, *, exist_ok: bool = False) -> None:
        with self._place() as (directory, name):
            try:
                os.mkdir(name, dir_fd=directory)
            except FileExistsError:
                if not exist_ok or not stat.S_ISDIR(_mode_of(name, directory)):
                    raise

    def rename(self, target: RunPath) -> None:
        """Gives it another name. What had that name, or a link, is replaced."""
        with self._place() as (directory, name), target._place() as (other, new):
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=other)

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            with self._place() as (directory, name):
                os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        with self._place() as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def rmtree(self) -> None:
        with contextlib.suppress(OSError), self._place() as (directory, name):
            shutil.rmtree(name, ignore_errors=True, dir_fd=directory)

    @contextlib.contextmanager
    def entered(self, flags: int = _LISTED) -> Iterator[int]:
        """A descriptor of this directory: what is opened relative to it is in this directory."""
        with self._place() as (parent, name):
            directory = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        try:
            yield directory
        finally:
            os.close(directory)

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise
            return 0

    @contextlib.contextmanager
    def _place(self) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory that it is in, and its name there; "." for the root."""
        directory = os.open(self.root, _WALKED)
        count, name = 0, "."
        try:
            for count, name in enumerate(self.parts, 1):
                check_name(name)
                if count < len(self.parts):
                    outer, directory = directory, os.open(name, _WALKED | os.O_NOFOLLOW, dir_fd=directory)
                    os.close(outer)
            yield directory, name
        except OSError as error:
            if error.filename not in (name, None):  # Of another path, which has told it.
                raise
            at = RunPath(self.root, self.parts[:count])
            error.filename = str(at)
            del error.filename2  # That of a rename.
            # The system says "not a directory" of a link to one, and "exists" where one was to be made.
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST) and stat.S_ISLNK(
                _mode_of(name, directory)
            ):
                raise OSError(errno.ELOOP, _LINK, str(at)) from error
            raise
        finally:
            os.close(directory)


# A run directory as functions accept it. `below(run_dir) / "inbox"` is the only way into it.
RunDir: TypeAlias = RunPath | Path | str


def below(run_dir: RunDir) -> RunPath:
    """A run directory as the root of paths; one below a served directory, or below another run, stays so."""
    return run_dir if isinstance(run_dir, RunPath) else RunPath(Path(run_dir))


def check_name(name: str) -> None:
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b""
    if encoded in (b"", b".", b"..") or b"/" in encoded or b"\0" in encoded:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _mode_of(name: str, directory: int) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:
        return 0


def _regular(descriptor: int) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file")
    return descriptor


def sync_directory(path: RunDir) -> None:
    with below(path).entered() as directory:
        os.fsync(directory)


def make_durably(directory: RunDir) -> None:
    """Creates a directory and its parents, so that their names survive a power failure."""
    path = below(directory)
    if path.is_dir():
        return
    if not path.parts:  # A run directory that a user named: its parents are outside it.
        path = RunPath(path.root.parent) / path.name
    make_durably(path.parent)
    path.mkdir(exist_ok=True)
    try:
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()  # Otherwise the next caller would find it and assume that it is durable.
        raise


def read_small(path: RunPath | Path | str, *, max_bytes: int, directory: int | None = None) -> bytes:
    """Reads a regular file. Links, pipes and devices are not read, and do not block."""
    descriptor = open_plain(path, directory=directory)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(min(max_bytes, os.fstat(descriptor).st_size) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def open_plain(path: RunPath | Path | str, *, directory: int | None = None, follow: bool = False) -> int:
    """Opens a regular file for reading. Opening a pipe or a device could block or have side effects."""
    if isinstance(path, RunPath):
        return path.open(os.O_RDONLY)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    return _regular(os.open(path, flags, dir_fd=directory))


def write_durably(
    path: RunPath | Path, chunks: Iterable[bytes | memoryview], *, replace: bool = True, sync: bool = True
) -> None:
    """Writes a file that is complete even after a power failure. `replace=False`: FileExistsError."""
    path = path if isinstance(path, RunPath) else RunPath(path.parent) / path.name
    temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
    with path.parent.entered(_LISTED if sync else _WALKED) as directory:
        try:
            check_name(path.name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666, dir_fd=directory)
            try:
                for chunk in chunks:
                    write_all(descriptor, chunk)
                if sync:
                    faults.point("write")
                    os.fsync(descriptor)
                    faults.point("rename")
                if replace:
                    os.rename(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
                else:  # Killed between the two, the file also has its temporary name, which is removed later.
                    both = {"src_dir_fd": directory, "dst_dir_fd": directory}
                    os.link(temporary, path.name, **both, follow_symlinks=False)
                    os.unlink(temporary, dir_fd=directory)
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
        if sync:
            os.fsync(directory)


def write_quickly(path: RunPath | Path, text: str) -> None:
    """Writes a small file completely, without waiting for the disk: it may be lost in a power failure."""
    write_durably(path, [text.encode()], sync=False)


def start_writing(descriptor: int, place: int, nbytes: int) -> None:
    """Makes the kernel start to write these bytes to disk, if it can: the final fsync has less to do."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, place, nbytes, _SYNC_FILE_RANGE_WRITE)


def remove_leftovers(directory: RunDir, *, older_than_secs: float = 3600.0) -> None:
    now = time.time()
    for path in below(directory).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime >= older_than_secs:
                path.unlink()


def read_json(path: RunPath, *, max_bytes: int = MAX_JSON_BYTES, is_sealed: bool = False) -> dict[str, Any]:
    """The JSON object in a file, which may end with its checksum (`codec.sealed`)."""
    try:
        content = read_small(path, max_bytes=max_bytes)
        return parse_object(unsealed(content)[0] if is_sealed else content)
    except OSError as error:
        raise FileDamaged(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise FileDamaged(path, str(error)[:500]) from error


def write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    """Writes all of it: a disk that is nearly full takes the beginning without an error."""
    rest = memoryview(chunk).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]
