"""`replicast.launch`: workers that call a function of a notebook or of a script.

The launcher is a process of its own, `replicast run -m replicast.launcher.function DIR`, and so is each
worker: nothing is forked, and a TensorFlow that this process has imported stays here, with its threads and
devices. DIR is a directory that only this user may enter. What is pickled passes through it and nowhere else:

    call        the function and its arguments, for all workers of all attempts
    result      what the function returned on worker 0
    error-R     what it raised on worker R

cloudpickle, where it is installed, sends functions that no module holds: those of a notebook or a script.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from replicast.config import read_launch, without
from replicast.errors import JobFailed, LaunchRefused
from replicast.files import RunDir
from replicast.launcher.launcher import RUNS
from replicast.launcher.plan import bootstrapped

_CALL, _RESULT, _ERROR = "call", "result", "error-{}"
_REFUSED, _CTRL_C = 2, 130


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int = 2,
    run_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    tee: str | None = None,
) -> Any:
    """Calls a function on several workers on this machine, from a notebook or a script.

    Each worker is a new process, as with `replicast run`: the function creates the strategy, the model and
    `replicast.Replicas` itself, and nothing of this process is shared. Shows the output of the workers while
    they run. Ctrl-C, or interrupting the notebook, stops them as it stops `replicast run`. If this process is
    killed, they end with it.

    Args:
        function: What every worker calls. A function of a notebook or of the main script needs cloudpickle.
        args: Its arguments.
        workers: How many workers.
        run_dir: The run directory. Default: runs/TIME-NAME.
        max_restarts: Restarts after a failure.
        tee: Whose output to show: "all", "none" or "0,2". Default: that of worker 0.

    Returns:
        What the function returned on worker 0.

    Raises:
        JobFailed: A worker failed. Its `worker` is the first that did, its cause what that one raised.
        LaunchRefused: The workers cannot be started.
    """
    if not callable(function):
        raise LaunchRefused("launch needs a function", remedy=f"Received: {function!r}"[:200])
    if read_launch(os.environ).launched:
        remedy = 'In a script, put the call below: if __name__ == "__main__":'
        raise LaunchRefused("This is a worker already", remedy=remedy)
    name = getattr(function, "__name__", "function").strip("<>")
    directory = Path(RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{name}" if run_dir is None else run_dir)
    options = ["-n", str(workers), "--run-dir", str(directory), "--max-restarts", str(max_restarts)]
    options += [] if tee is None else ["--tee", tee]
    if getattr(function, "__module__", None) == "__main__" and not find_spec("cloudpickle"):
        what = "A function of a notebook or of the main script needs cloudpickle"
        raise LaunchRefused(what, remedy="pip install cloudpickle, or move it into a module")
    try:
        pickled = _dumps((function, tuple(args)))
    except Exception as error:  # Whatever a foreign object raises when it is pickled.
        raise LaunchRefused(
            f"The function cannot be sent to the workers ({type(error).__name__}: {str(error)[:300]})",
            remedy="Create models, datasets and strategies in the function, and pass plain values",
        ) from error
    with tempfile.TemporaryDirectory(prefix="replicast-launch-") as text:
        private = Path(text)  # Made for this user alone (0700).
        _write(private / _CALL, (sys.path, pickled))
        code, last = _follow([sys.executable, "-m", "replicast", "run", *options, "-m", __name__, text])
        if code == _CTRL_C:
            raise KeyboardInterrupt
        if code == _REFUSED and not any(private.glob(_ERROR.format("*"))):
            raise LaunchRefused(last.removeprefix("Error: "), remedy="See the output above")
        if code:
            raise _failure(private, directory, code)
        return pickle.loads(_read(private / _RESULT)) if (private / _RESULT).exists() else None


def _dumps(value: Any) -> bytes:
    """Both ways alike: a class of the main script is the same class again where it came from."""
    try:
        from cloudpickle import dumps
    except ImportError:
        dumps = pickle.dumps
    return bytes(dumps(value))


def _follow(command: list[str]) -> tuple[int, str]:
    """Runs the launcher and shows what it says; returns its exit code and its last line."""
    # A session of its own: a notebook interrupts its whole group, and a second Ctrl-C would kill the workers.
    process = subprocess.Popen(
        bootstrapped(command),
        env=without(os.environ, "MPLBACKEND"),  # a notebook's own, which scripts cannot use
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    last = ""
    with process:
        output = process.stdout
        while output is not None:
            try:
                for line in output:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                    last = line.strip() or last
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)  # Its workers save and end, or are killed after the grace.
    return process.returncode, last


def _failure(private: Path, run_dir: RunDir, code: int) -> JobFailed:
    from replicast.storage.run_files import changes

    found = [change for change in changes(run_dir) if change.worker is not None]
    worker, why = (found[-1].worker, found[-1].reason) if found else (None, f"exit code {code}")
    path = private / _ERROR.format(worker)
    if not path.exists():
        return JobFailed(f"The job failed: {why}", worker=worker)
    said, pickled = pickle.loads(_read(path))
    failed = JobFailed(f"worker {worker} failed: {said.strip().splitlines()[-1]}", worker=worker)
    failed.add_note(f"On worker {worker}:\n{said}")
    with contextlib.suppress(Exception):  # Its type may be one that only the workers can make.
        failed.__cause__ = pickle.loads(pickled)
    return failed


def _write(path: Path, value: Any) -> None:
    """Writes a whole file that only this user can read."""
    descriptor = os.open(path.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_dumps(value))
    path.with_suffix(".new").rename(path)


def _read(path: Path) -> bytes:
    """A file that nobody but this user can have written: it is unpickled."""
    for place in (path.parent, path):
        found = place.lstat()
        if found.st_uid != os.geteuid() or stat.S_ISLNK(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchRefused(f"{place} is not private to this user", remedy="Use replicast.launch")
    return path.read_bytes()


def main(private: Path) -> None:
    rank = os.environ["RANK"]
    (private / _ERROR.format(rank)).unlink(missing_ok=True)  # of the attempt before
    paths, pickled = pickle.loads(_read(private / _CALL))
    sys.path += [path for path in paths if path not in sys.path]
    sys.argv = sys.argv[:1]
    try:
        function, args = pickle.loads(pickled)
        result = function(*args)
        if rank == "0":
            _write(private / _RESULT, result)
    except Exception as error:
        said = "".join(traceback.format_exception(error))
        try:
            sent = _dumps(error)
        except Exception:  # The text remains.
            sent = b""
        _write(private / _ERROR.format(rank), (said, sent))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
