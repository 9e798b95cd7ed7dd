"""The page table: the step time of a job while browsers follow it, and while none does."""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fit import Say
from benchmarks.report import Ratio, Result, Row
from benchmarks.workers import REPOSITORY, threads_of_a_worker

STREAMS = 100
TURN_SECS = 6.0
START_SECS = 90.0
_TARGET = 1.03


def measure(rounds: int, say: Say) -> Result:
    """One job with its server; turns with and without streams alternate.

    Args:
        rounds: How many pairs of turns.
        say: Called with a progress message.
    """
    with tempfile.TemporaryDirectory() as folder, _job(Path(folder)) as port:
        steps = Path(folder) / "steps-0"
        figures: dict[int, list[float | None]] = {0: [], STREAMS: []}
        for number in range(2 * rounds):
            streams = STREAMS if (number % 2) ^ (number // 2 % 2) else 0  # each order as often as the other
            say(f"page: turn {number + 1} of {2 * rounds}, {streams} streams")
            figures[streams].append(_turn(port, steps, streams))
    alone, followed = (Row(f"{count} streams", tuple(times)) for count, times in figures.items())
    return Result(
        title=f"fit on 2 workers, followed by {STREAMS} browsers' streams of one server",
        unit=f"ms per step, {rounds} turns each",
        rows=(alone, followed),
        ratios=(Ratio.of(f"step with {STREAMS} streams / with none", followed, alone, "at most", _TARGET),),
        notes=(f"Turns of {TURN_SECS:g} s alternate in the life of one job, on the same two cores.",),
    )


@contextlib.contextmanager
def _job(folder: Path) -> Iterator[int]:
    """A job that trains beside its server; gives the server's port."""
    script = REPOSITORY / "benchmarks" / "page_job.py"
    command = [sys.executable, "-m", "replicast", "run", "-n", "2", "--tee", "none", "--serve", "0"]
    environment = {**os.environ, **threads_of_a_worker(), "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    with subprocess.Popen(
        [*command, "--run-dir", str(folder), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as launcher:
        try:
            yield _port(launcher, folder)
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(60.0)


def _port(launcher: subprocess.Popen[str], folder: Path) -> int:
    """The port that the launcher names, once the job trains."""
    assert launcher.stdout is not None
    said = ""
    for line in launcher.stdout:
        said += line
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found is not None:
            break
    else:
        raise RuntimeError(f"The job has not started its server:\n{said}")
    ends = time.monotonic() + START_SECS
    steps = folder / "steps-0"
    while not steps.exists() or len(steps.read_text().splitlines()) < 100:
        if time.monotonic() > ends:
            raise RuntimeError(f"The job has not trained within {START_SECS:g} s:\n{said}")
        time.sleep(0.2)
    return int(found[1])


def _turn(port: int, steps: Path, streams: int) -> float:
    """The mean time of a step while so many streams are open, in milliseconds."""
    streamed: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for _ in range(streams):
            stream = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
            head = "Host: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
            stream.sendall(f"GET /api/runs/{steps.parent.name}/events HTTP/1.1\r\n{head}".encode())
            if b"200" not in stream.recv(65_536).split(b"\r\n")[0]:
                raise RuntimeError("The server has refused a stream")
            stream.setblocking(False)
            streamed.append(stream)
        time.sleep(1.0)  # the first answers, which are larger, do not count
        began, ends = time.time(), time.time() + TURN_SECS
        while time.time() < ends:
            time.sleep(0.2)
            for stream in streamed:  # a browser reads what it is sent
                with contextlib.suppress(BlockingIOError):
                    stream.recv(65_536)
        over = time.time()
    moments = [float(line) for line in steps.read_text().splitlines()[:-1]]
    first, last = bisect.bisect(moments, began), bisect.bisect(moments, over) - 1
    return (moments[last] - moments[first]) / (last - first) * 1000
