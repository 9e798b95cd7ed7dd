"""A shared-memory file with one owner, which is removed soon after its owner dies.

The file is created without a name, locked by its creator, and only then linked to its name. The kernel
releases the lock when the process dies, even by kill -9. So a named file whose lock can be taken has no owner
any more, and the next process that starts removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from replicast.errors import ClusterError
from replicast.mapped_memory import Bytes, map_shared

logger = logging.getLogger("replicast")


class SharedFile:
    """A file of this process that others can map once it is complete."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._path: Path | None = None
        self._descriptor = _unnamed_file(directory)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._descriptor, 0, nbytes)
            self.buffer: Bytes = map_shared(self._descriptor, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def nbytes(self) -> int:
        return len(self.buffer)

    def descriptor(self) -> int:
        """Another descriptor of the file, which the caller closes."""
        return os.dup(self._descriptor)

    def complete(self, path: Path) -> None:
        """Links the written file to its name, so that others can map it."""
        # Python follows the link in /proc only if it is given a directory descriptor, which is not used.
        os.link(f"/proc/self/fd/{self._descriptor}", path, src_dir_fd=self._descriptor)
        self._path = path

    def hide(self) -> None:
        """Removes the name: nobody else can map the file, and it ends with the last process that has."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # the directory may be gone
                self._path.unlink()
            self._path = None

    def remove(self) -> None:
        """Removes the file; mappings of it stay valid. Never raises. Call it once."""
        self.hide()
        os.close(self._descriptor)


@contextlib.contextmanager
def opened(path: Path, access: int = os.O_RDONLY) -> Iterator[int]:
    """A complete file of this user, open for reading or with another access."""
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise FileNotFoundError(errno.ENOENT, "The file belongs to another user", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def check_directory(directory: Path) -> None:
    """Checks that a directory can hold such files."""
    try:
        os.close(_unnamed_file(directory))
    except OSError as error:
        raise ClusterError(
            f"{directory} cannot be used for shared memory",
            received=str(error),
            remedy="Set REPLICAST_SHM_DIR to a directory in a tmpfs, such as /dev/shm",
        ) from error


def name_prefix() -> str:
    """The prefix of the names of this user's files."""
    return f"replicast-memory-{os.getuid()}-"


def remove_leftovers(directory: Path) -> list[Path]:
    """Removes the files of this user whose owner is dead; returns their paths."""
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob(f"{name_prefix()}*")):
            if _remove_if_left(path):
                removed.append(path)
                logger.info("removed %s, which a process that has died left behind", path)
    return removed


def _remove_if_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # a link, another user's, or already gone
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # its owner is alive, or it is a directory
        return False
    finally:
        os.close(descriptor)
    return True


def _unnamed_file(directory: Path) -> int:
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
