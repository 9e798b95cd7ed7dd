"""Runs the commands of the demo as processes: `replicast run`, whose output it reads, and others."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from replicast.config import SECRETS, without

WORKERS = 2
JOB_SECS, COMMAND_SECS = 180.0, 60.0
PAUSE = "pause"
"""While this file exists, train.py waits: the push must come before its step."""
STOP_SECS = 45.0
"""Longer than `replicast run` waits for its workers to exit."""
LOOK_SECS = 0.05
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # Two workers on one GPU would compete for its memory.
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_REPORT = re.compile(r"^\[worker (\d+)\] step (\d+), process (\d+), weights ([0-9a-f]{64})$", re.MULTILINE)


class DemoFailed(Exception):  # noqa: N818 - reads as a sentence: raise DemoFailed
    """A claim of the demo did not come true; the message says which."""


class Report(NamedTuple):
    """A worker's report of its replica: the digest of all weights at a step, and its process id."""

    worker: int
    step: int
    process: int
    weights: str


def parse_reports(output: str) -> list[Report]:
    """The reports of train.py in the output of `replicast run --tee all`, in order."""
    found = _REPORT.findall(output)
    return [Report(int(worker), int(step), int(process), weights) for worker, step, process, weights in found]


class Job:
    """A running `replicast run … --tee all …`. On exit it is stopped, if it still runs."""

    def __init__(self, directory: Path, command: str) -> None:
        self._command = command
        self._output = directory / "run.log"
        self._deadline = time.monotonic() + JOB_SECS
        inherited = without(os.environ, "TF_CONFIG", *SECRETS)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                _argv(command),
                cwd=directory,
                env={**inherited, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the demo, which then stops the job.
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Its workers end with it.

    def wait_for_step(self, step: int) -> dict[int, Report]:
        """Waits until all workers have reported a step, and returns these reports by worker."""
        while self._process.poll() is None and time.monotonic() < self._deadline:
            reached = {report.worker: report for report in self._reports() if report.step == step}
            if len(reached) == WORKERS:
                return reached
            time.sleep(LOOK_SECS)
        raise self._failed(f"All workers should report step {step}")

    def finish(self) -> list[Report]:
        """Waits for the end of the job, and returns all reports."""
        try:
            code: int | None = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise self._failed("The job should end with exit code 0")
        return self._reports()

    def _reports(self) -> list[Report]:
        return parse_reports(self._output.read_text(encoding="utf-8", errors="replace"))

    def _failed(self, claim: str) -> DemoFailed:
        code = self._process.poll()
        state = f"still running after {JOB_SECS:.0f} s" if code is None else f"exit code {code}"
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return DemoFailed(f"{claim}. Received: {state}. `{self._command}` said:\n{output}")


def run_command(directory: Path, command: str, expected: int = 0) -> list[str]:
    """Runs a `replicast …` command, as people type it, and returns the lines that it printed."""
    try:
        done = subprocess.run(
            _argv(command), cwd=directory, capture_output=True, text=True, timeout=COMMAND_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"`{command}` has not ended after {COMMAND_SECS:.0f} s") from None
    if done.returncode != expected:
        said = done.stdout + done.stderr
        raise DemoFailed(
            f"`{command}` should end with {expected}. Received: {done.returncode}. It said:\n{said}"
        )
    return done.stdout.splitlines()


def push_in_pause(directory: Path, command: str, run: str) -> list[str]:
    """Runs `replicast push` while train.py waits for it to be scheduled; returns what it printed."""
    deadline = time.monotonic() + COMMAND_SECS
    with ThreadPoolExecutor(1) as pushing:
        pushed = pushing.submit(run_command, directory, command)
        while not json.loads("".join(run_command(directory, f"replicast status {run} --json")))["scheduled"]:
            if time.monotonic() > deadline or (pushed.done() and pushed.exception() is not None):
                (directory / PAUSE).unlink()
                pushed.result()
                raise DemoFailed(f"`{command}`: the update is not scheduled after {COMMAND_SECS:.0f} s")
        (directory / PAUSE).unlink()
        return pushed.result()


def _argv(command: str) -> list[str]:
    # -P: a file of the current directory must not take the place of a module.
    return [sys.executable, "-P", "-m", "replicast.cli", *shlex.split(command)[1:]]
