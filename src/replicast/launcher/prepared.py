"""A standby: a process that has imported TensorFlow, Keras and replicast, and waits to become a worker.

Run as a script by its path, through `bootstrap.py`; the arguments are the descriptor of a socket to the
launcher, the modules to import, and the program of the workers with its arguments. Until it is called it
touches no port, no shared memory and no file of the run. The call carries two descriptors: the worker's
output, and a file with its environment. Then it runs the program as `python` would, in this process; if the
imports have failed, or the program is not a plain script or module, it execs it, which is a cold start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import socket
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

if not sys.flags.safe_path:
    del sys.path[0]  # This file's neighbours must not hide modules of Python.

_CHUNK = 1 << 16


def import_all(names: list[str]) -> bool:
    try:
        for name in names:
            importlib.import_module(name)
    except BaseException:  # Also SystemExit: the script, started cold, says what is wrong.
        return False
    gc.collect()
    gc.freeze()  # What the imports made stays: no later collection need look at it.
    return True


def wait_for_call(control: socket.socket) -> tuple[int, bytes]:
    """Says that this process is ready, waits without limit, and ends with the launcher."""
    with contextlib.suppress(OSError):  # The launcher may have called and closed its end.
        control.sendall(b"r")
    try:
        called, descriptors, _, _ = socket.recv_fds(control, 1, 2)
    except OSError:
        called, descriptors = b"", []
    if not called or len(descriptors) != 2:  # The launcher has exited, or no descriptor is free.
        os._exit(1)
    output, environment = descriptors
    with os.fdopen(environment, "rb") as file:
        file.seek(0)
        return output, file.read()


def take_output(output: int) -> None:
    """Passes on what the imports have written, and makes the worker's output this process's own."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    place = 0
    while data := os.pread(1, _CHUNK, place):
        place += len(data)
        while data:
            data = data[os.write(output, data) :]
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def take_environment(block: bytes) -> None:
    before = dict(os.environ)
    pairs = [entry.partition(b"=") for entry in block.split(b"\0") if entry]
    wanted = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    for name in before.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
    known = sys.modules.get("replicast.import_environment")
    if known is not None:
        known.imported_with = before  # type: ignore[attr-defined]
    faults = sys.modules.get("replicast.faults")
    if faults is not None:
        faults.take_plan(wanted)


def load(path: Path) -> types.CodeType | None:
    """The code of a script; None if only `python` can run it: a directory, a zip file, bytecode."""
    source = path.read_bytes() if path.is_file() else b"\0"
    return None if b"\0" in source else compile(source, str(path), "exec", dont_inherit=True)


def run(program: list[str]) -> None:
    """Runs the program as `__main__`; a traceback begins where it does in a cold start."""
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        if program[0] == "-m":
            sys.argv = ["-m", *program[2:]]  # while its packages are imported
            runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
            return
        sys.argv = list(program)
        path = Path.cwd() / program[0]
        code = load(path)
        if code is None:
            cold_start(program)
            return
        main.__file__, main.__loader__ = str(path), SourceFileLoader("__main__", str(path))
        main.__cached__ = None  # type: ignore[attr-defined]
        exec(code, main.__dict__)
        return
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.exit(1)


def cold_start(program: list[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *program])


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    modules, program = sys.argv[2].split(","), sys.argv[3:]
    if not sys.flags.safe_path:
        first = Path.cwd() if program[0] == "-m" else Path(program[0]).resolve().parent
        sys.path.insert(0, str(first))  # as `python` does
    sys.argv = [""]
    is_prepared = import_all(modules)
    output, environment = wait_for_call(control)
    control.close()
    take_output(output)
    take_environment(environment)
    if not is_prepared:
        cold_start(program)
    sys.orig_argv = [sys.executable, *program]
    run(program)


if __name__ == "__main__":
    main()
