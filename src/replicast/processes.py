"""Processes: which one it is, how this one was started and is told to end, how long one waits for others.

A process is identified by pid, host and start time: the kernel reuses a pid once it is free.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from replicast.config import read_launch

_PACKAGES = ("replicast", "tensorflow", "keras", "tf_keras", "numpy")
_SECRET = re.compile(r"(.*[-_.])?(pass(word|wd|phrase)?|secret|token|key|credentials?)", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]+@")
_GIT_SECS = 2.0  # A large repository on a slow disk must not keep a job from starting.
_MOST_ARGUMENTS, _MAX_ARGUMENT = 200, 500

REPEAT_SECS = 5.0
# How long to wait until the main thread runs Python code. That of a Ray worker does so every few seconds.
MAIN_THREAD_SECS = 2.5
# Modules whose handlers do no more than the default one: they end the process.
_ONLY_EXITS = ("ray._private.worker",)
_AS_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
# What the main thread will be asked to run: the interpreter holds no reference, and may run it late.
_PENDING: list[object] = []


def this_process() -> dict[str, Any]:
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


class Deadline:
    """A moment after which nobody waits any more; without a number of seconds, it never comes.

    Every wait has one, and what it raises says who was waited for.
    """

    def __init__(self, secs: float | None) -> None:
        self._ends = math.inf if secs is None else time.monotonic() + secs

    def left(self, at_most: float = math.inf) -> float:
        return max(0.0, min(at_most, self._ends - time.monotonic()))

    def has_passed(self) -> bool:
        return time.monotonic() >= self._ends


# SIGTERM.


class SigtermHandler:
    """Calls `act` on the first SIGTERM.

    A signal to a whole process group or cgroup reaches a worker twice: directly, and through its launcher,
    which passes it on. A repeated signal must not end a process that is writing its last checkpoint. With a
    launcher, repeated signals are ignored: the launcher kills the process after its timeout. Without one,
    they are ignored for `REPEAT_SECS`; after that a signal ends the process at once.
    """

    def __init__(self, act: Callable[[], object], now: Callable[[], float]) -> None:
        self.act = act
        self._now = now
        self._launched = read_launch(os.environ).launched
        self._process = os.getpid()
        self._told_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # A forked child inherits our handler, but does not train.
            _end()
        elif self._told_at is None:
            self._told_at = self._now()
            self.act()
        elif not self._launched and self._now() - self._told_at >= REPEAT_SECS:
            _end()


def on_sigterm(act: Callable[[], object], *, now: Callable[[], float] = time.monotonic) -> bool:
    """Sets a handler that calls `act` on SIGTERM, unless the script has its own handler."""

    def set_handler() -> None:
        there = signal.getsignal(signal.SIGTERM)  # Again: it may be some time since it was looked at.
        if isinstance(there, SigtermHandler):
            there.act = act
        elif _may_replace(there):
            signal.signal(signal.SIGTERM, SigtermHandler(act, now))

    is_needed = _may_replace(signal.getsignal(signal.SIGTERM))
    if not is_needed or threading.current_thread() is threading.main_thread():
        set_handler()
        return True
    done = threading.Event()

    def run(_: int | None) -> int:
        set_handler()
        done.set()
        return 0

    # In the main thread, which may not run Python code for some time.
    call = _AS_PENDING_CALL(run)
    _PENDING.append(call)
    ctypes.pythonapi.Py_AddPendingCall(call, None)
    return done.wait(MAIN_THREAD_SECS)


def _may_replace(handler: object) -> bool:
    return handler is signal.SIG_DFL or getattr(handler, "__module__", None) in _ONLY_EXITS


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
