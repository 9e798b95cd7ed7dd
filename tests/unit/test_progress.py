"""Progress for schedulers: the heartbeat file and the POST, without TensorFlow."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from replicast.config import ProgressTarget, progress_target
from replicast.errors import ClusterError
from replicast.replicas import progress
from replicast.replicas.position import Fit, Position
from replicast.replicas.progress import MAX_METRICS, Progress, ProgressReports
from replicast.strictjson import parse_object

SECS = 120.0
STATUS = Path(__file__).parents[1] / "long" / "schedulers" / "kubeflow_status.json"


@pytest.fixture(autouse=True)
def often_and_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report comes soon, and no wait gives up because the machine is busy."""
    for name, secs in {"FILE_SECS": 0.02, "TIMEOUT_SECS": SECS, "END_SECS": SECS}.items():
        monkeypatch.setattr(progress, name, secs)


class Scheduler:
    """A status server that keeps what it receives."""

    def __init__(self, status: int = 200) -> None:
        self.received: list[tuple[str, str | None, dict[str, Any]]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((self.path, self.headers["Authorization"], json.loads(body)))
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/status?job=1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


def reports(target: ProgressTarget, *, rank: int = 0, metrics: Any = None) -> ProgressReports:
    return ProgressReports(
        target,
        rank=rank,
        attempt=2,
        step=lambda: 30,
        training=lambda: True,
        position=lambda: Position(epoch=1, batch=10, fits=(Fit(epochs=4, batches=20),)),
        metrics=metrics or (lambda: {"loss": 0.25}),
    )


def wait(is_so: Callable[[], object]) -> None:
    ends = time.monotonic() + SECS
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_every_worker_writes_a_heartbeat_and_the_last_one_says_that_all_is_done(tmp_path: Path) -> None:
    target = progress_target({"REPLICAST_PROGRESS_FILE": str(tmp_path / "beat-{rank}.json")}, rank=3)
    beats = reports(target, rank=3)
    beats.start()
    path = tmp_path / "beat-3.json"
    wait(path.exists)
    beat = json.loads(path.read_text())
    assert (beat["rank"], beat["attempt"], beat["step"], beat["training"]) == (3, 2, 30, True)
    assert (beat["percent"], beat["metrics"]) == (37, {"loss": 0.25})
    beats.stop(finished=True)
    assert json.loads(path.read_text())["percent"] == 100


def test_worker_0_sends_what_kubeflow_expects_with_its_token(scheduler: Scheduler, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    environ = {
        "REPLICAST_PROGRESS_URL": "kubeflow",
        "KUBEFLOW_TRAINER_SERVER_URL": scheduler.url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
    }
    beats = reports(progress_target(environ, rank=0), metrics=lambda: {f"m{n}": n for n in range(200)})
    beats.start()
    wait(lambda: scheduler.received)
    path, authorization, body = scheduler.received[0]
    assert (path, authorization) == ("/status?job=1", "Bearer secret")
    status = body["trainerStatus"]
    assert status["progressPercentage"] == 37
    assert status["metrics"][:2] == [{"name": "step", "value": "30"}, {"name": "m0", "value": "0"}]
    assert len(status["metrics"]) == MAX_METRICS
    beats.stop(finished=False)
    assert scheduler.received[-1][2]["trainerStatus"]["progressPercentage"] == 37


def test_the_body_is_the_one_that_is_checked_against_the_models_of_kubeflow() -> None:
    made = Progress(
        time=1794952626.0,
        rank=0,
        attempt=1,
        step=340,
        training=True,
        stepped_at=1794952625.8,
        percent=37,
        remaining_secs=61,
        metrics={"loss": 0.25},
    )
    assert made.kubeflow() == json.loads(STATUS.read_text())


def test_other_workers_send_nothing(scheduler: Scheduler) -> None:
    beats = reports(ProgressTarget(url=scheduler.url), rank=1)
    beats.start()
    beats.stop(finished=True)
    assert not scheduler.received


def test_a_scheduler_that_refuses_redirects_or_is_gone_costs_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    redirecting = Scheduler(status=307)
    target = ProgressTarget(file=tmp_path / "missing" / "beat.json", url=redirecting.url)
    beats = reports(target)
    beats.start()
    wait(lambda: redirecting.received)
    redirecting.close()
    beats.stop(finished=True)
    assert {path for path, _, _ in redirecting.received} == {"/status?job=1"}
    assert caplog.text.count("The progress cannot be sent to the scheduler; training goes on") == 1
    assert caplog.text.count("The heartbeat file cannot be written") == 1


def test_metrics_that_cannot_be_read_cost_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def broken() -> dict[str, float]:
        raise ValueError("no number")

    beats = reports(ProgressTarget(file=tmp_path / "beat.json"), metrics=broken)
    beats.start()
    wait(lambda: "is not reported: no number" in caplog.text)
    beats.stop(finished=True)
    assert caplog.text.count("is not reported") == 1


def test_a_scheduler_that_never_finishes_its_answer_delays_no_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "beat.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        beats = reports(ProgressTarget(file=path, url=f"http://127.0.0.1:{server.getsockname()[1]}/"))
        beats.start()
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            written: set[float] = set()

            def is_written_again() -> bool:
                connection.sendall(b"X-More: please\r\n")
                if path.exists():
                    written.add(json.loads(path.read_text())["time"])
                return len(written) >= 3

            wait(is_written_again)  # while the POST is under way
    beats.stop(finished=True)


def test_a_token_file_with_something_else_in_it_is_not_shown(
    caplog: pytest.LogCaptureFixture, scheduler: Scheduler, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret-one\nsecret-two\n")
    beats = reports(ProgressTarget(url=scheduler.url, token_file=token))
    beats.start()
    wait(lambda: "cannot be sent" in caplog.text)
    beats.stop(finished=True)
    assert "secret-" not in caplog.text
    assert not scheduler.received


def test_a_loss_that_is_not_a_number_leaves_the_heartbeat_readable(tmp_path: Path) -> None:
    path = tmp_path / "beat.json"
    beats = reports(ProgressTarget(file=path), metrics=lambda: {"loss": math.nan, "accuracy": 0.5})
    beats.start()
    wait(path.exists)
    beats.stop(finished=True)
    assert parse_object(path.read_bytes())["metrics"] == {"loss": None, "accuracy": 0.5}


def test_by_default_nothing_is_reported_even_in_a_trainjob() -> None:
    assert progress_target({"KUBEFLOW_TRAINER_SERVER_URL": "https://a/b"}, rank=0) == ProgressTarget()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"REPLICAST_PROGRESS_URL": "kubeflow"}, "KUBEFLOW_TRAINER_SERVER_URL is not set"),
        ({"REPLICAST_PROGRESS_URL": "file:///etc/passwd"}, "must be an http or https address"),
        ({"REPLICAST_PROGRESS_URL": "http://[::1/"}, "must be an http or https address"),
        ({"REPLICAST_PROGRESS_URL": "http://a:b/"}, "must be an http or https address"),
    ],
)
def test_an_address_that_is_none_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        progress_target(environ, rank=0)


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ClusterError, match="without a user") as refused:
        progress_target({"REPLICAST_PROGRESS_URL": "https://me:hidden@a/b"}, rank=0)
    assert "hidden" not in str(refused.value)
