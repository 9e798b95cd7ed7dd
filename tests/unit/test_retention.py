"""Payloads that no start needs are removed; the entries stay, and every kept checkpoint can be restored."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from replicast.core.entries import Committed, Payload, Refused, Scheduled, Withdrawn
from replicast.errors import PayloadRemoved
from replicast.files import RunPath
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, MemoryJournal, committed_updates, load_update
from replicast.update.update import Update
from tests.unit.logs import cut, damage


@pytest.fixture(autouse=True)
def nothing_for_reverts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.storage.journal.REVERTIBLE_BYTES", 0)


def start(run: Path) -> FileJournal:
    return FileJournal(run, Fence(run, attempt=0))


def update_of(id_: str) -> Update:
    return Update(id=id_).add("x", np.ones(3, np.float32))


def digest_of(id_: str) -> str:
    return update_of(id_).content_digest()


def store(journal: FileJournal, id_: str) -> None:
    journal.write(Payload(id_, digest_of(id_), None, "me", "why"), update_of(id_))


def commit(journal: FileJournal, *sequences: int) -> None:
    for sequence in sequences:
        store(journal, f"u{sequence}")
        journal.write(Committed(sequence, f"u{sequence}", digest_of(f"u{sequence}"), 10 * sequence, 0))


def payloads(run: Path) -> int:
    return len(list(run.glob("groups/*/*.safetensors")))


def test_what_every_kept_checkpoint_contains_is_removed_and_the_rest_can_be_applied_again(
    tmp_path: Path,
) -> None:
    commit(start(tmp_path), 1, 2)
    journal = start(tmp_path)
    commit(journal, 3, 4, 5)
    before = committed_updates(tmp_path)
    kept = [frozenset({1, 2, 3}), frozenset({1, 2, 3, 5})]  # what each checkpoint contains
    assert journal.remove_payloads(kept[0] & kept[1], None) == 3
    assert journal.remove_payloads(kept[0] & kept[1], None) == 0
    assert payloads(tmp_path) == 2
    for reader in (journal, start(tmp_path)):
        history = reader.history()
        assert list(history.committed) == [1, 2, 3, 4, 5]
        again = [[reader.load(one.id, one.digest).id for one in history.after(holds)] for holds in kept]
        assert again == [["u4", "u5"], ["u4"]]
    assert committed_updates(tmp_path) == before


def test_a_start_that_needs_what_was_removed_is_told_what_to_do(tmp_path: Path) -> None:
    commit(start(tmp_path), 1, 2)
    start(tmp_path).remove_payloads({1}, None)
    journal = start(tmp_path)
    (first, _) = journal.history().after(frozenset())
    with pytest.raises(PayloadRemoved, match=r"Call replicas\.restore\(\) before training"):
        journal.load(first.id, first.digest)
    with pytest.raises(PayloadRemoved, match=r"Call replicas\.restore\(\) before training"):
        load_update(tmp_path, 1)
    assert load_update(tmp_path, 2).id == "u2"


def test_what_was_refused_or_withdrawn_is_removed_and_what_waits_is_not(tmp_path: Path) -> None:
    journal = start(tmp_path)
    for id_ in ("refused", "withdrawn", "waiting", "again", "scheduled"):
        store(journal, id_)
    journal.write(Scheduled("scheduled", digest_of("scheduled"), 50))
    journal.write(Refused("refused", ("a",), "why"))
    journal.write(Refused("waiting", ("b",), "one of its proposals", whole=False))
    journal.write(Withdrawn("withdrawn"))
    journal.write(Refused("again", ("c",), "why"))
    store(journal, "again")
    assert journal.remove_payloads(frozenset(), None) == 3
    for id_ in ("waiting", "again", "scheduled"):
        assert journal.load(id_, digest_of(id_)).id == id_
    for id_ in ("refused", "withdrawn"):
        with pytest.raises(PayloadRemoved):
            journal.load(id_, digest_of(id_))


def test_what_a_later_attempt_has_written_again_is_kept_once(tmp_path: Path) -> None:
    store(start(tmp_path), "u1")
    journal = start(tmp_path)
    commit(journal, 1)
    assert journal.remove_payloads(frozenset(), None) == 1
    assert load_update(tmp_path, 1).id == "u1"
    assert journal.remove_payloads({1}, None) == 1
    assert payloads(tmp_path) == 0


def test_what_an_attempt_that_died_has_left_is_removed_unless_a_start_can_bring_it_back(
    tmp_path: Path,
) -> None:
    first = start(tmp_path)
    for id_ in ("left", "scheduled", "pending", "committed"):
        store(first, id_)
    first.write(Scheduled("scheduled", digest_of("scheduled"), 50))
    first.write(Committed(1, "committed", digest_of("committed"), 10, 0))
    journal = start(tmp_path)
    store(journal, "under-way")
    pending = {("pending", digest_of("pending"))}
    assert journal.remove_payloads(frozenset(), None) == 0, "what checkpoints propose again is not known"
    assert journal.remove_payloads(frozenset(), pending) == 1
    for id_ in ("scheduled", "pending", "committed", "under-way"):
        assert journal.load(id_, digest_of(id_)).id == id_
    with pytest.raises(PayloadRemoved):
        journal.load("left", digest_of("left"))
    assert journal.remove_payloads(frozenset(), frozenset()) == 1
    for id_ in ("scheduled", "committed", "under-way"):
        assert start(tmp_path).load(id_, digest_of(id_)).id == id_


def test_a_group_that_was_taken_over_removes_nothing(tmp_path: Path) -> None:
    store(start(tmp_path), "left")
    old = start(tmp_path)
    commit(old, 1)
    start(tmp_path)
    assert old.remove_payloads({1}, frozenset()) == 0
    assert payloads(tmp_path) == 2


def test_nothing_is_removed_while_an_entry_of_the_journal_is_damaged(tmp_path: Path) -> None:
    journal = start(tmp_path)
    commit(journal, 1)
    store(journal, "left")
    journal.write(Withdrawn("x"))
    journal.write(Refused("left", ("t",), "why"))
    damage(tmp_path, "withdrawn", cut)
    assert start(tmp_path).remove_payloads({1}, frozenset()) == 0
    assert payloads(tmp_path) == 2


def test_a_disk_that_removes_nothing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = start(tmp_path)
    commit(journal, 1)

    def fail(_path: RunPath, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patching:
        patching.setattr(RunPath, "unlink", fail)
        assert journal.remove_payloads({1}, None) == 0
    assert payloads(tmp_path) == 1
    assert journal.remove_payloads({1}, None) == 1


def test_a_journal_in_memory_has_nothing_to_remove() -> None:
    assert MemoryJournal().remove_payloads({1}, None) == 0


def test_the_newest_updates_are_kept_for_reverts_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = start(tmp_path)
    commit(journal, 1, 2, 3)
    size = (tmp_path / "groups" / "000001" / "000001.safetensors").stat().st_size
    monkeypatch.setattr("replicast.storage.journal.REVERTIBLE_BYTES", 2 * size)
    assert journal.remove_payloads({1, 2, 3}, None) == 1
    with pytest.raises(PayloadRemoved):
        load_update(tmp_path, 1)
    assert load_update(tmp_path, 2).id == "u2"
    assert load_update(tmp_path, 3).id == "u3"
