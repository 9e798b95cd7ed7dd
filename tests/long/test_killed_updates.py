"""A job with updates of every kind, one worker killed: same order in the journal, same bits at the end.

`tests/faults/test_points.py` has such a job too, killed elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replicast.storage.journal import committed_updates
from tests.faults.test_updates import finish, start
from tests.pool.checks import assert_equal_on_all

CORRECTED = """
def doubled(values):
    return {{"dense/kernel": values["dense/kernel"] * 2}}

def act(step):
    if step == 3 and rank == 1:
        replicas.propose(replicast.Update(note="first").add("dense_1/bias", np.full(1, 5, "float32")))
        replicas.propose(replicast.Update(note="second").scale("dense/kernel", -0.5))
        scheduled = replicast.Update(reset_slots=True).scale("dense/kernel", 0.9)
        replicas.propose(scheduled.scale("optimizer/learning_rate", 0.5), at_step=9)
    if step == 5 and rank == 0:
        replicas.propose(doubled)
    if step == 20 and rank == 1:
        replicas.propose(replicast.Update(note="after the crash").add("dense/bias", np.ones(4, "float32")))
    if step in (3, 5, 20):
        replicas.sync()  # so that it is at this very step in every attempt
    if step == 14 and rank == {killed} and attempt == 0:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

fit(act)
np.savez(f"state-{{rank}}.npz", **{{v.path.replace("/", "."): v.numpy() for v in model.variables}},
         **{{f"optimizer.{{v.path}}".replace("/", "."): v.numpy() for v in model.optimizer.variables}})
"""


def states(directory: Path) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(directory / f"state-{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    code, said = finish(start(directory, CORRECTED.format(killed=-1)))
    assert code == 0, said
    return directory


@pytest.mark.parametrize("killed", [0, 1])
def test_a_job_that_was_killed_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, killed: int, undisturbed: Path
) -> None:
    code, said = finish(start(tmp_path, CORRECTED.format(killed=killed), "--max-restarts", "1"))
    assert code == 0, said
    assert (tmp_path / "killed").exists(), "nobody was killed"
    assert (tmp_path / "run" / "logs" / "attempt-1").is_dir()
    assert_equal_on_all([*states(undisturbed), *states(tmp_path)])
    orders = [
        [(record.sequence, record.id, record.step) for record in committed_updates(directory / "run")]
        for directory in (undisturbed, tmp_path)
    ]
    assert orders[0] == orders[1]
    assert [record[1:] for record in orders[0]] == [
        ("worker-1-step-3-1", 3),
        ("worker-1-step-3-2", 3),
        ("function-0-step-5-1", 5),
        ("worker-1-step-3-3", 9),
        ("worker-1-step-20-1", 20),
    ]
    assert not list((tmp_path / "shm").iterdir()), "the killed job's memory is still there"


LAST_WORD = """
replicas.restore()

class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if replicas.step == 4 and rank == 1:
            ends = time.monotonic() + 2  # a checkpoint that waits for nothing is there by then
            while not [*Path("run/checkpoints").glob("00000004*")] and time.monotonic() < ends:
                time.sleep(0.01)
            replicas.propose(replicast.Update(note="my last word").scale("dense/kernel", 0.5), at_step=9)

callbacks = [replicas.callback(save_every=4), Act()]
model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
"""


def test_what_a_worker_proposes_at_a_step_with_a_checkpoint_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAST_FAULTS", '[{"worker": 1, "point": "propose", "action": "kill"}]')
    code, said = finish(start(tmp_path, LAST_WORD, "--max-restarts", "1"))
    assert code == 0, said
    assert (tmp_path / "run" / "faults.jsonl").exists(), "nobody died"
    assert [(each.note, each.step) for each in committed_updates(tmp_path / "run")] == [("my last word", 9)]
