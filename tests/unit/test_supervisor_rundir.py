import errno
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.config import FAULTS, PEER_FAILED
from replicast.errors import LaunchRefused
from replicast.launcher.attempts import exit_code
from replicast.launcher.group import GroupEnd, first_failure
from replicast.launcher.plan import Job, absent_workers, planned_faults
from replicast.launcher.report import (
    absent_line,
    duration,
    failure_line,
    faults_line,
    others_line,
    sigterm_line,
)
from replicast.launcher.rundir import locked, make_attempt_dir, make_run_dir, next_attempt
from replicast.launcher.states import what_is_taken_over
from replicast.launcher.worker import WorkerExit
from replicast.paths import below

NOON = datetime(2030, 1, 2, 12, 0, 5)


def ended(rank: int, code: int, *, stopped: bool = False) -> WorkerExit:
    return WorkerExit(rank=rank, code=code, ran_secs=2.04, log=below("/logs") / "x.log", stopped=stopped)


def frozen(rank: int) -> WorkerExit:
    """Stopped by a signal for so long that the others failed because of it; killed by the launcher."""
    return replace(ended(rank, -9, stopped=True), frozen=True)


def test_the_default_run_directory_names_time_and_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run_dir(None, program="train", now=NOON)
    assert made == tmp_path / "runs" / "20300102-120005-train"
    assert made.is_dir()


def test_a_chosen_run_directory_may_exist(tmp_path: Path) -> None:
    assert make_run_dir(tmp_path / "a" / "b", program="train", now=NOON) == tmp_path / "a" / "b"
    assert make_run_dir(tmp_path / "a" / "b", program="train", now=NOON) == tmp_path / "a" / "b"


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchRefused, match="--run-dir"):
        make_run_dir(tmp_path / "file", program="train", now=NOON)


def test_a_log_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
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


@pytest.mark.parametrize(
    ("exits", "blamed"),
    [
        ([ended(0, 0), ended(1, 0)], None),
        ([ended(0, 0), ended(1, 3)], 1),
        ([ended(1, 3), ended(0, 4)], 1),
        ([ended(1, PEER_FAILED), ended(0, 4)], 0),
        ([ended(1, PEER_FAILED), ended(0, -15, stopped=True)], 1),
        ([ended(1, -15, stopped=True), ended(0, 1)], 0),
        ([ended(1, PEER_FAILED), frozen(0)], 0),
        ([ended(1, 3), frozen(0)], 0),
        ([ended(1, 1), ended(2, PEER_FAILED), frozen(0)], 0),
        ([ended(1, 0), frozen(0)], 0),
    ],
)
def test_the_worker_to_blame_is_a_frozen_one_or_the_first_to_fail_by_itself(
    exits: list[WorkerExit], blamed: int | None
) -> None:
    failure = first_failure(exits)
    assert (None if failure is None else failure.rank) == blamed


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (-9, 137), (-6, 134)])
def test_the_exit_code_is_that_of_the_first_failure_as_in_a_shell(code: int, expected: int) -> None:
    exits = (ended(0, code),)
    assert exit_code(GroupEnd(exits, first_failure(exits), None)) == expected


def test_a_worker_that_could_not_be_killed_is_not_a_success() -> None:
    assert exit_code(GroupEnd((), None, None, left_behind=(1,))) == 1


def test_the_report_names_worker_cause_duration_and_log() -> None:
    failed = ended(1, -9)
    assert failure_line(failed) == (
        "replicast: worker 1 failed first: killed by SIGKILL after 2.0 s. Log: /logs/x.log"
    )
    others = (ended(3, 1), ended(2, 0), failed, ended(0, -15, stopped=True))
    assert others_line(GroupEnd(others, failed, None)) == (
        "replicast: worker 0 was stopped, worker 2 had finished, worker 3 failed after it (exit code 1)."
    )


