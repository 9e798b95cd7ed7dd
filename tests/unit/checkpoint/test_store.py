"""The checkpoints of a run: written, read, listed, pruned."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from replicast.errors import CheckpointError
from replicast.storage.checkpoints import CheckpointStore, Manifest, file_order, open_checkpoint
from replicast.update.digest import digest_array, digest_state
from replicast.update.schema import Schema, Variable
from tests.unit.checkpoint.samples import assert_holds, draft_of, flip, schema_of, state_of, written


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


@pytest.mark.parametrize("order", ["state", "file", "reversed"])
def test_what_is_written_is_read_back_to_the_last_bit(store: CheckpointStore, order: str) -> None:
    arrays = state_of()
    names = {"state": list(arrays), "file": file_order(schema_of(arrays)), "reversed": [*arrays][::-1]}[order]
    manifest = store.write(draft_of(arrays), ((name, arrays[name]) for name in names))
    assert_holds(store, 1200, arrays)
    assert manifest.digests == {name: digest_array(array) for name, array in arrays.items()}
    assert manifest.state_digest == digest_state(arrays)
    assert store.manifest(1200) == manifest
    assert store.list() == [manifest]
    assert store.problems() == []


def test_the_order_in_which_variables_come_changes_no_byte(store: CheckpointStore, tmp_path: Path) -> None:
    arrays = state_of()
    other = CheckpointStore(tmp_path / "other")
    store.write(draft_of(arrays), arrays.items())
    other.write(draft_of(arrays), reversed(arrays.items()))
    for name in ("state.safetensors", "manifest.json", "COMMITTED"):
        assert (store.path(1200).as_path() / name).read_bytes() == (
            other.path(1200).as_path() / name
        ).read_bytes()


def test_the_directory_holds_three_files_and_nothing_is_left_beside_it(store: CheckpointStore) -> None:
    written(store, 7)
    assert sorted(os.listdir(store.path(7).as_path())) == ["COMMITTED", "manifest.json", "state.safetensors"]  # noqa: PTH208
    assert [path.name for path in store.path(7).as_path().parent.iterdir()] == ["00000007"]


def test_another_tool_can_read_the_state(store: CheckpointStore) -> None:
    arrays = state_of()
    del arrays["table"]  # The numpy reader of safetensors needs ml_dtypes for it, and does not look.
    store.write(draft_of(arrays), arrays.items())
    found = safetensors.numpy.load_file(store.path(1200).as_path() / "state.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_arrays_of_any_layout_are_written_in_the_order_of_rows(store: CheckpointStore) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step, array in enumerate(
        (np.asfortranarray(plain), np.ascontiguousarray(plain.T).T, plain.astype(">f4"))
    ):
        store.write(draft_of({"x": plain}, step), [("x", array)])
        assert store.open(step).read("x").tobytes() == plain.tobytes()


def test_a_state_of_no_variables_is_a_state(store: CheckpointStore) -> None:
    store.write(draft_of({}), [])
    assert_holds(store, 1200, {})


def test_arrays_are_taken_one_at_a_time(store: CheckpointStore, tmp_path: Path) -> None:
    sizes: list[int] = []
    array = np.ones(2**20, np.float32)

    def arrays() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for number in range(3):
            sizes.append(sum(path.stat().st_size for path in tmp_path.glob("checkpoints/.tmp-*/*")))
            yield f"v{number}", array

    store.write(draft_of({f"v{number}": array for number in range(3)}), arrays())
    header = sizes[0]
    assert [size - header for size in sizes] == [0, array.nbytes, 2 * array.nbytes]


def test_an_array_is_given_up_before_the_next_one_is_asked_for(store: CheckpointStore) -> None:
    still_there: list[object] = []

    def arrays() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for number in range(3):
            array = np.ones((100, 100), np.float32)
            reference = weakref.ref(array)
            yield f"v{number}", array
            del array
            still_there.append(reference())

    store.write(draft_of({f"v{number}": np.ones((100, 100), np.float32) for number in range(3)}), arrays())
    assert still_there == [None] * 3


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
        (lambda arrays: arrays.update(more=np.zeros(1)), "more", "more"),
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
        store.write(draft, arrays.items())
    assert caught.value.variable == variable
    assert list(store.path(1200).as_path().parent.iterdir()) == []


def test_a_variable_that_comes_twice_is_refused(store: CheckpointStore) -> None:
    arrays = state_of()
    with pytest.raises(CheckpointError, match="twice"):
        store.write(draft_of(arrays), [*arrays.items(), ("half", arrays["half"])])


def test_a_name_that_the_format_keeps_for_itself_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        store.write(draft_of({"__metadata__": np.zeros(1)}), [("__metadata__", np.zeros(1))])


def test_what_is_no_json_is_refused_before_anything_is_written(store: CheckpointStore) -> None:
    with pytest.raises(TypeError):
        store.write(draft_of({}, script={"key": object()}), [])
    assert store.list() == []


def test_metrics_may_be_no_numbers(store: CheckpointStore) -> None:
    written(store, 1, metrics={"loss": float("nan"), "other": float("-inf")})
    metrics = store.manifest(1).metrics
    assert np.isnan(metrics["loss"])
    assert metrics["other"] == float("-inf")


def test_the_error_of_who_supplies_the_arrays_leaves_nothing_behind(store: CheckpointStore) -> None:
    def arrays() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        yield "dense/kernel", state_of()["dense/kernel"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(draft_of(state_of()), arrays())
    assert list(store.path(1200).as_path().parent.iterdir()) == []


def test_other_bytes_than_those_of_the_digests_are_not_put_in_place(store: CheckpointStore) -> None:
    arrays = state_of()
    digests = {name: digest_array(array) for name, array in arrays.items()}
    first = store.write(draft_of(arrays, 5), arrays.items(), digests)
    assert first.digests == digests
    changed = state_of(1)
    with pytest.raises(CheckpointError, match="changed while it was being written") as refused:
        store.write(draft_of(arrays, 5), (arrays | {"half": changed["half"]}).items(), digests)
    assert refused.value.variable == "half"
    assert store.list() == [first]
    assert [path.name for path in store.path(5).as_path().parent.iterdir()] == ["00000005"]


def test_the_same_checkpoint_again_is_left_as_it_is(store: CheckpointStore) -> None:
    first = written(store, 5, created_at=1.0, attempt=0)
    inode = store.path(5).stat().st_ino
    assert written(store, 5, created_at=2.0, attempt=1) == first
    assert store.path(5).stat().st_ino == inode
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
    assert store.list() == [second]
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
    assert store.list() == [second]
    assert_holds(store, 5, state_of(1))
    store.clean()
    assert len(list(store.directory.as_path().iterdir())) == 1
    assert store.list() == [second]


def test_cleaning_removes_what_is_under_a_temporary_name(store: CheckpointStore) -> None:
    store.clean()
    first, second = written(store, 5), written(store, 6)
    (store.directory.as_path() / ".tmp-0123").mkdir()
    (store.directory.as_path() / ".tmp-0123" / "state.safetensors").write_bytes(b"half")
    store.clean()
    assert sorted(path.name for path in store.directory.as_path().iterdir()) == ["00000005", "00000006"]
    assert store.list() == [first, second]


def test_removing_takes_what_waits_behind_too(store: CheckpointStore, tmp_path: Path) -> None:
    two_of_a_step(store, tmp_path)
    store.remove(5)
    assert store.list() == []
    with pytest.raises(CheckpointError, match="Received: 5"):
        store.remove(5)


def test_pruning_keeps_the_last_ones_and_the_best(store: CheckpointStore) -> None:
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 1.0, 5.0, 4.0]):
        written(store, step, metrics={"loss": loss})
    written(store, 7, metrics={})
    assert store.prune(6, ("loss", "min")) == [0, 1]
    assert store.prune(2, ("loss", "min")) == [2, 3, 5]
    assert [manifest.step for manifest in store.list()] == [4, 6, 7]
    assert store.prune(1, ("accuracy", "max")) == [4, 6]
    assert store.prune(1) == []
    with pytest.raises(ValueError, match="Received: 0"):
        store.prune(0)
    with pytest.raises(ValueError, match="Received: 'mean'"):
        store.prune(1, ("loss", "mean"))  # type: ignore[arg-type]


def test_a_run_without_checkpoints_has_none(store: CheckpointStore) -> None:
    assert store.list() == store.problems() == []
    assert store.last() is None
    with pytest.raises(CheckpointError, match="Received: 3") as caught:
        store.open(3)
    assert (caught.value.step, caught.value.path) == (3, store.path(3).as_path())


def test_a_missing_step_names_those_that_are_there(store: CheckpointStore) -> None:
    written(store, 5)
    with pytest.raises(CheckpointError, match="one of 5"):
        store.manifest(6)


def test_steps_of_more_digits_and_other_names(store: CheckpointStore) -> None:
    written(store, 123456789)
    for name in ("7", "000000007", "latest", "00000007.bak"):
        (store.path(1).as_path().parent / name).mkdir()
    assert [manifest.step for manifest in store.list()] == [123456789]
    assert store.problems() == []


def test_a_variable_that_is_not_there_is_named(store: CheckpointStore) -> None:
    written(store, 5)
    with pytest.raises(CheckpointError, match="Received: nothing/here"):
        store.open(5).read("nothing/here")


def test_a_checkpoint_is_opened_by_its_path(store: CheckpointStore, tmp_path: Path) -> None:
    manifest = written(store, 5)
    with open_checkpoint(store.path(5).as_path(), verify=True) as reader:
        assert reader.manifest == manifest
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not committed"):
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


def test_an_empty_schema_and_one_of_hints_have_the_same_file(tmp_path: Path) -> None:
    schema = Schema([Variable("x", (2,), "float32", "trainable")], {"y": "is computed"})
    store = CheckpointStore(tmp_path)
    store.write(draft_of({}, schema=schema), [("x", np.zeros(2, np.float32))])
    assert store.manifest(1200).schema.to_json() == schema.to_json()
