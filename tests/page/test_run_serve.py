"""`replicast run --serve`: the page beside the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from replicast.errors import LaunchRefused
from replicast.launcher.launcher import parse_page_address
from tests.page.live import Serving
from tests.threads import eventually

ASKS = """
import json, os, pathlib, sys, time
pathlib.Path("environ").write_text(json.dumps(dict(os.environ)))
deadline = time.monotonic() + 120
while not pathlib.Path("asked").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


def launched(directory: Path, *options: str) -> subprocess.Popen[str]:
    (directory / "script.py").write_text(ASKS)
    command = [sys.executable, "-m", "replicast", "run", "--run-dir", "run", *options, "script.py"]
    return subprocess.Popen(
        command, cwd=directory, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


TOKEN, SECRET = "a token of sixteen letters", "the secret of the launchers"


def test_no_worker_gets_the_token_or_the_secret_and_the_page_gets_its_token_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAST_TOKEN", TOKEN)
    monkeypatch.setenv("REPLICAST_JOB_SECRET", SECRET)
    with launched(tmp_path, "--serve", "0") as process:
        assert "http://127.0.0.1" in first_line(process)
        eventually((tmp_path / "environ").exists)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        kept = [Path(f"/proc/{child}/environ").read_bytes() for child in children]
        (tmp_path / "asked").touch()
        assert process.wait(30) == 0
    seen = json.loads((tmp_path / "environ").read_text())
    assert seen["REPLICAST_ATTEMPT"] == "0", "it is the environment of a worker"
    assert not {TOKEN, SECRET} & {*seen.values()}
    assert [TOKEN.encode() in each for each in kept] == [True, False], "the page, the worker"
    assert not [each for each in kept if SECRET.encode() in each]


def is_served(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/healthz", timeout=120) as answer:
            return bool(answer.read() == b"ok\n")
    except OSError:
        return False


def test_the_page_is_served_as_long_as_the_job_runs(tmp_path: Path) -> None:
    with launched(tmp_path, "--serve", "0") as process:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/", first_line(process))
        assert found is not None
        assert is_served(found[1])
        (tmp_path / "asked").touch()
        assert process.wait(120) == 0
    assert not is_served(found[1])


def test_the_page_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path, "--serve", "0") as process:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/", first_line(process))
        assert found is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(120)
    eventually(lambda: not is_served(found[1]))


def test_a_page_that_cannot_be_served_does_the_job_no_harm(tmp_path: Path) -> None:
    (tmp_path / "asked").touch()
    with Serving(tmp_path) as other:
        port = other.address.rpartition(":")[2]
        with launched(tmp_path, "--serve", port) as process:
            assert "the page is not served: " in first_line(process)
            assert process.wait(120) == 0


def test_an_address_without_a_host_is_on_this_machine() -> None:
    assert parse_page_address("8080") == ("127.0.0.1", 8080)
    assert parse_page_address("[::1]:80") == ("::1", 80)
    assert parse_page_address("0.0.0.0:80") == ("0.0.0.0", 80)
    for wrong in ("", "http", "host:", "1:99999", "9" * 4301):
        with pytest.raises(LaunchRefused, match="--serve expects"):
            parse_page_address(wrong)
