"""A worker that is stopped (SIGSTOP) neither ends nor answers: the others end, and the job starts again.

`tests/faults/test_frozen.py` has the same for worker 0 in the middle of the training.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replicast.config import PEER_FAILED, START_TIMEOUT
from replicast.launcher.plan import hold_ports
from tests.faults.test_frozen import SCRIPT, run_frozen
from tests.jobs import DEADLINE_SECS as HANGS_SECS


@pytest.mark.parametrize("moment", ["start", "update", "close"])
def test_the_frozen_worker_is_named_and_the_job_starts_again(tmp_path: Path, moment: str) -> None:
    code, said = run_frozen(tmp_path, (0, moment), (1, moment))
    assert code == 0, said
    for frozen in (0, 1):
        assert (tmp_path / f"frozen-{frozen}-{moment}").exists(), "the fault fired"
        assert f"worker {frozen} was stopped (SIGSTOP) and did not continue: killed" in said


def start_bare(directory: Path, rank: int, ports: tuple[int, ...], **environ: str) -> subprocess.Popen[bytes]:
    """Starts one worker without a launcher."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    (directory / "train.py").write_text(SCRIPT)
    with (directory / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=directory,
            env={**os.environ, "TF_CONFIG": json.dumps(cluster), **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.parametrize("frozen", [0, 1])
def test_without_a_launcher_every_other_worker_ends_and_names_the_frozen_one(
    tmp_path: Path, frozen: int
) -> None:
    freezes = json.dumps([[frozen, "training"]])
    with hold_ports([0] * 3) as ports:
        workers = [start_bare(tmp_path, rank, ports.numbers, FREEZES=freezes) for rank in range(3)]
        try:
            for rank in {0, 1, 2} - {frozen}:
                assert workers[rank].wait(HANGS_SECS) == PEER_FAILED, (tmp_path / f"{rank}.log").read_text()
                assert f"replicast: worker {frozen}" in (tmp_path / f"{rank}.log").read_text()
            assert (tmp_path / f"frozen-{frozen}-training").exists(), "the fault fired"
            assert workers[frozen].poll() is None
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def test_a_worker_whose_peer_never_comes_says_so_and_ends_on_sigterm(tmp_path: Path) -> None:
    with hold_ports([0] * 2) as ports:
        waiting = start_bare(tmp_path, 0, ports.numbers, FREEZES="[]")
        try:
            ends = time.monotonic() + HANGS_SECS
            while "which has not started" not in (tmp_path / "0.log").read_text():
                assert time.monotonic() < ends
                time.sleep(0.1)
            assert f"worker 1 (127.0.0.1:{ports.numbers[1]})" in (tmp_path / "0.log").read_text()
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait(HANGS_SECS) == -signal.SIGTERM
        finally:
            waiting.kill()
            waiting.wait()


def test_a_worker_whose_peer_never_comes_ends_after_the_time_limit(tmp_path: Path) -> None:
    with hold_ports([0] * 2) as ports:
        waiting = start_bare(tmp_path, 1, ports.numbers, FREEZES="[]", **{START_TIMEOUT: "1"})
        assert waiting.wait(HANGS_SECS) == 1
    assert "Not all workers started within 1 s: worker 0" in (tmp_path / "1.log").read_text()
