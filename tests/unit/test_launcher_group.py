"""A group of real processes without TensorFlow: all are stopped, frozen ones are found and named."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from replicast.config import PEER_FAILED
from replicast.files import below
from replicast.launcher.failure import GroupEnd
from replicast.launcher.group import EndTimeouts, FrozenWorkers, Group, WorkerProcess
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import WorkerPlan
from replicast.launcher.screen import Screen


def run_group(directory: Path, *programs: str, frozen_secs: float = 10.0) -> GroupEnd:
    plans = [
        WorkerPlan(rank, (sys.executable, "-c", program), {}, below(directory) / f"{rank}.log")
        for rank, program in enumerate(programs)
    ]
    screen = Screen(io.StringIO(), io.StringIO(), live_rank=None, colour=False)
    timeouts = EndTimeouts(frozen_secs=frozen_secs, stop_failed_secs=0.1, settle_killed_secs=0.1)
    with Interruptions() as interruptions:
        group = Group(plans, screen=screen, tee=frozenset(), timeouts=timeouts, interruptions=interruptions)
        return group.run(os.environ)


def test_a_worker_that_cannot_be_watched_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = os.pidfd_open
    started: list[int] = []

    def limited(process: int) -> int:
        started.append(process)
        if len(started) == 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return watched(process)

    monkeypatch.setattr(os, "pidfd_open", limited)
    with pytest.raises(OSError, match="Too many open files"):
        run_group(tmp_path, *["import time; time.sleep(600)"] * 3)
    assert len(started) == 3
    assert not any(Path(f"/proc/{process}").exists() for process in started)


def test_all_workers_of_a_group_are_closed_within_one_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[float] = []
    close = WorkerProcess.close

    def noted(worker: WorkerProcess, *, until: float) -> None:
        closed.append(until)
        close(worker, until=until)

    monkeypatch.setattr(WorkerProcess, "close", noted)
    end = run_group(tmp_path, "", "", "")
    assert [ended.code for ended in end.exits] == [0, 0, 0]
    assert len(closed) == 3
    assert len(set(closed)) == 1


FREEZES = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
WAITS_FOR_EVER = "import time; time.sleep(3600)"


def test_a_worker_is_frozen_from_the_first_look_that_finds_it_stopped() -> None:
    workers = FrozenWorkers()
    workers.update([1], 3, now=100.0)
    workers.update([1, 2], 3, now=104.0)
    assert workers.for_at_least(5.0, now=106.0) == {1}
    assert workers.for_at_least(0.0, now=106.0) == {1, 2}


def test_a_worker_that_continues_is_not_frozen() -> None:
    workers = FrozenWorkers()
    workers.update([1], 2, now=100.0)
    workers.update([], 2, now=109.0)
    workers.update([1], 2, now=110.0)
    assert workers.for_at_least(5.0, now=111.0) == set()


def test_a_job_that_is_stopped_as_a_whole_is_paused() -> None:
    workers = FrozenWorkers()
    workers.update([0, 1], 2, now=100.0)
    workers.update([0], 2, now=200.0)  # worker 1 is continued a moment before worker 0
    assert workers.for_at_least(5.0, now=201.0) == set()
    workers.update([0], 1, now=300.0)
    assert workers.for_at_least(0.0, now=300.0) == set(), "a job of one worker"


def test_time_in_which_the_launcher_was_stopped_too_does_not_count() -> None:
    workers = FrozenWorkers()
    workers.update([0], 2, now=100.0)  # the whole job is being suspended: worker 0, worker 1, the launcher
    workers.update([0], 2, now=3700.0)  # it is being continued: the launcher, worker 1, worker 0
    assert workers.for_at_least(5.0, now=3704.0) == set()
    workers.update([0], 2, now=3704.0)
    assert workers.for_at_least(5.0, now=3706.0) == {0}, "it stays frozen"


def test_a_frozen_worker_is_killed_and_named_and_the_others_are_ended(tmp_path: Path) -> None:
    end = run_group(tmp_path, WAITS_FOR_EVER, FREEZES, frozen_secs=0.1)
    assert end.first_failure is not None
    assert (end.first_failure.worker, end.first_failure.frozen) == (1, True)
    assert {ended.worker: ended.stopped for ended in end.exits} == {0: True, 1: True}


def wait_until_frozen(directory: Path) -> str:
    """The start of a program that goes on once the worker that wrote its pid there is frozen."""
    return f"""
import pathlib, sys, time
noted = pathlib.Path({str(directory)!r}) / "pid"
while not noted.exists() or not noted.read_text(): time.sleep(0.01)
while ") T" not in pathlib.Path(f"/proc/{{noted.read_text()}}/stat").read_text(): time.sleep(0.01)
"""


def test_a_worker_that_fails_because_of_a_frozen_one_is_not_named(tmp_path: Path) -> None:
    notes = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
    fails = wait_until_frozen(tmp_path) + f"sys.exit({PEER_FAILED})"
    end = run_group(tmp_path, notes + FREEZES, fails, frozen_secs=3600.0)
    assert end.first_failure is not None
    assert end.first_failure.worker == 0


def test_a_worker_that_fails_by_itself_is_named_although_another_was_just_stopped(tmp_path: Path) -> None:
    notes = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
    end = run_group(
        tmp_path, notes + FREEZES, wait_until_frozen(tmp_path) + "sys.exit(4)", frozen_secs=3600.0
    )
    assert end.first_failure is not None
    assert (end.first_failure.worker, end.first_failure.code) == (1, 4)
