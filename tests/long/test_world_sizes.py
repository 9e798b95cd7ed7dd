"""The same run directory with another number of workers: it continues from the same state."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replicast.storage import inbox
from replicast.storage.journal import committed_updates
from replicast.update.update import Update
from tests.threads import eventually

SCRIPT = Path(__file__).parents[1] / "hosts" / "launched.py"
DEADLINE_SECS = 240.0


def command(workers: int, run_dir: Path, notes: Path) -> list[str]:
    run = [sys.executable, "-m", "replicast", "run", "-n", str(workers), "--run-dir", str(run_dir)]
    return [*run, str(SCRIPT), str(notes)]


def finished(workers: int, run_dir: Path, notes: Path) -> dict[str, np.ndarray]:
    """Runs a job to its end; its final values, which all workers must have."""
    notes.mkdir(exist_ok=True)
    done = subprocess.run(
        command(workers, run_dir, notes), capture_output=True, text=True, timeout=DEADLINE_SECS
    )
    assert done.returncode == 0, done.stderr
    finals = {(notes / f"final-{rank}").read_text() for rank in range(workers)}
    assert len(finals) == 1, finals
    with np.load(notes / "values-0.npz") as values:
        return dict(values)


@pytest.fixture(scope="module", name="killed")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that was killed at step 50, and to which an update was sent afterwards.

    Its last checkpoint is of step 40 and holds the update of step 30. The journal has an update of step 44,
    and one that is scheduled for step 70; the inbox has one for step 90.
    """
    notes = tmp_path_factory.mktemp("killed")
    (notes / "hold-0").touch()
    run = notes / "run"
    with subprocess.Popen(command(2, run, notes), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
        try:
            eventually(lambda: all((notes / f"pid-0-{rank}").exists() for rank in range(2)))
            eventually(lambda: any(run.glob("checkpoints/00000040-*/manifest.json")))
            os.kill(int((notes / "pid-0-1").read_text()), signal.SIGKILL)
            job.communicate(timeout=DEADLINE_SECS)
        finally:
            job.kill()
    assert job.returncode == 128 + signal.SIGKILL
    inbox.submit(run, Update(id="outside", note="outside").scale("dense/bias", 0.5), at_step=90)
    return run


@pytest.fixture(scope="module", name="expected")
def as_before(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The final values if as many workers as before continue."""
    notes = tmp_path_factory.mktemp("same")
    shutil.copytree(killed, notes / "run")
    return finished(2, notes / "run", notes)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_continues_with_fewer_or_more_workers_from_the_same_state(
    workers: int, killed: Path, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    values = finished(workers, tmp_path / "run", tmp_path)
    assert (tmp_path / "final-0").read_text().startswith("from 40 to 120 in attempt 1")
    updates = committed_updates(tmp_path / "run")
    assert [(update.note, update.step) for update in updates] == [
        ("now", 30),
        ("replayed", 44),
        ("later", 70),
        ("outside", 90),
    ]
    assert values.keys() == expected.keys()
    for path, value in values.items():  # The rows of each step are the same: only the rounding differs.
        np.testing.assert_allclose(value, expected[path], rtol=1e-3, atol=1e-5, err_msg=path)
