"""A job's directory in shared memory, which ends with the job however the job ends.

```
<place>/replicast-<uid>-<job>/   mode 0700
    lock                         every process of the job holds it shared for its life
    …                            the job's files
```
The kernel drops a process's lock when it dies, kill -9 included. So a directory whose lock can be taken
exclusively has no owner left and may be removed. Taking the lock and removing the directory are two
moments, and so are making the directory and taking its lock; whoever has taken a lock therefore looks once
more whether it is still the one in the directory, and the directory the one in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from pathlib import Path

from replicast.errors import ClusterError

logger = logging.getLogger("replicast")

_LOCK = "lock"
_OPEN_SECS = 10.0
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_JOB = re.compile(r"[A-Za-z0-9._-]{1,200}")


class JobDirectory:
    """This process's hold on the directory of its job.

    Opening it also removes the directories of jobs of this user that have no process left.

    Args:
        place: Where directories of jobs lie, such as /dev/shm.
        job: The name of the job, the same in all its processes.

    Attributes:
        path: The directory.
        descriptor: The same, open: files are reached through it, so that no link can lead elsewhere.
    """

    def __init__(self, place: Path, job: str) -> None:
        if not _JOB.fullmatch(job):
            raise ValueError(f"A job's name is made of letters, digits, dots, hyphens. Received: {job!r}")
        self.path = place / f"{_prefix()}{job}"
        self.descriptor, self._lock = self._open()
        remove_leftovers(place)

    def close(self) -> None:
        """Lets go; the last process of the job removes the directory. A second time does nothing."""
        if self._lock < 0:
            return
        # Asking for more gives up the shared lock first: of two that leave together, one gets it.
        if _locked(self._lock, fcntl.LOCK_EX) and _in_place(self.path, self.descriptor, self._lock):
            _remove(self.path, self.descriptor)
        os.close(self._lock)
        os.close(self.descriptor)
        self._lock = self.descriptor = -1

    def _open(self) -> tuple[int, int]:
        until = time.monotonic() + _OPEN_SECS
        while time.monotonic() < until:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            held = self._try_to_hold()
            if held is not None:
                return held
            time.sleep(0.01)  # somebody is just removing it
        raise ClusterError(
            f"{self.path} cannot be held: another process keeps its lock",
            remedy="Find it with 'fuser' and end it, or set REPLICAST_SHM_DIR to another directory",
        )

    def _try_to_hold(self) -> tuple[int, int] | None:
        with contextlib.ExitStack() as undo:
            try:
                descriptor = os.open(self.path, _DIRECTORY_FLAGS)
                undo.callback(os.close, descriptor)
                _check_owner(self.path, descriptor)
                lock = _open_lock(descriptor)
                undo.callback(os.close, lock)
            except FileNotFoundError:
                return None
            except NotADirectoryError:
                raise ClusterError(
                    f"{self.path} is not a directory of ours",
                    received="a file or a symbolic link",
                    remedy="Remove it, or set REPLICAST_SHM_DIR to another directory",
                ) from None
            if not (_locked(lock, fcntl.LOCK_SH) and _in_place(self.path, descriptor, lock)):
                return None
            undo.pop_all()
            return descriptor, lock


def remove_leftovers(place: Path) -> list[Path]:
    """Removes the directories of jobs of this user that have no process left; says which."""
    removed = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(place)):  # noqa: PTH208 - names are all that is needed
            if name.startswith(_prefix()) and _remove_if_left(place / name):
                removed.append(place / name)
                logger.info("removed %s, which a job that has died left behind", place / name)
    return removed


def _remove_if_left(path: Path) -> bool:
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(path, _DIRECTORY_FLAGS)
            opened.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid != os.getuid():
                return False
            lock = _open_lock(descriptor)
            opened.callback(os.close, lock)
        except OSError:  # a link, a file, or gone meanwhile: nothing of ours to remove
            return False
        if not (_locked(lock, fcntl.LOCK_EX) and _in_place(path, descriptor, lock)):
            return False
        _remove(path, descriptor)
        return True


def _remove(path: Path, descriptor: int) -> None:
    """Removes a directory whose lock is held exclusively, the lock last: until then it keeps others out."""
    with contextlib.suppress(OSError):
        for name in os.listdir(descriptor):
            if name != _LOCK:
                os.unlink(name, dir_fd=descriptor)
        os.unlink(_LOCK, dir_fd=descriptor)
        path.rmdir()


def _open_lock(descriptor: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(_LOCK, flags, 0o600, dir_fd=descriptor)


def _locked(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_place(path: Path, descriptor: int, lock: int) -> bool:
    try:
        there = os.lstat(path)
        lock_there = os.stat(_LOCK, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor)) and os.path.samestat(lock_there, os.fstat(lock))


def _check_owner(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ClusterError(
            f"{path} is open to others; weights would be readable by them",
            received=f"owner {status.st_uid}, mode {status.st_mode & 0o777:o}",
            remedy="Remove it, or set REPLICAST_SHM_DIR to another directory",
        )


def _prefix() -> str:
    return f"replicast-{os.getuid()}-"
