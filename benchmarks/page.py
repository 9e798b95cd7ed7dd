"""The page tables: the step time of a job while browsers follow it; and a browser's first visit."""

from __future__ import annotations

import bisect
import contextlib
import importlib.resources
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

from benchmarks.groups import REPOSITORY, Failed, threads_of_a_worker
from benchmarks.question import Contestant, Question, Ratio
from benchmarks.runner import BaseTask, Entry, Times, lasted

STREAMS = 100
TURN_SECS = 6.0
START_SECS = 90.0
ALONE = Contestant("floor: 0 streams", "page", "0", role="floor")
FOLLOWED = Contestant(f"{STREAMS} streams", "page", str(STREAMS))
PAGE = Question(
    name="page",
    title=f"A step of fit on 2 workers, followed by {STREAMS} browsers' streams of one server",
    unit="ms per step",
    contestants=(ALONE, FOLLOWED),
    task=BaseTask(),
    ratios=(Ratio(f"step with {STREAMS} streams / with none", FOLLOWED, ALONE, "at most", 1.03),),
    notes=(f"Turns of {TURN_SECS:g} s alternate in the life of one job, on the same two cores.",),
    budget_secs=60.0,
)

PLOTLY = Contestant("floor: a page that only loads plotly", "picture", "plotly", "playwright", role="floor")
WHOLE = Contestant("a page that only loads all of plotly", "picture", "whole", "playwright", role="part")
RUN = Contestant("the page of a run", "picture", "run", "playwright", role="ours")
PICTURE = Question(
    name="picture",
    title="The longest task of a page's thread at the first visit of a browser",
    unit="ms",
    contestants=(PLOTLY, WHOLE, RUN),
    task=BaseTask(),
    ratios=(Ratio("page of a run / only plotly", RUN, PLOTLY, "at most", 1.2),),
    notes=(
        "Each visit is one of a new Chromium, whose caches are empty. The job is played: nothing trains.",
    ),
    budget_secs=60.0,
)
_TASKS = """window.tasks = [0];
new PerformanceObserver((seen) => tasks.push(...seen.getEntries().map((one) => one.duration)))
  .observe({type: "longtask", buffered: true});"""
_ONLY_PLOTLY = '<!doctype html><title>floor</title><script src="static/{}.js"></script>'
_QUIET_MS = 1500.0  # After the chart is there: it is drawn in parts.


class PictureGroup:
    """A played run with its server, started on first use. A contestant is what a new browser opens."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._address = ""

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        """Starts the server; no-op if that was already done."""
        if not self._address:
            from tests.page.live import Serving
            from tests.page.played_run import PlayedRun

            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            run = self._open.enter_context(PlayedRun(folder / "one", steps=20))
            self._address = self._open.enter_context(Serving(run.path)).address

    def order(self, order: str, entry: Entry, timeout_secs: float) -> list[Times]:
        """A visit; there is nothing to arrange or to check."""
        if order != "race":
            return []
        from tests.page.browser import chromium

        with chromium() as browser:
            page = browser.new_page()
            page.add_init_script(_TASKS)
            alone = _ONLY_PLOTLY.format(entry.contestant)
            page.route("**/floor", lambda route: route.fulfill(body=alone, content_type="text/html"))
            page.route("**/static/whole.js", lambda route: route.fulfill(path=str(_whole_plotly())))
            page.goto(f"{self._address}/{'' if entry.contestant == 'run' else 'floor'}")
            if entry.contestant == "run":
                page.wait_for_selector(".chart .scatterlayer path", state="attached")
            page.wait_for_timeout(_QUIET_MS)
            return [lasted(round(page.evaluate("Math.max(...tasks)") * 1e6))]

    def end(self) -> None:
        """Ends the run and its server."""
        self._open.close()
        self._address = ""


def _whole_plotly() -> Path:
    found = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    return Path(str(found))


class PageGroup:
    """One job with its server, started on first use. A contestant is a number of streams."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._port: int | None = None

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        """Starts the job; no-op if that was already done."""
        if self._port is None:
            self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            try:
                self._port = self._open.enter_context(_job(self._folder))
            except RuntimeError as error:
                raise Failed(str(error).strip().splitlines()[-1][:200]) from error

    def order(self, order: str, entry: Entry, timeout_secs: float) -> list[Times]:
        """A turn; there is nothing to arrange or to check."""
        if order != "race" or self._port is None:
            return []
        return [lasted(round(_turn(self._port, self._folder / "steps-0", int(entry.contestant)) * 1e6))]

    def end(self) -> None:
        """Ends the job."""
        self._open.close()
        self._port = None


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
