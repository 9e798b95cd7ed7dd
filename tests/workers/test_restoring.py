"""A checkpoint whose bytes were changed is refused by every worker, and no state changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicast.checkpoint import CheckpointStore
from replicast.errors import CheckpointError
from tests.pool import Pool
from tests.workers.recipes import perceptron
from tests.workers.test_checkpoints import digests, scramble
from tests.workers.test_updates import adam, replicas_of


def damaged(strategy: Any, run_dir: Path) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.save().result(60)
        if strategy.rank == 0:
            state = CheckpointStore(run_dir).path(0) / "state.safetensors"
            content = bytearray(state.read_bytes())
            content[-3] ^= 1
            state.write_bytes(content)
        scramble(replicas)
        before = digests(replicas)
        with pytest.raises(CheckpointError) as refused:
            replicas.restore()
        return {"said": str(refused.value), "changed": before != digests(replicas)}


@pytest.mark.parametrize("seen_by", ["all workers", "worker 0"])
def test_one_flipped_bit_in_a_checkpoint_is_refused_by_all(pool3: Pool, tmp_path: Path, seen_by: str) -> None:
    (tmp_path / "a file").touch()
    elsewhere = tmp_path / "run" if seen_by == "all workers" else tmp_path / "a file" / "run"
    results = pool3.run_each(damaged, [(tmp_path / "run",), (elsewhere,), (elsewhere,)])
    for result in results:
        assert "written" in result["said"]
        assert not result["changed"]
