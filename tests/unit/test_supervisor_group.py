"""A group of real processes without TensorFlow: all are stopped, and stopping many takes no longer."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from replicast.launcher.group import EndTimeouts, Group, GroupEnd
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import WorkerPlan
from replicast.launcher.report import tail_box
from replicast.launcher.screen import Screen
from replicast.launcher.worker import Worker, WorkerExit
from replicast.paths import below


def run_group(directory: Path, program: str, workers: int) -> GroupEnd:
    plans = [
        WorkerPlan(rank, (sys.executable, "-c", program), {}, below(directory) / f"{rank}.log")
        for rank in range(workers)
    ]
    screen = Screen(io.StringIO(), io.StringIO(), live_rank=None, colour=False)
    with Interruptions() as interruptions:
        group = Group(
            plans, screen=screen, tee=frozenset(), timeouts=EndTimeouts(), interruptions=interruptions
        )
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
        run_group(tmp_path, "import time; time.sleep(600)", workers=3)
    assert len(started) == 3
    assert not any(Path(f"/proc/{process}").exists() for process in started)


def test_all_workers_of_a_group_are_closed_within_one_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[float] = []
    close = Worker.close

    def noted(worker: Worker, *, until: float) -> None:
        closed.append(until)
        close(worker, until=until)

    monkeypatch.setattr(Worker, "close", noted)
    end = run_group(tmp_path, "", workers=3)
    assert [ended.code for ended in end.exits] == [0, 0, 0]
    assert len(closed) == 3
    assert len(set(closed)) == 1


def test_a_line_without_an_end_does_not_fill_the_screen_when_its_worker_fails() -> None:
    failure = WorkerExit(0, 1, 1.0, below(".") / "log", tail=("x" * 65536, "the reason"))
    box = tail_box(failure, io.StringIO())
    assert "the reason" in box
    assert "x" * 20 in box
    assert len(box) < 5000


def test_the_box_counts_its_lines() -> None:
    for tail, said in ((("why",), "worker 0: the last line "), (("a", "b"), "worker 0: the last 2 lines ")):
        assert said in tail_box(WorkerExit(0, 1, 1.0, below(".") / "log", tail=tail), io.StringIO())
