"""A checkpoint lists the updates that it contains and the pending ones, so that a restart omits none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from replicast.core.entries import Saved
from replicast.core.records import Pending, Proposal
from replicast.storage.checkpoints import CheckpointStore, saved_of
from replicast.storage.claims import Fence
from replicast.update.trial import Trial
from tests.unit.checkpoint.samples import draft_of, state_of


def pending_of(id_: str, *tickets: str, at_step: int | None = None, trial: Trial | None = None) -> Pending:
    proposal = Proposal(id_, "d" * 32, (id_, "d" * 32), at_step, trial, author="me", note="why")
    return Pending(proposal, tickets)


def test_what_the_core_has_saved_is_read_back_as_it_was(tmp_path: Path) -> None:
    pending = (pending_of("a", "0-1"), pending_of("b", "1-1", "in", at_step=70, trial=Trial(5, "acc", 0.1)))
    for step, holds in enumerate(
        [frozenset[int](), frozenset({1}), frozenset({2, 3}), frozenset({1, 2, 5, 7})], start=10
    ):
        saved = Saved(step, 1, holds, pending, state=step)
        store, arrays = CheckpointStore(tmp_path), state_of()
        store.write(draft_of(arrays, step).with_updates(saved), arrays.items())
        assert saved_of(store.manifest(step)) == saved


def test_many_updates_take_little_room(tmp_path: Path) -> None:
    saved = Saved(5, 0, frozenset(range(1, 100_001)) - {77}, (), None)
    draft = draft_of(state_of(), 5).with_updates(saved)
    assert (draft.sequence, draft.missing) == (100_000, (77,))
    assert len(json.dumps(draft.to_json())) < 3000


def test_what_a_checkpoint_says_is_json(tmp_path: Path) -> None:
    store, arrays = CheckpointStore(tmp_path), state_of()
    saved = Saved(5, 1, frozenset({1, 3}), (pending_of("a", "0-1", trial=Trial(5)),), state=5)
    manifest = store.write(draft_of(arrays, 5).with_updates(saved), arrays.items())
    assert json.loads(json.dumps(manifest.to_json())) == manifest.to_json()


def test_a_checkpoint_with_other_pending_updates_is_another_one(tmp_path: Path) -> None:
    store, arrays = CheckpointStore(tmp_path), state_of()
    for pending in ((), (pending_of("a", "0-1"),), (pending_of("a", "0-1", "0-2"),)):
        saved = Saved(5, 1, frozenset({1}), pending, state=5)
        store.write(draft_of(arrays, 5).with_updates(saved), arrays.items())
        assert saved_of(store.manifest(5)) == saved


def test_a_copy_of_another_runs_checkpoint_contains_none_of_this_runs_updates(tmp_path: Path) -> None:
    here, there = Fence(tmp_path / "here", attempt=0), Fence(tmp_path / "there", attempt=0)
    saved = Saved(5, 1, frozenset({1, 2}), (pending_of("a", "0-1"),), state=5)
    arrays = state_of()
    written = CheckpointStore(tmp_path / "there", there).write(
        draft_of(arrays, 5).with_updates(saved), arrays.items()
    )
    (tmp_path / "here" / "checkpoints").mkdir()
    shutil.copytree(tmp_path / "there/checkpoints/00000005-1", tmp_path / "here/checkpoints/00000005")
    for store in (CheckpointStore(tmp_path / "here", here), CheckpointStore(tmp_path / "here")):
        assert saved_of(store.manifest(5)) == Saved(5, 1, frozenset(), (), state=5)
        assert store.manifest(5).state_digest == written.state_digest
    # Every later start of the run that wrote it knows it as its own.
    again = CheckpointStore(tmp_path / "there", Fence(tmp_path / "there", attempt=1))
    assert saved_of(again.manifest(5)) == saved
