"""Identifies processes by pid, host and start time: the kernel reuses a pid once it is free."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Identifies this process to others, as JSON values."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "machine": this_machine(), "started": _started(pid)}


@functools.cache
def this_machine() -> str:
    """This boot of this machine, and its pids: two machines, or pods, may have the same host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def accept_problem(error: OSError) -> str:
    """Why `accept` fails for now, and would again at once; empty if only this connection is gone."""
    if error.errno in (errno.ECONNABORTED, errno.EAGAIN):
        return ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files; see ulimit -n"
    return error.strerror or str(error)


def is_on_this_host(process: Mapping[str, Any]) -> bool:
    """Whether a process is, or was, on this host, where its pid means something."""
    machine = process.get("machine") or this_machine()
    return process.get("host") == socket.gethostname() and machine == this_machine()


def is_alive(process: Mapping[str, Any]) -> bool | None:
    pid, started = process.get("pid"), process.get("started")
    if type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    if _stat(pid)[:1] in ([b"Z"], [b"X"]):  # A zombie: it has exited, and its parent has not reaped it.
        return False
    now = _started(pid)
    return None if started is None or now is None else started == now


def is_frozen(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal such as SIGSTOP, or by a debugger."""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if unknown."""
    try:
        return int(_stat(pid)[19])
    except (ValueError, IndexError):
        return None


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on: those after the name, which may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
