"""A failure is told by the user's exception, whatever was printed after it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from replicast.config import PEER_FAILED
from replicast.launcher.failure import exception_in, traceback_in
from replicast.launcher.group import GroupEnd
from replicast.launcher.report import failure_line, interruption_line, restart_line
from replicast.launcher.worker import WorkerExit
from replicast.paths import below

RAISED = """Epoch 1/3
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    model.fit(x, y)
  File "train.py", line 4, in loss
    raise ValueError("bad loss")
ValueError: bad loss
2026-11-17 10:00:00.1 I external/local_xla/xla/tsl/x.cc:42] Shutting down
W0000 00:00:1 coordination: task was lost
"""


def test_the_exception_is_found_before_noise(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(RAISED)
    found = traceback_in(below(tmp_path) / log.name)
    assert found[0].startswith("Traceback")
    assert found[-1] == exception_in(found) == "ValueError: bad loss"


def test_a_long_traceback_is_cut_in_its_middle(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    frames = "".join(f'  File "deep.py", line {n}, in f\n    f()\n' for n in range(100))
    log.write_text(f"Traceback (most recent call last):\n{frames}RuntimeError: deep\n")
    found = traceback_in(below(tmp_path) / log.name)
    assert len(found) == 20
    assert "183 lines: see the log" in found[1]
    assert found[-1] == "RuntimeError: deep"


def test_no_exception_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("Epoch 1/3\nall is well\n")
    assert traceback_in(below(tmp_path) / log.name) == []
    assert exception_in([]) == ""
    assert traceback_in(below(tmp_path) / "missing.log") == []


def test_a_restart_names_the_worker_that_was_lost_not_the_one_that_says_so() -> None:
    said = "replicast: worker 1 was lost: it sent no heartbeats. Look for the first error (says worker 0)"
    witness = WorkerExit(
        rank=0, code=PEER_FAILED, ran_secs=40.0, log=below(".") / "log", tail=("Epoch 1", said)
    )
    for failure, why in {
        witness: "worker 1 was lost, as worker 0 says",
        replace(witness, host="gpu0"): "worker 1 was lost, as worker 0 on gpu0 says",
        replace(witness, tail=()): "worker 0 failed (exit code 75)",
        replace(witness, code=-9): "worker 0 failed (killed by SIGKILL)",
        replace(witness, host="gpu1", lost="nothing was heard of it"): "host gpu1 was lost",
        replace(witness, host="host 1", lost="it did not come"): "host 1 was lost",
    }.items():
        end = GroupEnd(exits=(), first_failure=failure, interrupted_by=None)
        assert restart_line(end, 1, 3) == f"replicast: restart 1 of 3 because {why}; 2 left after it"


def test_a_stopped_launcher_does_not_say_that_the_workers_of_unreached_hosts_have_exited() -> None:
    end = GroupEnd(exits=(), first_failure=None, interrupted_by=signal.SIGINT)
    known = "replicast: stopped by Ctrl-C; all workers have exited"
    assert interruption_line(signal.SIGINT, end) == known
    assert interruption_line(signal.SIGINT, end, "", ("gpu1", "gpu2")) == (
        "replicast: stopped by Ctrl-C; the workers on this host have exited; "
        "nothing is known of those on gpu1, gpu2"
    )


def test_who_says_that_a_host_was_lost_stands_before_what_it_says() -> None:
    lost = WorkerExit(
        rank=1, code=PEER_FAILED, ran_secs=0, log=below("."), tail=(), host="b", lost="Why?", said_by="a"
    )
    assert failure_line(lost) == "replicast: host b was lost, says the launcher of a: Why?"
