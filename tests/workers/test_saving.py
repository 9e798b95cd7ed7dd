"""A checkpoint is there only when what was proposed before it is in the journal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from replicast.replicas.witnessing import Witnesses

import replicast
from replicast.checkpoint import CheckpointStore
from replicast.storage.updates import committed_updates
from tests.pool import Pool
from tests.workers.recipes import perceptron
from tests.workers.test_updates import adam, replicas_of

SLOW_SECS = 1.0


def saved_beside_a_proposal(strategy: Any, run_dir: Path, proposing: int) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    stage, overtaken = Journal.stage, []

    def slow_stage(self: Journal, update: replicast.Update) -> Any:
        """A slow disk: long enough for a checkpoint that does not wait."""
        ends = time.monotonic() + SLOW_SECS
        while time.monotonic() < ends:
            overtaken.extend(manifest.step for manifest in CheckpointStore(run_dir).list())
            time.sleep(0.01)
        return stage(self, update)

    with (
        mock.patch.object(Journal, "stage", slow_stage),
        replicas_of(model, run_dir=run_dir, durability="disk") as replicas,
    ):
        replicas.training_begins()
        replicas.boundary()
        if strategy.rank == proposing:
            name = next(iter(replicas.schema)).name
            change = np.ones(replicas.schema.resolve(name).shape, np.float32)
            replicas.propose(replicast.Update(id="mine").add(name, change))
        saving = replicas.recovery.save()
        saving.result(60)
        committed = [record.id for record in committed_updates(run_dir)] if strategy.rank == 0 else []
        replicas.training_ends()
    return {"overtaken": overtaken, "committed": committed}


def test_a_checkpoint_waits_until_what_was_proposed_before_it_is_committed(
    pool2: Pool, tmp_path: Path
) -> None:
    for proposing in (0, 1):
        first, _ = pool2.run(saved_beside_a_proposal, tmp_path / f"run-{proposing}", proposing)
        assert first["overtaken"] == []
        assert first["committed"] == ["mine"]


@pytest.mark.parametrize(("policy", "follows"), [("heal", "An audit follows"), ("raise", "replicas.sync")])
def test_a_checkpoint_that_is_not_made_says_what_follows_by_the_policy(policy: str, follows: str) -> None:
    member = mock.Mock(**{"examiner.declared": frozenset(), "examiner.policy": policy})
    said = [{"step": 5, "digests": {"bias": "other"}}]
    with pytest.raises(replicast.ReplicasDiverged, match="The state is not saved: at step 5") as caught:
        Witnesses(member, mock.Mock()).check(said, 5, {"bias": "mine"})
    assert follows in str(caught.value)
    assert ("sync" in str(caught.value)) == (policy == "raise")
