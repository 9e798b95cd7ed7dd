"""The page beside a job: `replicast serve` as a child of the launcher. It ends with it, and does no harm."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from replicast.config import JOB_SECRET, without
from replicast.errors import LaunchRefused, printable
from replicast.launcher.failure import end_of
from replicast.paths import RunDir, RunPath, make_durably

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_START_SECS = 15.0
_END_SECS = 5.0


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the page of a job is served."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> PageAddress:
        """The address in `--serve [HOST:]PORT`."""
        host, _, port = text.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise LaunchRefused(f"--serve expects [HOST:]PORT. Received: {text}", remedy="For example: 8080")
        return cls(host.strip("[]") if host else "127.0.0.1", int(port))


@contextlib.contextmanager
def page_beside(
    address: PageAddress, run_dir: RunDir, log_dir: RunPath, environ: Mapping[str, str]
) -> Iterator[str]:
    """Serves the page of a run as long as the context lasts.

    Waits until it is served, at most `_START_SECS`, so that the address stands above all output of the job.
    """
    try:
        make_durably(log_dir)
        log = log_dir / "serve.log"
        with os.fdopen(log.open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as errors:
            process = _start(address, run_dir, errors.fileno(), environ)
    except OSError as error:
        yield f"the page is not served ({error.strerror})"
        return
    try:
        yield _first_line(process, log)
    finally:
        process.terminate()
        try:
            process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _start(
    address: PageAddress, run_dir: RunDir, errors: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    serve = [sys.executable, "-m", "replicast", "serve", str(run_dir)]
    options = ["--host", address.host, "--port", str(address.port)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid()), *serve, *options],
        env=without(environ, JOB_SECRET),  # The token is for it.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # Ctrl-C is for the launcher, which ends it last.
    )


def _first_line(process: subprocess.Popen[bytes], log: RunPath) -> str:
    if process.stdout is None:
        return "the page is not served"
    readable, _, _ = select.select([process.stdout], [], [], _START_SECS)
    line = process.stdout.readline().decode(errors="replace").strip() if readable else ""
    if line:
        return line[0].lower() + line[1:]
    if readable:
        said = printable(next((line for line in reversed(end_of(log)) if line.strip()), f"see {log}"))
        return f"the page is not served: {said.strip()}"
    return f"the page is still starting; see {log}"
