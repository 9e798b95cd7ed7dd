"""A job that is killed during a trial, or after its decision, ends with the same outcome and bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replicast.faults import Fault, Point
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.journal import committed_updates
from tests.faults.test_updates import start
from tests.jobs import finish, read_fired
from tests.pool.checks import assert_equal_on_all

TRIED = """
replicas.restore()
worse = replicast.Update(id="worse").scale("dense/kernel", -4.0).scale("optimizer/learning_rate", 0.5)
helps = replicast.Update(id="helps").scale("optimizer/learning_rate", 1.5)

class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = replicas.step
        trial = replicast.Trial(steps=6, max_increase=0.2)
        if step == 3 and rank == 1:
            replicas.propose(worse, at_step=6, trial=trial)
        if step == 15 and rank == 0:
            replicas.propose(helps, at_step=18, trial=trial)
        if step in (3, 15):
            replicas.sync()    # so that it is committed here
        if step == 9 and rank == 1 and attempt == 0 and {killed}:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [replicas.callback(save_every=5, keep=9), Act()]
model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
state = replicas.read(variable.name for variable in replicas.schema)
np.savez(f"state-{{rank}}.npz", **{{name.replace("/", "."): value for name, value in state.items()}})
"""


def states(directory: Path) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(directory / f"state-{rank}.npz")) for rank in range(2)]


def outcomes(directory: Path) -> list[tuple[str, int]]:
    found = [one.outcome for one in committed_updates(directory / "run")]
    return [(one.outcome, one.step) for one in found if one is not None]


def before(directory: Path) -> list[float | None]:
    return [one.before for one in committed_updates(directory / "run")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tried")
    code, said = finish(start(directory, TRIED.format(killed=False)))
    assert code == 0, said
    assert outcomes(directory) == [("reverted", 12), ("kept", 24)], said
    assert "the batches of the 6 steps since then are not used again" in said
    return directory


def test_a_job_that_is_killed_in_trials_decides_alike_and_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the middle of a trial; when its outcome is known and not written; when that of the second one is on
    # disk and nobody has acted.
    plan = [Fault(0, Point.DECIDE, attempt=1), Fault(0, Point.SETTLE, occurrence=2, attempt=2)]
    monkeypatch.setenv("REPLICAST_FAULTS", json.dumps([fault.to_json() for fault in plan]))
    code, said = finish(start(tmp_path, TRIED.format(killed=True), "--max-restarts", "3"))
    assert code == 0, said
    assert [fired["point"] for fired in read_fired(tmp_path / "run")] == [Point.DECIDE, Point.SETTLE], said
    assert (tmp_path / "run" / "logs" / "attempt-3").exists()
    assert outcomes(tmp_path) == outcomes(undisturbed)
    # Over steps before the restored checkpoint too. Running means that begin elsewhere round otherwise.
    assert before(tmp_path) == pytest.approx(before(undisturbed), rel=1e-4)
    assert_equal_on_all([*states(tmp_path), *states(undisturbed)])
    receipts = [one.receipts[-1] for one in committed_updates(tmp_path / "run")]
    assert [receipt.trial is not None for receipt in receipts] == [True, True]
    made = {manifest.step for manifest in CheckpointStore(tmp_path / "run").manifests()}
    assert made == {5, 12, 15, 24, 25, 30}