def test_the_report_names_a_frozen_worker() -> None:
    assert failure_line(frozen(0)) == (
        "replicast: worker 0 was stopped (SIGSTOP) and did not continue: killed after 2.0 s. Log: /logs/x.log"
    )
    others = others_line(GroupEnd((frozen(0), frozen(2), ended(1, PEER_FAILED)), frozen(0), None))
    assert others == "replicast: worker 1 failed after it (exit code 75), worker 2 was stopped by SIGSTOP."


def test_the_report_repeats_what_a_worker_says_of_one_on_another_host() -> None:
    tail = (
        "Traceback (most recent call last):",
        "replicast: \x1b[31mworker 3 was lost: its connection broke (says worker 0)\x1b[0m",
        "replicast: worker 1 saved nothing",
    )
    said = failure_line(replace(ended(1, PEER_FAILED), tail=tail))
    assert said == (
        'replicast: worker 1 exited because of another worker, and says: "worker 3 was lost: its connection '
        'broke (says worker 0)", after 2.0 s. Log: /logs/x.log'
    )
    assert "which its log names" in failure_line(ended(1, PEER_FAILED))


def test_a_group_that_was_told_to_stop_is_not_reported_as_a_failure() -> None:
    first = ended(1, 143)
    assert sigterm_line(first) == (
        "replicast: the group was told to stop (SIGTERM); worker 1 exited first, with 143, after 2.0 s. "
        "Log: /logs/x.log"
    )
    assert others_line(GroupEnd((first, ended(0, 143)), first, None)) == "replicast: worker 0 exited too."


def test_planned_faults_are_announced() -> None:
    plan = [{"worker": number, "point": "apply", "action": "stop"} for number in range(7)]
    line = faults_line(planned_faults({FAULTS: json.dumps(plan)}))
    assert line == (
        "replicast: warning: REPLICAST_FAULTS is set: workers will fail on purpose: stop worker 0 at apply, "
        "stop worker 1 at apply, stop worker 2 at apply, stop worker 3 at apply, stop worker 4 at apply, "
        "2 more"
    )
    assert planned_faults({}) == ()


def test_the_launcher_announces_planned_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, '[{"worker": 0, "point": "apply"}]')
    (tmp_path / "nothing.py").touch()
    command = ["run", "--run-dir", str(tmp_path / "run"), str(tmp_path / "nothing.py")]
    result = subprocess.run([sys.executable, "-m", "replicast", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "REPLICAST_FAULTS is set: workers will fail on purpose: kill worker 0 at apply" in result.stderr


def test_a_fault_for_a_missing_worker_is_reported() -> None:
    def absent(workers: int, *planned: int) -> tuple[int, ...]:
        plan = json.dumps([{"worker": worker, "point": "apply"} for worker in planned])
        return absent_workers(Job(argv=("x",), workers=workers), {FAULTS: plan})

    assert absent_workers(Job(argv=("x",)), {}) == absent(2, 0, 1) == ()
    assert absent(2, 7, 1, 2) == (2, 7)
    assert absent_line((2, 7), 2) == (
        "replicast: warning: REPLICAST_FAULTS plans a fault for workers 2, 7, but the job has workers 0 to 1"
        ": it will not fire"
    )
    assert "for worker 1, but the job has only worker 0" in absent_line((1,), 1)


@pytest.mark.parametrize(
    ("secs", "expected"), [(0.04, "0.0 s"), (59.0, "59.0 s"), (61.2, "1 min 1 s"), (7260.0, "2 h 1 min")]
)
def test_durations_are_readable(secs: float, expected: str) -> None:
    assert duration(secs) == expected


def test_a_used_run_directory_that_cannot_be_read_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run_dir: Path) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", str(run_dir))

    (tmp_path / "groups").mkdir()
    monkeypatch.setattr("replicast.storage.inbox.waiting", broken)
    assert "a file that cannot be read ([Errno 5] Input/output error" in what_is_taken_over(tmp_path)
