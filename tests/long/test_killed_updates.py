"""What a worker proposes at the step of a checkpoint outlives a kill in that moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicast.storage.journal import committed_updates
from tests.faults.test_updates import start
from tests.jobs import finish

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
