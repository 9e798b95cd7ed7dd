"""Identifies processes by pid, host and start time: the kernel reuses a pid once it is free.

Also says how this one was started.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("replicast", "tensorflow", "keras", "tf_keras", "numpy")
_SECRET = re.compile(r"(.*[-_.])?(pass(word|wd|phrase)?|secret|token|key|credentials?)", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]+@")
_GIT_SECS = 2.0  # A large repository on a slow disk must not keep a job from starting.
_MOST_ARGUMENTS, _MAX_ARGUMENT = 200, 500


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


@functools.cache
def this_start() -> dict[str, Any]:
    """The command of this process, the versions of what it has imported, and the commit of its script.

    Others may read it: nothing is taken from the environment, and secrets are left out of the arguments.
    """
    imported = {name: getattr(sys.modules.get(name), "__version__", "") for name in _PACKAGES}
    versions = {"python": platform.python_version(), **{name: one for name, one in imported.items() if one}}
    arguments = (text[:_MAX_ARGUMENT] for text in without_secrets(sys.argv[:_MOST_ARGUMENTS]))
    return {"command": tuple(arguments), "versions": versions, "commit": commit_of(Path(sys.argv[0]).parent)}


def without_secrets(arguments: Iterable[str]) -> Iterator[str]:
    """Arguments as others may read them: no value of `--api-key`, `wandb.token=` or `https://user:…@`."""
    hides = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = _SECRET.fullmatch(name) is not None
        hidden = f"{name}=…" if is_secret and equals else _LOGIN.sub("://…@", argument)
        yield "…" if hides and not argument.startswith("-") else hidden
        hides = is_secret and not equals and name.startswith("-")


def commit_of(folder: Path) -> str:
    """The commit that git has there, with `-dirty` if files were changed; empty where git does not say it."""
    describe = "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    command = ["git", "-C", str(folder), "--no-optional-locks", "-c", "core.fsmonitor=false", *describe]
    try:
        told = subprocess.run(command, capture_output=True, timeout=_GIT_SECS, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return told.decode(errors="replace").strip()
