"""The launcher's use of the run directory: its name, its lock, its logs, and what it held before."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.config import FAULTS
from replicast.errors import LaunchRefused
from replicast.files import below
from replicast.launcher.launcher import (
    locked,
    make_attempt_dir,
    make_run_dir,
    next_attempt,
)


def test_a_chosen_run_directory_may_exist_and_must_not_be_a_file(tmp_path: Path) -> None:
    for _ in range(2):
        assert make_run_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    with pytest.raises(LaunchRefused, match="--run-dir"):
        make_run_dir(tmp_path / "file")
    with pytest.raises(LaunchRefused, match="--log-dir"):
        make_attempt_dir(below(tmp_path) / "file", 0)


def test_a_continued_run_never_overwrites_older_logs(tmp_path: Path) -> None:
    assert next_attempt(below(tmp_path), range(2)) == 0
    for attempt in range(2):
        (make_attempt_dir(below(tmp_path), attempt) / "worker-1.log").as_path().touch()
    assert next_attempt(below(tmp_path), range(2)) == 2
    assert next_attempt(below(tmp_path), range(2, 4)) == 0, "another host's workers have no logs yet"


def test_a_second_launcher_is_refused_until_the_first_has_ended_and_told_where_that_runs(
    tmp_path: Path,
) -> None:
    with locked(tmp_path, 0):
        where = f"process {os.getpid()} on {re.escape(socket.gethostname())}"
        refused = pytest.raises(LaunchRefused, match=rf"Another .*\({where}\).* choose another --run-dir")
        with refused, locked(tmp_path, 0):
            pass
        (tmp_path / "launcher-0.lock").write_text("7 on h\nreplicast: all is well\x1b[2J")
        said = pytest.raises(LaunchRefused, match=r"process 7 on h\\nreplicast: all is well\\x1b\[2J\)")
        with said, locked(tmp_path, 0):
            pass
        with locked(tmp_path, 2):
            pass
    with locked(tmp_path, 0):
        pass


def test_a_run_directory_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "launcher-0.lock").mkdir()
    refused = pytest.raises(LaunchRefused, match=r"cannot be used .*Is a directory.* with --run-dir")
    with refused, locked(tmp_path, 0):
        pass
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["run", "--run-dir", str(tmp_path), str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "cannot be used as a run directory" in result.output
    assert "Traceback" not in result.output


def test_the_lock_is_not_taken_through_a_link_or_a_pipe(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all of it")
    lock = tmp_path / "launcher-0.lock"
    lock.symlink_to(precious)
    with pytest.raises(LaunchRefused, match="cannot be used as a run directory"), locked(tmp_path, 0):
        pass
    assert precious.read_text() == "all of it"
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(LaunchRefused, match="Not a regular file"), locked(tmp_path, 0):
        pass


def test_a_full_disk_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(LaunchRefused, match="No space left on device"), locked(tmp_path, 0):
            pass
    with locked(tmp_path, 0):
        pass


def test_the_launcher_announces_planned_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, '[{"worker": 0, "point": "apply"}]')
    (tmp_path / "nothing.py").touch()
    command = ["run", "--run-dir", str(tmp_path / "run"), str(tmp_path / "nothing.py")]
    result = subprocess.run([sys.executable, "-m", "replicast", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "REPLICAST_FAULTS is set: workers will fail on purpose: kill worker 0 at apply" in result.stderr
