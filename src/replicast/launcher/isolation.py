"""`replicast run --isolate`: the job in a network namespace of its own, in which only the loopback exists.

The launcher itself enters the namespace, and all that it starts inherits it: workers, standby processes, the
ports that it reserves. Nobody outside can connect, other users of this machine included. Root may make a
network namespace; other users may where the system lets them make a user namespace. In that one they keep
their user and group, so that files belong to whom they would otherwise.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from replicast.config import PROGRESS_URL
from replicast.errors import LaunchRefused
from replicast.launcher.plan import Job

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_WITHOUT = "or leave out --isolate; see SECURITY.md"


def check_isolation(job: Job, environ: Mapping[str, str]) -> None:
    """Checks that a job can run in a network namespace of its own. Tries it in a child process."""
    if job.hosts or job.nodes > 1 or job.given is not None:
        others = "TF_CONFIG" if job.given is not None else "--hosts" if job.hosts else "--nnodes"
        raise LaunchRefused(
            "--isolate is for a job on one machine: workers elsewhere could not reach this one",
            remedy=f"Leave out {others}, {_WITHOUT}",
        )
    if environ.get(PROGRESS_URL):
        raise LaunchRefused(
            f"--isolate leaves the workers no network, so they cannot report to {PROGRESS_URL}",
            remedy=f"Unset it, {_WITHOUT}",
        )
    problem, needs_one_thread = _try_in_a_child()
    if problem:
        raise LaunchRefused(
            f"--isolate: this user may not make a network namespace here ({problem})",
            remedy="Run as root, let users make namespaces (sysctl kernel.unprivileged_userns_clone=1; on "
            f"Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0), {_WITHOUT}",
        )
    if needs_one_thread and _threads() > 1:
        raise _too_many_threads()


def isolate() -> None:
    """Moves this process into a network namespace of its own. Without root, only if it has one thread."""
    try:
        _enter()
    except OSError as error:
        if error.errno == errno.EINVAL and _threads() > 1:
            raise _too_many_threads() from error
        raise LaunchRefused(
            f"--isolate: the launcher could not enter a network namespace ({error.strerror or error})",
            remedy=f"Run as root, {_WITHOUT}",
        ) from error


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _too_many_threads() -> LaunchRefused:
    return LaunchRefused(
        f"--isolate: a user other than root may not enter a namespace with a process of {_threads()} "
        "threads, and something has started threads in the launcher",
        remedy="Run as root, start it without what runs threads in every Python process (a debugger, "
        f"a profiler, a .pth file), {_WITHOUT}",
    )


def _enter() -> bool:
    """Enters a new network namespace."""
    uid, gid = os.geteuid(), os.getegid()
    took_user_namespace = False
    try:
        _unshare(_CLONE_NEWNET)
    except OSError:
        took_user_namespace = True
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    _bring_up_loopback()
    return took_user_namespace


def _try_in_a_child() -> tuple[str, bool]:
    """Why a child process could not enter a namespace, empty if it could; whether it needs one thread."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            code = int(_enter())
        except OSError as error:
            limit = "user.max_user_namespaces or user.max_net_namespaces is reached"
            os.write(
                writer, (limit if error.errno == errno.ENOSPC else error.strerror or str(error)).encode()
            )
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        problem = said.read().decode()
    _, status = os.waitpid(child, 0)
    return problem, os.waitstatus_to_exitcode(status) == 1


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asking = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack_from("h", fcntl.ioctl(asked, _SIOCGIFFLAGS, asking), 16)[0]
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))
