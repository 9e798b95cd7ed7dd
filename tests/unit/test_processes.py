from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicast.processes import (
    commit_of,
    is_alive,
    is_on_this_host,
    this_process,
    this_start,
    without_secrets,
)


def test_a_process_is_told_from_another_that_has_its_number() -> None:
    me = this_process()
    assert is_on_this_host(me)
    assert is_alive(me) is True
    assert is_alive(me | {"started": me["started"] + 1}) is False
    assert is_alive({"pid": os.getpid()}) is None
    assert not is_on_this_host(me | {"host": "another host"})
    assert not is_on_this_host(me | {"machine": "one with the same host name"})


def test_a_process_that_has_ended_is_not_alive() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_alive({"pid": ended.pid}) is False
    assert is_alive({"pid": ended.pid, "started": 1}) is False


def test_what_is_no_number_of_a_process_is_not_alive() -> None:
    for pid in (None, "1", True, 0, -1, 2**70):
        assert not is_alive({"pid": pid, "started": 1})


def test_how_a_script_was_started_has_its_arguments_and_versions_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = "train.py --lr 0.1 --api-key abc --token=abc wandb.password=abc s3://me:abc@host/x -v --token -v"
    monkeypatch.setattr(sys, "argv", given.split())
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    this_start.cache_clear()
    start = this_start()
    this_start.cache_clear()
    assert "abc" not in str(start)
    told = "train.py --lr 0.1 --api-key … --token=… wandb.password=… s3://…@host/x -v --token -v"
    assert start["command"] == tuple(told.split())
    assert start["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(without_secrets(["--tokenizer", "bpe", "--keys", "3"])) == [
        "--tokenizer",
        "bpe",
        "--keys",
        "3",
    ]


def test_the_commit_of_a_script_says_whether_files_were_changed(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        who = "-c", "user.name=a", "-c", "user.email=a@b"
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *command], check=True, capture_output=True, text=True
        ).stdout

    assert commit_of(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD").strip()
    assert commit_of(tmp_path) == head
    (tmp_path / "train.py").write_text("2")
    assert commit_of(tmp_path) == f"{head}-dirty"
    assert commit_of(tmp_path / "missing") == ""
