"""The command `replicast serve`, and the runs that it finds."""

from __future__ import annotations

import json
import logging
import signal
import urllib.request
from pathlib import Path

import pytest

from replicast.cli import launch as command
from replicast.page.live import runs_in
from replicast.page.web_server import PageSettings
from replicast.storage.run_files import append_metrics
from tests.page.conftest import BEARER, TOKEN, Serve
from tests.page.live import Serving, served
from tests.unit.played_job import heard_of, invoke, made_run


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "first")
    with Serving(tmp_path / "runs", "--token-file", str(tmp_path / "token")) as serving:
        with urllib.request.urlopen(f"{serving.address}/api/runs", timeout=120) as answer:
            (run,) = json.load(answer)
        assert (run["name"], run["workers"]) == ("first", 2)
        assert serving.kill(signal.SIGTERM) == 0
    assert len((tmp_path / "token").read_text().strip()) > 30


def test_it_leaves_the_logging_of_its_process_alone(tmp_path: Path) -> None:
    class Handler(logging.Handler):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    handler = Handler()
    with served(runs_in(made_run(tmp_path / "first")), PageSettings(port=0, token=TOKEN)) as address:
        urllib.request.urlopen(f"{address}/healthz", timeout=120).close()
    assert not handler.closed


def test_a_directory_with_runs_and_a_run_are_told_apart(tmp_path: Path) -> None:
    first, second = made_run(tmp_path / "first"), made_run(tmp_path / "second")
    (tmp_path / "other").mkdir()
    assert sorted(runs_in(tmp_path)()) == ["first", "second"]
    assert list(runs_in(first)()) == ["first"]
    found = runs_in(tmp_path)
    assert found()["second"] is found()["second"]
    assert found()["second"].where == str(second)


def test_a_link_in_the_directory_is_not_followed(tmp_path: Path) -> None:
    elsewhere = made_run(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(elsewhere)
    assert dict(runs_in(tmp_path / "runs")()) == {}


@pytest.mark.parametrize("place", ["first", "first/logs", "first/groups", "first/metrics.jsonl"])
def test_a_served_run_that_is_replaced_by_a_link_is_not_followed_by_any_request(
    serve: Serve, tmp_path: Path, place: str
) -> None:
    for name in ("runs/first", "secret"):
        run = made_run(tmp_path / name)
        heard_of(run)
        append_metrics(run, 1, {name.replace("/", "-"): 1.0})
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
    heard_of(tmp_path / "first")
    assert list(find()) == ["first"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--private"], "--private needs a token"),
        (["--certfile", "cert.pem"], "a certificate and its key"),
    ],
)
def test_what_would_not_be_safe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.delenv("REPLICAST_TOKEN", raising=False)
    result = invoke("serve", tmp_path, *options)
    assert (result.exit_code, said in result.output) == (2, True)


def test_a_port_that_is_taken_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        result = invoke("serve", tmp_path, "--port", serving.address.rpartition(":")[2])
    assert result.exit_code == 2
    assert "--port" in result.output


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    result = invoke("serve", tmp_path)
    assert result.exit_code == 2
    assert "The page needs uvicorn" in result.output
    assert "pip install 'replicast[page]'" in result.output


def test_the_token_is_not_in_the_output(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-secret\n")
    token.chmod(0o600)
    made_run(tmp_path / "first")
    with Serving(tmp_path / "first", "--token-file", str(token)) as serving:
        request = urllib.request.Request(f"{serving.address}/api/runs")
        request.add_header("Authorization", "Bearer 0123456789abcdef-secret")
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert "secret" not in answer.read().decode()
