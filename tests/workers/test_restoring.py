"""A damaged checkpoint is refused by every worker; all use the same other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicast.errors import CheckpointError
from replicast.replicas import restoring
from replicast.storage.checkpoint import CheckpointStore
from tests.pool import Pool
from tests.workers.changing import scramble
from tests.workers.recipes import perceptron
from tests.workers.test_updates import adam, replicas_of


def flip(run_dir: Path, step: int, strategy: Any) -> None:
    if strategy.rank == 0:
        state = CheckpointStore(run_dir).path(step) / "state.safetensors"
        content = bytearray(state.read_bytes())
        content[-3] ^= 1
        state.write_bytes(content)


def damaged(strategy: Any, run_dir: Path) -> dict[str, Any]:
    """Two checkpoints, of which first the last is damaged, then both."""
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.save().result(60)
        saved = replicas.digests()
        replicas.boundary()
        replicas.save().result(60)
        with pytest.raises(CheckpointError, match=r"restore\(\) must be called before training"):
            replicas.restore()
    with replicas_of(model, run_dir=run_dir) as replicas, mock.patch.object(restoring, "logger") as logger:
        flip(run_dir, 1, strategy)
        scramble(model, strategy.rank)
        before = replicas.digests()
        said = []
        with pytest.raises(CheckpointError) as refused:
            replicas.restore(step=1)
        said.append(str(refused.value))
        assert replicas.digests() == before
        restored = replicas.restore()
        fell_back = restored.step == replicas.step == 0 and replicas.digests() == saved
        warned = [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]
        flip(run_dir, 0, strategy)
        scramble(model, strategy.rank)
        before = replicas.digests()
        with pytest.raises(CheckpointError) as refused:
            replicas.restore()
        said.append(str(refused.value))
        return {
            "said": said,
            "changed": before != replicas.digests(),
            "fell back": fell_back,
            "warned": warned,
        }


@pytest.mark.parametrize("seen_by", ["all workers", "worker 0"])
def test_one_flipped_bit_is_found_by_all_who_go_back_to_a_whole_checkpoint_together(
    pool3: Pool, tmp_path: Path, seen_by: str
) -> None:
    (tmp_path / "a file").touch()
    elsewhere = tmp_path / "run" if seen_by == "all workers" else tmp_path / "a file" / "run"
    results = pool3.run_each(damaged, [(tmp_path / "run",), (elsewhere,), (elsewhere,)])
    for result in results:
        asked_for, none_is_whole = result["said"]
        assert "not those that were written" in asked_for
        assert asked_for.endswith("restore(step=0) is intact.")
        assert "No checkpoint is intact" in none_is_whole
        assert not result["changed"]
        assert result["fell back"]
    (warning,), *others = (result["warned"] for result in results)
    assert warning.startswith("THE CHECKPOINT OF STEP 1 IS DAMAGED; step 0 is restored instead. ")
    assert others == [[], []]


def restored_for_a_custom_loop(strategy: Any, run_dir: Path) -> Any:
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.training_begins()
        replicas.boundary()
        replicas.save().result(60)
    with replicas_of(model, run_dir=run_dir) as replicas:
        assert replicas.restore().step == 1
        replicas.boundary()
    return strategy.take_start(model)


def test_a_restored_custom_loop_leaves_no_position_for_a_later_fit_of_something_else(
    pool1: Pool, tmp_path: Path
) -> None:
    assert pool1.run(restored_for_a_custom_loop, tmp_path) == [None]
