"""Every file operation of a writer fails, or is the last one: the old or the new state is readable."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicast.storage.checkpoints import CheckpointStore, open_checkpoint, patch
from replicast.update.digest import digest_state
from replicast.update.update import Update
from tests.unit.checkpoint.operations import at_each_operation
from tests.unit.checkpoint.samples import state_of, written

ROOT = Path(__file__).parents[3]
OLD, NEW = digest_state(state_of(0)), digest_state(state_of(1))
ERRORS = [errno.ENOSPC, errno.EIO]


def raising(code: int) -> None:
    raise OSError(code, os.strerror(code))


def prepared(run: Path) -> CheckpointStore:
    store = CheckpointStore(run)
    written(store, 5)
    return store


def write(store: CheckpointStore, step: int) -> None:
    written(store, step, seed=1)


def digests(store: CheckpointStore) -> dict[int, str]:
    """What is there, read to the last byte."""
    found = {}
    for manifest in store.manifests():
        store.open(manifest.step).verify()
        found[manifest.step] = manifest.state_digest
    assert store.problems() == []
    return found


def leftovers(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.as_path().glob(".tmp-*"))


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("step", [5, 6], ids=["replaces", "new"])
def test_each_failing_operation_leaves_the_old_or_the_new_state(tmp_path: Path, step: int, code: int) -> None:
    fired: list[str] = []
    for run, operations in at_each_operation(tmp_path):
        store, failed = prepared(run), False
        with operations.installed(lambda: raising(code)):
            try:
                write(store, step)
            except OSError as error:
                failed = error.errno == code
                assert leftovers(store) == [], "not even before cleaning"
        there = digests(store)
        assert there in ({5: OLD}, {step: NEW} | ({5: OLD} if step != 5 else {}))
        if operations.fired is None:
            assert not failed
            break
        fired.append(operations.fired)
        # Only what comes after the new one is durable may fail without a word: removing the old one.
        assert failed or (there[step] == NEW and operations.fired in ("rename", "unlink", "rmdir"))
        store.clean()
        assert leftovers(store) == []
        assert digests(store) == there
        write(store, step)
        assert digests(store)[step] == NEW
    assert {"open", "write", "fsync", "rename", "mkdir"} <= set(fired)
    assert fired.count("fsync") == 4  # Two files, their directory, its parent.


def test_a_disk_that_fails_for_good_at_any_operation_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    for run, operations in at_each_operation(tmp_path, ever_after=True):
        store = prepared(run)
        with operations.installed(lambda: raising(errno.EIO)):
            try:
                write(store, 5)
            except OSError:
                assert operations.fired is not None
        there = digests(store)
        assert there in ({5: OLD}, {5: NEW})
        store.clean()
        assert leftovers(store) == []
        assert digests(store) == there


def test_the_first_directories_are_made_durable(tmp_path: Path) -> None:
    synced: list[str] = []
    real = os.fsync
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(
            os,
            "fsync",
            lambda descriptor: (
                synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name),
                real(descriptor),
            )[1],
        )
        prepared(tmp_path / "deep" / "run")
    temporary = next(name for name in synced if name.startswith(".tmp-"))
    assert synced == [
        tmp_path.name, "deep", "run",
        "state.safetensors", "manifest.json", temporary, "checkpoints",
    ]  # fmt: skip


def test_each_failing_operation_of_a_patch_leaves_all_or_nothing(tmp_path: Path) -> None:
    store = prepared(tmp_path / "run")
    fired: list[str] = []
    for folder, operations in at_each_operation(tmp_path):
        folder.mkdir()
        destination = folder / "patched"
        with operations.installed(lambda: raising(errno.ENOSPC)):
            try:
                patch(store.path(5).as_path(), Update(id="u").scale("half", 2.0), destination)
            except OSError:
                assert operations.fired is not None
        assert not list(destination.parent.glob(".tmp-*"))
        if destination.exists():
            open_checkpoint(destination).verify()
        if operations.fired is None:
            break
        fired.append(operations.fired)
    assert {"open", "write", "fsync", "rename", "mkdir"} <= set(fired)
    assert digests(store) == {5: OLD}


@pytest.mark.parametrize("what", ["replace", "new", "patch", "remove"])
def test_a_writer_killed_at_any_operation_leaves_all_or_nothing(tmp_path: Path, what: str) -> None:
    prepared(tmp_path / "before")
    command = [sys.executable, "-m", "tests.unit.checkpoint.killed_writer", what, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    attempts = [json.loads(line) for line in result.stdout.splitlines()]
    killed_at = [each["killed_at"] for each in attempts]
    assert killed_at[-1] is None
    assert None not in killed_at[:-1]
    assert "rename" in killed_at
    assert what == "remove" or {"open", "write", "fsync", "mkdir"} <= set(killed_at[:-1])
    for each in attempts:
        run = tmp_path / str(each["number"])
        store = CheckpointStore(run)
        before = digests(store)
        assert before in expected(what)
        if (run / "patched").exists():
            open_checkpoint(run / "patched").verify()
        store.clean()
        assert leftovers(store) == []
        assert digests(store) == before
    last = CheckpointStore(tmp_path / str(attempts[-1]["number"]))
    assert digests(last) == expected(what)[-1]


def expected(what: str) -> list[dict[int, str]]:
    """What may be there: first nothing has happened, at last everything."""
    return {
        "replace": [{5: OLD}, {5: NEW}],
        "new": [{5: OLD}, {5: OLD, 6: NEW}],
        "patch": [{5: OLD}],
        "remove": [{5: OLD}, {}],
    }[what]
