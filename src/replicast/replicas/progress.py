"""Progress for schedulers: a heartbeat file, and a POST as Kubeflow's Trainer wants it. Off by default.

A thread writes the file, and another one sends, which may wait for a slow server; `ProgressReports.stop` ends
both. They never stop training: whatever fails is logged once. Everything is bounded: the number and length of
what is sent, the silence of the server, and the wait at the end of the job.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from replicast.config import ProgressTarget
from replicast.files import read_small, write_quickly
from replicast.replicas.position import Position
from replicast.replicas.worker_notes import Pace

logger = logging.getLogger("replicast")

FILE_SECS = 1.0
POST_SECS = 10.0
"""How often a report is sent. Kubeflow's own client sends one in 5 s at most."""
TIMEOUT_SECS = 3.0
END_SECS = 4.0
"""How long the end of the job waits for the last report."""
MAX_METRICS, MAX_NAME, MAX_TOKEN_BYTES = 64, 128, 65536


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training is, as far as that is known."""

    time: float
    rank: int
    attempt: int
    step: int
    training: bool
    stepped_at: float | None
    percent: int | None
    remaining_secs: int | None
    metrics: Mapping[str, float]

    def heartbeat(self) -> dict[str, Any]:
        """The JSON object of the file; a metric that is not a finite number is null, as JSON has no NaN."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return asdict(self) | {"metrics": metrics}

    def kubeflow(self) -> dict[str, Any]:
        """The body that Kubeflow's status server expects: UpdateTrainJobStatusRequest."""
        status: dict[str, Any] = {"lastUpdatedTime": datetime.fromtimestamp(self.time, UTC).isoformat()}
        if self.percent is not None:
            status["progressPercentage"] = self.percent
        if self.remaining_secs is not None:
            status["estimatedRemainingSeconds"] = self.remaining_secs
        status["metrics"] = [
            {"name": name[:MAX_NAME], "value": f"{value:.6g}"}
            for name, value in [("step", self.step), *self.metrics.items()][:MAX_METRICS]
        ]
        return {"trainerStatus": status}


def done_and_left(position: Position | None) -> tuple[int, int] | None:
    """The steps of the current `fit` that are done and those that are left; None if that is not known."""
    if position is None or position.inside != "fit" or not position.fits:
        return None
    fit = position.fits[-1]
    if fit.batches is None:
        return None
    total = fit.epochs * fit.batches
    done = min(total, position.epoch * fit.batches + position.batch)
    return done, total - done


class ProgressReports:
    """Writes and sends the progress of this worker until it is stopped."""

    def __init__(
        self,
        target: ProgressTarget,
        *,
        rank: int,
        attempt: int,
        step: Callable[[], int],
        training: Callable[[], bool],
        position: Callable[[], Position | None],
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self._target = target
        self._rank, self._attempt = rank, attempt
        self._step, self._training, self._position, self._metrics = step, training, position, metrics
        self._pace = Pace()
        self._known: tuple[int, int] | None = None
        self._finished = False
        self._stopping = threading.Event()
        self._warned: set[str] = set()
        self._latest: Progress | None = None
        self._has_last = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._sender = threading.Thread(target=self._send, name="progress-send", daemon=True)

    def start(self) -> None:
        """Starts the threads, if there is anything to report to."""
        if self._target.file is not None or self._posts:
            self._thread.start()
        if self._posts:
            self._sender.start()

    def stop(self, *, finished: bool) -> None:
        """Makes the last report and ends the threads within `END_SECS`. A second call does nothing."""
        if self._stopping.is_set() or not self._thread.is_alive():
            return
        self._finished = finished
        until = time.monotonic() + END_SECS
        self._stopping.set()
        self._thread.join(END_SECS)
        if self._sender.is_alive():
            self._sender.join(max(0.0, until - time.monotonic()))

    @property
    def _posts(self) -> bool:
        return self._target.url is not None and self._rank == 0

    def _run(self) -> None:
        ends = False
        while not ends:
            ends = self._stopping.wait(FILE_SECS)
            try:
                self._latest = self._look()
                self._write(self._latest)
            except Exception as error:  # for example a metric of an unknown kind
                self._warn("The progress of the training is not reported", error)
        self._has_last.set()

    def _send(self) -> None:
        posted = -math.inf
        ends = False
        while not ends:
            ends = self._has_last.wait(FILE_SECS)
            if self._latest is not None and (ends or time.monotonic() - posted >= POST_SECS):
                posted = time.monotonic()
                self._post(self._latest)

    def _look(self) -> Progress:
        now, step, training = time.time(), self._step(), self._training()
        pace = self._pace.look(step, now, training=training)
        self._known = done_and_left(self._position()) or self._known
        percent = remaining = None
        if self._known is not None:
            done, left = (sum(self._known), 0) if self._finished else self._known
            percent = 100 * done // max(1, done + left)
            step_secs = pace["step_secs"]
            remaining = 0 if left == 0 else None if step_secs is None else round(left * step_secs)
        return Progress(
            time=now,
            rank=self._rank,
            attempt=self._attempt,
            step=step,
            training=training,
            stepped_at=pace["stepped_at"],
            percent=percent,
            remaining_secs=remaining,
            metrics=dict(list(self._metrics().items())[:MAX_METRICS]),
        )

    def _write(self, progress: Progress) -> None:
        if self._target.file is None:
            return
        try:
            write_quickly(self._target.file, json.dumps(progress.heartbeat(), allow_nan=False))
        except OSError as error:
            self._warn("The heartbeat file cannot be written", error)

    def _post(self, progress: Progress) -> None:
        try:
            status = post(self._target, json.dumps(progress.kubeflow()).encode())
            if status >= 300:
                raise OSError(f"HTTP {status}")
        except Exception as error:  # A scheduler that does not listen must not matter to the training.
            self._warn("The progress cannot be sent to the scheduler; training goes on", error)

    def _warn(self, problem: str, error: Exception) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("%s: %s", problem, error)


def post(target: ProgressTarget, body: bytes) -> int:
    """Sends a report; follows no redirect, which would carry the token elsewhere. Returns the status."""
    parts = urlsplit(target.url or "")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=target.ca_file)
        connection = http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_SECS, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_SECS)
    headers = {"Content-Type": "application/json"}
    if target.token_file is not None:  # Read each time: Kubernetes replaces it every hour.
        token = read_small(target.token_file, max_bytes=MAX_TOKEN_BYTES).decode("ascii").strip()
        if len(token.split()) != 1:  # http.client would show it in its error.
            raise OSError(f"{target.token_file} does not hold a token")
        headers["Authorization"] = f"Bearer {token}"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("POST", path, body, headers)
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(str(error) or type(error).__name__) from error
    finally:
        connection.close()
