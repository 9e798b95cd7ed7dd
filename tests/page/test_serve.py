"""The command `replicast serve`, and the runs that it finds."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from replicast.cli import serve as command
from replicast.page.runs import runs_in
from tests.page.live import Serving
from tests.unit.played_job import heard_of, invoke, made_run


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "first")
    with Serving(tmp_path / "runs", "--token-file", str(tmp_path / "token")) as serving:
        with urllib.request.urlopen(f"{serving.address}/api/runs", timeout=20) as answer:
            (run,) = json.load(answer)
        assert (run["name"], run["workers"]) == ("first", 2)
        assert serving.kill(signal.SIGTERM) == 0
    assert len((tmp_path / "token").read_text().strip()) > 30


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
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert "secret" not in answer.read().decode()
