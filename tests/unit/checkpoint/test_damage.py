"""Damaged files are detected and never misread."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from replicast.errors import CheckpointError, FileDamaged
from replicast.storage.checkpoints import CheckpointStore
from tests.unit.checkpoint.samples import assert_holds, flip, state_of, written


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def test_a_flipped_byte_anywhere_in_any_file_is_found(store: CheckpointStore) -> None:
    written(store, 5)
    for name in ("state.safetensors", "manifest.json", "COMMITTED"):
        path = store.path(5).as_path() / name
        size = path.stat().st_size
        for place in range(0, size, max(1, size // 200)):
            flip(path, place, 1 << place % 8)
            with pytest.raises(FileDamaged):
                store.open(5, verify=True)
            flip(path, place, 1 << place % 8)
    assert_holds(store, 5, state_of())


def test_every_truncated_or_longer_file_is_found_without_verifying(store: CheckpointStore) -> None:
    written(store, 5)
    for name in ("state.safetensors", "manifest.json", "COMMITTED"):
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
    for step in range(2, 8):
        written(store, step)
    (store.path(2).as_path() / "state.safetensors").unlink()
    (store.path(3).as_path() / "manifest.json").unlink()
    (store.path(4).as_path() / "COMMITTED").write_text("")
    (store.path(5).as_path() / "COMMITTED").unlink()
    store.path(6).as_path().rename(store.path(8).as_path())
    (store.path(7).as_path() / "state.safetensors").write_bytes(b"")
    assert store.list() == [good]
    assert store.last() == good
    assert [
        problem.path.relative_to(store.path(0).as_path().parent).parts[0] for problem in store.problems()
    ] == [f"{step:08d}" for step in (2, 3, 4, 5, 7, 8)]
    with pytest.raises(CheckpointError, match="not committed"):
        store.open(5)
    with pytest.raises(FileDamaged, match=r"another step\. Received: 6"):
        store.open(8)
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
    (store.path(5).as_path() / "COMMITTED").write_text("9489\n")
    with pytest.raises(FileDamaged) as found:
        store.open(5)
    assert "does not match COMMITTED, which has '9489'. Received: " in str(found.value)
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
    content = json.dumps(json.loads(path.read_text()) | change).encode()
    path.write_bytes(content)
    (store.path(5).as_path() / "COMMITTED").write_text(hashlib.sha256(content).hexdigest() + "\n")
    with pytest.raises(FileDamaged, match="Received: "):
        store.open(5)
