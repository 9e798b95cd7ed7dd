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
from replicast.launcher.failure import GroupEnd, first_cause
from replicast.launcher.launcher import FrozenWorkers, Group, WorkerProcess
from replicast.launcher.plan import EndTimeouts, JobPlan, WorkerPlan
from replicast.launcher.screen import Interruptions, Screen


def run_group(
    directory: Path, *programs: str, frozen_secs: float = 10.0, out: io.StringIO | None = None
) -> GroupEnd:
    plans = [
        WorkerPlan(rank, (sys.executable, "-c", program), {}, below(directory) / f"{rank}.log")
        for rank, program in enumerate(programs)
    ]
    screen = Screen(out or io.StringIO(), io.StringIO(), live_rank=None, colour=False)
    timeouts = EndTimeouts(frozen_secs=frozen_secs, stop_failed_secs=0.1, settle_killed_secs=0.1)
    with Interruptions() as interruptions:
        job = JobPlan(argv=(), tee=frozenset({0}), timeouts=timeouts)
        return Group(plans, job, screen, interruptions).run(os.environ)


@pytest.mark.parametrize("level", ["", "0"])
def test_informational_messages_of_tensorflow_are_shown_if_the_log_level_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    out, line = io.StringIO(), "I0000 00:00:1794906713.890587    6554 cpu_feature_guard.cc:227] AVX2"
    run_group(tmp_path, f"print({line!r})", out=out)
    assert out.getvalue() == (f"[worker 0] {line}\n" if level else "")


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


@pytest.mark.parametrize(
    ("looks", "at_least_secs", "at", "expected"),
    [
        pytest.param(
            [([1], 100), ([1, 2], 104)], 5, 106, {1}, id="from the first look that finds it stopped"
        ),
        pytest.param([([1], 100), ([1, 2], 104)], 0, 106, {1, 2}, id="any time"),
        pytest.param([([1], 100), ([], 109), ([1], 110)], 5, 111, set(), id="it went on in between"),
        # Worker 1 is continued a moment before worker 0.
        pytest.param([([0, 1, 2], 100), ([0], 200)], 5, 201, set(), id="the whole job was paused"),
        # Worker 0, worker 1 and the launcher are suspended, and continued: the launcher first, worker 0 last.
        pytest.param([([0], 100), ([0], 3700)], 5, 3704, set(), id="the launcher was stopped too"),
        pytest.param([([0], 100), ([0], 3700), ([0], 3704)], 5, 3706, {0}, id="it stays frozen after that"),
    ],
)
def test_for_how_long_a_worker_has_been_frozen(
    looks: list[tuple[list[int], float]], at_least_secs: float, at: float, expected: set[int]
) -> None:
    workers = FrozenWorkers()
    for frozen, now in looks:
        workers.update(frozen, 3, now)
    assert workers.for_at_least(at_least_secs, at) == expected


def test_a_job_of_one_worker_may_be_paused() -> None:
    workers = FrozenWorkers()
    workers.update([0], 1, now=300.0)
    assert workers.for_at_least(0.0, now=300.0) == set()


@pytest.mark.parametrize(("code", "blamed"), [(PEER_FAILED, (0, -9)), (4, (1, 4))])
def test_a_worker_that_fails_by_itself_is_named_and_not_one_that_fails_because_of_a_frozen_one(
    tmp_path: Path, code: int, blamed: tuple[int, int]
) -> None:
    freezes = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); " + FREEZES
    fails = f"""
import pathlib, sys, time
noted = pathlib.Path({str(tmp_path)!r}) / "pid"
while not noted.exists() or not noted.read_text(): time.sleep(0.01)
while ") T" not in pathlib.Path(f"/proc/{{noted.read_text()}}/stat").read_text(): time.sleep(0.01)
sys.exit({code})
"""
    failure = first_cause(run_group(tmp_path, freezes, fails, frozen_secs=3600.0).exits)
    assert failure is not None
    assert (failure.worker, failure.code) == blamed
