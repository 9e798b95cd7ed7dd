"""The command `replicast serve`, and the runs that it finds."""

from __future__ import annotations

import json
import logging
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from replicast.cli import launch as command
from replicast.client import connect
from replicast.page.live import runs_in
from replicast.storage.run_files import append_metrics
from tests.page.conftest import BEARER, Serve
from tests.page.live import Serving, served
from tests.unit.played_job import flat, made_run, output_of


def test_it_serves_until_it_is_told_to_end_and_tells_nobody_the_token(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "first")
    with Serving(tmp_path / "runs", "--token-file", str(tmp_path / "token")) as serving:
        token = (tmp_path / "token").read_text().strip()
        request = urllib.request.Request(f"{serving.address}/api/runs")
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=120) as answer:
            told = answer.read().decode()
        (run,) = json.loads(told)
        assert (run["name"], run["workers"], token in told) == ("first", 2, False)
        assert serving.kill(signal.SIGTERM) == 0
    assert len(token) > 30


def test_it_leaves_the_logging_of_its_process_alone(tmp_path: Path) -> None:
    class Handler(logging.Handler):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    handler = Handler()
    with served(connect(made_run(tmp_path / "first"))) as address:
        urllib.request.urlopen(f"{address}/healthz", timeout=120).close()
    assert not handler.closed


def test_a_directory_with_runs_and_a_run_are_told_apart(tmp_path: Path) -> None:
    first, second = made_run(tmp_path / "first"), made_run(tmp_path / "second")
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(first)  # Is not followed.
    assert sorted(runs_in(tmp_path)()) == ["first", "second"]
    assert list(runs_in(first)()) == ["first"]
    found = runs_in(tmp_path)
    assert found()["second"] is found()["second"]
    assert found()["second"].where == str(second)


@pytest.mark.parametrize("place", ["first", "first/logs", "first/groups", "first/metrics.jsonl"])
def test_a_served_run_that_is_replaced_by_a_link_is_not_followed_by_any_request(
    serve: Serve, tmp_path: Path, place: str
) -> None:
    for name in ("runs/first", "secret"):
        run = made_run(tmp_path / name)
        append_metrics(run, (1, time.time(), {name.replace("/", "-"): 1.0}))
        (run / "logs" / "attempt-0").mkdir(parents=True)
        (run / "logs" / "attempt-0" / "worker-0.log").write_text(f"a line of {name}\n")
    client = serve(find=runs_in(tmp_path / "runs"))
    paths = ["", "/status", "/metrics", "/schema", "/updates", "/logs/0"]
    for path in paths:
        assert client.get(f"/api/runs/first{path}").status_code == 200
    (tmp_path / "runs" / place).rename(tmp_path / "aside")
    (tmp_path / "runs" / place).symlink_to(tmp_path / "secret" / Path(place).relative_to("first"))
    before = sorted((tmp_path / "secret").rglob("*"))
    answers = [client.get(f"/api/runs/first{path}") for path in paths]
    answers.append(client.post("/api/runs/first/updates?id=x", content=b"x" * 100, headers=BEARER))
    assert sorted((tmp_path / "secret").rglob("*")) == before
    assert not [answer.text for answer in answers if "secret" in answer.text.replace(str(tmp_path), "")]
    if place == "first":
        assert {answer.status_code for answer in answers} == {404}


def test_a_run_whose_job_has_not_begun_appears_when_it_has(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    find = runs_in(tmp_path / "first")
    assert dict(find()) == {}
    made_run(tmp_path / "first")
    assert list(find()) == ["first"]


def test_what_would_not_be_safe_and_a_port_that_is_taken_are_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLICAST_TOKEN", raising=False)
    for options, said in {
        ("--host", "0.0.0.0"): "can be reached from other machines",
        ("--private",): "--private needs a token",
        ("--certfile", "cert.pem"): "a certificate and its key",
    }.items():
        assert said in flat(output_of(2, "serve", tmp_path, *options))
    with Serving(tmp_path) as serving:
        taken = serving.address.rpartition(":")[2]
        assert "with --port" in flat(output_of(2, "serve", tmp_path, "--port", taken))


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    said = flat(output_of(2, "serve", tmp_path))
    assert "The page needs uvicorn" in said
    assert "pip install 'replicast[page]'" in said
