"""The checkpoints of a run: written, read, listed, pruned; damaged ones; which of them is the last."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from replicast.codec import sealed_json, unsealed
from replicast.core.entries import Pending, Proposal, Saved
from replicast.errors import CheckpointError, FileDamaged
from replicast.storage.checkpoints import (
    CheckpointStore,
    Manifest,
    choose,
    open_checkpoint,
    saved_of,
)
from replicast.storage.claims import Fence
from replicast.update.digest import digest_array, digest_state
from replicast.update.trial import Trial
from tests.unit.checkpoint.samples import assert_holds, draft_of, flip, state_of, written


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def test_what_is_written_is_read_back_to_the_last_bit(store: CheckpointStore) -> None:
    arrays = state_of()
    manifest = store.write(draft_of(arrays), arrays)
    assert_holds(store, 1200, arrays)
    assert manifest.digests == {name: digest_array(array) for name, array in arrays.items()}
    assert manifest.state_digest == digest_state(arrays)
    assert store.manifest(1200) == manifest
    assert store.manifests() == [manifest]
    assert store.problems() == []


def test_the_order_in_which_variables_come_changes_no_byte(store: CheckpointStore, tmp_path: Path) -> None:
    arrays = state_of()
    other = CheckpointStore(tmp_path / "other")
    store.write(draft_of(arrays), arrays)
    other.write(draft_of(arrays), dict(reversed(arrays.items())))
    for name in ("state.safetensors", "manifest.json"):
        assert (store.path(1200).as_path() / name).read_bytes() == (
            other.path(1200).as_path() / name
        ).read_bytes()


def test_another_tool_can_read_the_state(store: CheckpointStore) -> None:
    arrays = state_of()
    del arrays["table"]  # The numpy reader of safetensors needs ml_dtypes for it, and does not look.
    store.write(draft_of(arrays), arrays)
    found = safetensors.numpy.load_file(store.path(1200).as_path() / "state.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_arrays_of_any_layout_are_written_in_the_order_of_rows(store: CheckpointStore) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step, array in enumerate(
        (np.asfortranarray(plain), np.ascontiguousarray(plain.T).T, plain.astype(">f4"))
    ):
        store.write(draft_of({"x": plain}, step), {"x": array})
        assert store.open(step).read("x").tobytes() == plain.tobytes()


def test_a_state_of_no_variables_is_a_state(store: CheckpointStore) -> None:
    store.write(draft_of({}), {})
    assert_holds(store, 1200, {})


def test_a_closed_reader_reads_nothing(store: CheckpointStore) -> None:
    written(store, 1)
    reader = store.open(1)
    reader.close()
    for read in (lambda: reader.read("half"), reader.verify):
        with pytest.raises(ValueError, match="is closed"):
            read()


def test_a_value_stays_valid_when_its_checkpoint_is_removed(store: CheckpointStore) -> None:
    written(store, 1)
    with store.open(1) as reader:
        value = reader.read("dense/kernel")
    store.remove(1)
    assert value.tobytes() == state_of()["dense/kernel"].tobytes()


@pytest.mark.parametrize(
    ("change", "variable", "received"),
    [
        (lambda arrays: arrays.pop("half"), "half", "half"),
        (lambda arrays: arrays.update(half=np.zeros(3, np.float32)), "half", "float32"),
        (lambda arrays: arrays.update(half=np.zeros(4, np.float16)), "half", r"\(4,\)"),
    ],
)
def test_other_variables_than_the_schemas_are_refused(
    store: CheckpointStore, change: Any, variable: str, received: str
) -> None:
    arrays = state_of()
    draft = draft_of(arrays)
    change(arrays)
    with pytest.raises(CheckpointError, match=received) as caught:
        store.write(draft, arrays)
    assert caught.value.variable == variable
    assert list(store.path(1200).as_path().parent.iterdir()) == []


def test_a_name_that_the_format_keeps_for_itself_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        store.write(draft_of({"__metadata__": np.zeros(1)}), {"__metadata__": np.zeros(1)})


def test_what_is_no_json_is_refused_before_anything_is_written(store: CheckpointStore) -> None:
    with pytest.raises(TypeError):
        store.write(draft_of({}, script={"key": object()}), {})
    assert store.manifests() == []


def test_metrics_may_be_no_numbers(store: CheckpointStore) -> None:
    written(store, 1, metrics={"loss": float("nan"), "other": float("-inf")})
    metrics = store.manifest(1).metrics
    assert np.isnan(metrics["loss"])
    assert metrics["other"] == float("-inf")


def test_other_bytes_than_those_of_the_digests_are_not_put_in_place(store: CheckpointStore) -> None:
    arrays = state_of()
    digests = {name: digest_array(array) for name, array in arrays.items()}
    first = store.write(draft_of(arrays, 5), arrays, digests)
    assert first.digests == digests
    changed = state_of(1)
    with pytest.raises(CheckpointError, match="changed while it was being written") as refused:
        store.write(draft_of(arrays, 5), arrays | {"half": changed["half"]}, digests)
    assert refused.value.variable == "half"
    assert store.manifests() == [first]
    assert [path.name for path in store.path(5).as_path().parent.iterdir()] == ["00000005"]


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1},
        {"sequence": 4},
        {"script": {"fits": [[3, 20, 3]], "inside": "fit"}},
        {"missing": (2,)},
        {"batch": 8},
    ],
)
def test_another_checkpoint_of_the_same_step_takes_its_place(
    store: CheckpointStore, fields: dict[str, Any]
) -> None:
    first = written(store, 5)
    second = written(store, 5, **fields)
    assert first != second
    assert store.manifests() == [second]
    assert_holds(store, 5, state_of(fields.get("seed", 0)))
    assert list(store.directory.as_path().iterdir()) == [store.path(5).as_path()]


def test_a_damaged_checkpoint_is_replaced_by_the_same_one(store: CheckpointStore) -> None:
    written(store, 5)
    flip(store.path(5).as_path() / "state.safetensors", -1)
    written(store, 5)
    assert_holds(store, 5, state_of())


def two_of_a_step(store: CheckpointStore, tmp_path: Path) -> tuple[Manifest, Manifest]:
    """What a crash leaves that comes after the rename of the second one, and before the first is removed."""
    first = written(store, 5)
    shutil.copytree(store.path(5).as_path(), tmp_path / "copy")
    second = written(store, 5, seed=1)
    (tmp_path / "copy").rename(store.directory.as_path() / "00000005")
    return first, second


def test_a_crash_before_the_old_one_of_a_step_is_removed_leaves_the_new_one(
    store: CheckpointStore, tmp_path: Path
) -> None:
    first, second = two_of_a_step(store, tmp_path)
    assert first != second
    assert store.manifests() == [second]
    assert_holds(store, 5, state_of(1))
    store.clean()
    assert len(list(store.directory.as_path().iterdir())) == 1
    assert store.manifests() == [second]


def test_cleaning_removes_what_is_under_a_temporary_name(store: CheckpointStore) -> None:
    store.clean()
    first, second = written(store, 5), written(store, 6)
    (store.directory.as_path() / ".tmp-0123").mkdir()
    (store.directory.as_path() / ".tmp-0123" / "state.safetensors").write_bytes(b"half")
    store.clean()
    assert sorted(path.name for path in store.directory.as_path().iterdir()) == ["00000005", "00000006"]
    assert store.manifests() == [first, second]


def test_removing_takes_what_waits_behind_too(store: CheckpointStore, tmp_path: Path) -> None:
    two_of_a_step(store, tmp_path)
    store.remove(5)
    assert store.manifests() == []
    with pytest.raises(CheckpointError, match="Received: 5"):
        store.remove(5)


def test_pruning_keeps_the_last_ones_and_the_best(store: CheckpointStore) -> None:
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 1.0, 5.0, 4.0]):
        written(store, step, metrics={"loss": loss})
    written(store, 7, metrics={})
    assert store.prune(6, ("loss", "min")) == [0, 1]
    assert store.prune(2, ("loss", "min")) == [2, 3, 5]
    assert [manifest.step for manifest in store.manifests()] == [4, 6, 7]
    assert store.prune(1, ("accuracy", "max")) == [4, 6]
    assert store.prune(1) == []
    with pytest.raises(ValueError, match="Received: 0"):
        store.prune(0)


def test_a_run_without_checkpoints_has_none_and_a_missing_step_names_others(store: CheckpointStore) -> None:
    assert store.manifests() == store.problems() == []
    assert store.last() is None
    with pytest.raises(CheckpointError, match="Received: 3") as caught:
        store.open(3)
    assert (caught.value.step, caught.value.path) == (3, store.path(3).as_path())
    written(store, 5)
    with pytest.raises(CheckpointError, match="one of 5"):
        store.manifest(6)


def test_steps_of_more_digits_and_other_names(store: CheckpointStore) -> None:
    written(store, 123456789)
    for name in ("7", "000000007", "latest", "00000007.bak"):
        (store.path(1).as_path().parent / name).mkdir()
    assert [manifest.step for manifest in store.manifests()] == [123456789]
    assert store.problems() == []


def test_a_variable_that_is_not_there_is_named(store: CheckpointStore) -> None:
    written(store, 5)
    with pytest.raises(CheckpointError, match="Received: nothing/here"):
        store.open(5).read("nothing/here")


def test_a_checkpoint_is_opened_by_its_path(store: CheckpointStore, tmp_path: Path) -> None:
    manifest = written(store, 5)
    with open_checkpoint(store.path(5).as_path()) as reader:
        reader.verify()
        assert reader.manifest == manifest
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not complete"):
        open_checkpoint(tmp_path)


def test_a_closed_reader_leaves_no_descriptor_behind(store: CheckpointStore) -> None:
    written(store, 5)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        store.open(5).read("half")
        store.manifest(5)
        with pytest.raises(CheckpointError):
            store.open(6)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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
        store.write(draft_of(arrays, step).with_updates(saved), arrays)
        assert saved_of(store.manifest(step)) == saved


def test_many_updates_take_little_room(tmp_path: Path) -> None:
    saved = Saved(5, 0, frozenset(range(1, 100_001)) - {77}, (), None)
    draft = draft_of(state_of(), 5).with_updates(saved)
    assert (draft.sequence, draft.missing) == (100_000, (77,))
    assert len(json.dumps(draft.to_json())) < 3000


def test_a_checkpoint_with_other_pending_updates_is_another_one(tmp_path: Path) -> None:
    store, arrays = CheckpointStore(tmp_path), state_of()
    for pending in ((), (pending_of("a", "0-1"),), (pending_of("a", "0-1", "0-2"),)):
        saved = Saved(5, 1, frozenset({1}), pending, state=5)
        store.write(draft_of(arrays, 5).with_updates(saved), arrays)
        assert saved_of(store.manifest(5)) == saved


def test_a_copy_of_another_runs_checkpoint_contains_none_of_this_runs_updates(tmp_path: Path) -> None:
    here, there = Fence(tmp_path / "here", attempt=0), Fence(tmp_path / "there", attempt=0)
    saved = Saved(5, 1, frozenset({1, 2}), (pending_of("a", "0-1"),), state=5)
    arrays = state_of()
    written = CheckpointStore(tmp_path / "there", there).write(
        draft_of(arrays, 5).with_updates(saved), arrays
    )
    (tmp_path / "here" / "checkpoints").mkdir()
    shutil.copytree(tmp_path / "there/checkpoints/00000005-1", tmp_path / "here/checkpoints/00000005")
    for store in (CheckpointStore(tmp_path / "here", here), CheckpointStore(tmp_path / "here")):
        assert saved_of(store.manifest(5)) == Saved(5, 1, frozenset(), (), state=5)
        assert store.manifest(5).state_digest == written.state_digest
    # Every later start of the run that wrote it knows it as its own.
    again = CheckpointStore(tmp_path / "there", Fence(tmp_path / "there", attempt=1))
    assert saved_of(again.manifest(5)) == saved


# Damaged files are detected and never misread.


def test_a_flipped_byte_anywhere_in_any_file_is_found(store: CheckpointStore) -> None:
    written(store, 5)
    for name in ("state.safetensors", "manifest.json"):
        path = store.path(5).as_path() / name
        size = path.stat().st_size
        for place in range(0, size, max(1, size // 200)):
            flip(path, place, 1 << place % 8)
            with pytest.raises(FileDamaged):
                store.open(5).verify()
            flip(path, place, 1 << place % 8)
    assert_holds(store, 5, state_of())


def test_every_truncated_or_longer_file_is_found_without_verifying(store: CheckpointStore) -> None:
    written(store, 5)
    for name in ("state.safetensors", "manifest.json"):
        path = store.path(5).as_path() / name
        content = path.read_bytes()
        for size in range(0, len(content), 7):
            path.write_bytes(content[:size])
            with pytest.raises(FileDamaged):
                store.open(5)
        path.write_bytes(content + b"\0")
        with pytest.raises(FileDamaged):
            store.open(5)
        path.write_bytes(content)


def test_damaged_ones_are_left_out_and_named(store: CheckpointStore) -> None:
    good = written(store, 1)
    for step in range(2, 7):
        written(store, step)
    (store.path(2).as_path() / "state.safetensors").unlink()
    (store.path(3).as_path() / "manifest.json").unlink()
    (store.path(4).as_path() / "manifest.json").write_text("")
    (store.path(5).as_path() / "state.safetensors").write_bytes(b"")
    store.path(6).as_path().rename(store.path(7).as_path())
    assert store.manifests() == [good]
    assert store.last() == good
    assert [
        problem.path.relative_to(store.path(0).as_path().parent).parts[0] for problem in store.problems()
    ] == [f"{step:08d}" for step in (2, 3, 4, 5, 7)]
    with pytest.raises(CheckpointError, match="not complete"):
        store.open(3)
    with pytest.raises(FileDamaged, match=r"another step\. Received: 6"):
        store.open(7)
    store.remove(4)


def test_a_damaged_one_is_never_offered(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        written(store, step)
    flip(store.path(3).as_path() / "manifest.json", 5)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of this step.*Expected: one of 1, 2\. Received: 9"
    ):
        store.open(9)
    flip(store.path(2).as_path() / "state.safetensors", -1)
    last, skipped = store.last_and_skipped()
    assert last == store.manifest(2), "its bytes were not looked at"
    assert [problem.path.parent for problem in skipped] == [store.path(3).as_path()]


def test_what_is_said_of_damage_is_for_people_and_ends_with_what_to_do(store: CheckpointStore) -> None:
    written(store, 5)
    flip(store.path(5).as_path() / "manifest.json", 5)
    with pytest.raises(FileDamaged) as found:
        store.open(5)
    assert "its checksum does not match its content" in str(found.value)
    assert str(found.value).endswith(
        "Use another checkpoint, or replace this one with a backup copy; "
        f"remove {store.path(5).as_path()} to discard it."
    )


def test_verifying_names_all_damaged_variables(store: CheckpointStore) -> None:
    written(store, 5)
    reader = store.open(5)
    for name in ("half", "dense/kernel"):
        flip(store.path(5).as_path() / "state.safetensors", reader.layout.spans[name].start)
    with pytest.raises(FileDamaged, match=r"dense/kernel.*half"):
        store.open(5).verify()


def test_verifying_tells_how_far_it_is(store: CheckpointStore) -> None:
    manifest = written(store, 5)
    seen: list[tuple[int, int]] = []
    reader = store.open(5)
    reader.verify(lambda done, total: seen.append((done, total)))
    size = manifest.nbytes - len(reader.layout.header)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_a_bool_that_is_neither_is_never_read(store: CheckpointStore) -> None:
    written(store, 5)
    flip(store.path(5).as_path() / "state.safetensors", store.open(5).layout.spans["mask"].start, 2)
    with pytest.raises(FileDamaged, match="bytes of mask are not those"):
        store.open(5).read("mask")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1}, {"missing": ["2"]}, {"missing": [1, True]}, {"sequence": 2**40}, {"sequence": -1},
        {"pending": [{"id": "u"}]}, {"pending": [7]}, {"script": 7}, {"line": "1"}, {"measured": [1]},
        {"schema": []}, {"digests": {}}, {"step": "x"}, {"metrics": 3},
        {"schema": {"variables": [], "hints": {}}},
    ],
)  # fmt: skip
def test_a_manifest_of_another_kind_is_refused_although_its_sum_is_right(
    store: CheckpointStore, change: dict[str, Any]
) -> None:
    written(store, 5)
    path = store.path(5).as_path() / "manifest.json"
    path.write_bytes(sealed_json(json.loads(unsealed(path.read_bytes())[0]) | change))
    with pytest.raises(FileDamaged, match="Received: "):
        store.open(5)


# The checkpoint from which a job continues: there are those of steps 5, 10 and 15.


@pytest.fixture
def three(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path)
    for step in (5, 10, 15):
        written(made, step)
    return made


def chosen(store: CheckpointStore, step: int | None = None, damaged: dict[int, str] | None = None) -> int:
    reader = choose(store, step, {} if damaged is None else damaged)
    assert reader is not None
    with reader:
        return reader.manifest.step


def test_the_last_one_or_the_one_that_was_asked_for_is_chosen(three: CheckpointStore, tmp_path: Path) -> None:
    assert chosen(three) == 15
    assert chosen(three, 5) == 5
    assert choose(CheckpointStore(tmp_path / "nothing yet"), None, {}) is None


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
def test_one_that_is_seen_to_be_damaged_is_passed_over_and_remembered(
    three: CheckpointStore, file: str
) -> None:
    flip(three.path(15).as_path() / file, 5)
    damaged: dict[int, str] = {}
    assert chosen(three, None, damaged) == 10
    assert list(damaged) == [15]
    assert "is damaged" in damaged[15]


def test_an_incomplete_checkpoint_is_skipped_with_a_warning(
    three: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10, 15):
        (three.path(step).as_path() / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert choose(three, None, {}) is None
    assert [f"step {step} is skipped" in caplog.text for step in (5, 10, 15)] == [True] * 3


def test_a_damaged_one_that_was_asked_for_is_refused(three: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="checkpoint verify tells which are intact") as refused:
        choose(three, 15, {15: "worker 1 reads other bytes."})
    assert "cannot be restored. Step 15: worker 1 reads other bytes. " in str(refused.value)
    assert (refused.value.step, refused.value.path) == (15, three.path(15).as_path())


@pytest.mark.parametrize("step", [None, 15])
def test_a_start_without_an_undamaged_checkpoint_is_refused(three: CheckpointStore, step: int | None) -> None:
    for each in (5, 10, 15):
        flip(three.path(each).as_path() / "manifest.json", 5)
    with pytest.raises(
        CheckpointError, match=r"manifest.json is damaged.*remove .* to start from scratch\.$"
    ):
        choose(three, step, {})


# The last one, and those that are kept, after training has restarted from an earlier one.


BEST = ("loss", "min")


@pytest.fixture
def went_back(tmp_path: Path) -> CheckpointStore:
    """Training got worse after step 500."""
    made = CheckpointStore(tmp_path)
    for step, loss in ((500, 0.1), (1000, 0.5), (1500, 0.7), (2000, 0.9)):
        written(made, step, step, metrics={"loss": loss})
    return made


def saved(went_back: CheckpointStore, step: int, named: int | None = None, seed: int = 7) -> list[int]:
    """A checkpoint of a training that is at this step now; gives those that are there then."""
    written(went_back, step, seed, metrics={"loss": 0.2})
    went_back.prune(3, BEST, named)
    return [manifest.step for manifest in went_back.manifests()]


def test_what_is_written_after_going_back_stays_and_is_the_last_one(went_back: CheckpointStore) -> None:
    for step, there in ((600, [500, 600, 2000]), (700, [500, 600, 700]), (800, [500, 600, 700, 800])):
        assert saved(went_back, step) == there
        last = went_back.last()
        assert last is not None
        assert last.step == chosen(went_back) == step


def test_a_training_that_continues_from_there_stays_on_its_line_when_it_passes_what_was_given_up(
    went_back: CheckpointStore,
) -> None:
    lines = [went_back.manifest(2000).line]
    for step in (600, 1000, 1900, 2000, 2100):
        saved(went_back, step)
        assert chosen(went_back) == step
        lines.append(went_back.manifest(step).line)
    assert lines == [0, 1, 1, 1, 1, 1]


def test_a_script_that_goes_back_at_every_start_continues_from_its_last_start(
    went_back: CheckpointStore,
) -> None:
    for start in (1, 2, 3):
        for step in (600, 700, 800)[: 4 - start]:
            saved(went_back, step, named=500, seed=start)
            assert chosen(went_back) == step
            assert went_back.manifest(step).line == start
    assert went_back.path(500).as_path().exists()


def test_the_one_that_was_asked_for_by_its_step_stays(went_back: CheckpointStore) -> None:
    for step in (1100, 1200, 1300, 1400):
        there = saved(went_back, step, named=1000)
    assert there == [500, 1000, 1200, 1300, 1400]


def test_should_the_last_one_be_damaged_what_it_came_from_is_taken(went_back: CheckpointStore) -> None:
    written(went_back, 600)
    assert went_back.steps() == [600, 500, 2000, 1500, 1000]
    assert chosen(went_back, None, {600: "worker 1 reads other bytes"}) == 500
    assert chosen(went_back, None, {600: "worker 1 reads other bytes", 500: "and here"}) == 2000


def test_an_unreadable_checkpoint_may_have_been_the_last(went_back: CheckpointStore) -> None:
    written(went_back, 600)
    flip(went_back.path(1500).as_path() / "manifest.json", 5)
    damaged: dict[int, str] = {}
    assert chosen(went_back, None, damaged) == 600
    assert list(damaged) == [1500]
    last, skipped = went_back.last_and_skipped()
    assert last == went_back.manifest(600)
    assert ["00001500" in str(problem) for problem in skipped] == [True]
    assert went_back.steps() == [1500, 600, 500, 2000, 1000]
    for step in (700, 800):
        written(went_back, step)
    for step in (500, 700, 2000):
        flip(went_back.path(step).as_path() / "manifest.json", 5)
    assert went_back.steps() == [2000, 1500, 800, 700, 600, 1000, 500]


def test_damaged_bytes_of_a_later_step_cost_no_whole_checkpoint(went_back: CheckpointStore) -> None:
    """That of step 2000 was found damaged, and training went on from 1500."""
    flip(went_back.path(2000).as_path() / "state.safetensors", -1)
    written(went_back, 1600)
    went_back.prune(1)
    assert [manifest.step for manifest in went_back.manifests()] == [1600]


def test_an_old_one_that_cannot_be_removed_is_reported_once_and_does_not_stop_pruning(
    went_back: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = CheckpointStore.remove

    def refusing(self: CheckpointStore, step: int) -> None:
        if step == 1000:
            raise PermissionError(errno.EACCES, "Permission denied")
        if step == 500:  # somebody was quicker
            remove(self, step)
        remove(self, step)

    monkeypatch.setattr(CheckpointStore, "remove", refusing)
    with caplog.at_level(logging.WARNING, "replicast"):
        assert went_back.prune(1) == [1500]
        assert went_back.prune(1) == []
    assert [manifest.step for manifest in went_back.manifests()] == [1000, 2000]
    (said,) = caplog.messages
    assert str(went_back.path(1000).as_path()) in said
    assert "Permission denied" in said
