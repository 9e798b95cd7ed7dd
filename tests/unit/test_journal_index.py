"""A start and `status` open few files, however long the journal is; an index is only an optimization."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replicast.core.entries import Committed, Payload, Receipt, Withdrawn
from replicast.core.records import Stage
from replicast.errors import FileDamaged, JobFailed
from replicast.storage import journal as journal_module
from replicast.storage.claims import Fence
from replicast.storage.journal import (
    EntryFile,
    FileJournal,
    counted_entries,
    counts,
    read_entry,
    read_index,
    write_index,
)
from replicast.storage.updates import committed_updates, load_update
from replicast.update.update import Update


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are opened for reading."""
    names: list[str] = []
    real: Callable[..., int] = os.open

    def counted(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_ACCMODE | os.O_DIRECTORY) == os.O_RDONLY:
            names.append(Path(path).name)
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patching:
        patching.setattr(os, "open", counted)
        yield names


def start(run: Path) -> FileJournal:
    return FileJournal(run, Fence(run, attempt=0))


def commit(journal: FileJournal, sequence: int) -> None:
    update = Update(id=f"u{sequence}").scale("x", 2.0)
    digest = update.content_digest()
    journal.write(Payload(update.id, digest, None), update)
    journal.write(Committed(sequence, update.id, digest, sequence, 0))
    journal.write(Receipt(sequence, update.id, sequence, {0: "aa"}, 0.1, 0.1, 1.0, Stage.VERIFIED))


def indexes(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run / "groups")) for path in run.glob("groups/*/*.index.jsonl"))


def test_thousands_of_entries_are_read_from_few_files(tmp_path: Path, opened: list[str]) -> None:
    journal = start(tmp_path)
    for sequence in range(1, 801):
        commit(journal, sequence)
    assert indexes(tmp_path) == ["000001/002000.index.jsonl"]
    opened.clear()
    journal = start(tmp_path)
    history = journal.history()
    assert len(opened) < 420  # 400 entries behind the index, and some claims
    assert len(history.committed) == len(history.receipts) == 800
    assert indexes(tmp_path) == ["000002/000000.index.jsonl"]
    opened.clear()
    updates = committed_updates(tmp_path, last=20)
    assert [update.sequence for update in updates] == list(range(781, 801))
    assert {update.stage for update in updates} == {Stage.VERIFIED}
    assert {len(update.edits) for update in updates} == {1}
    assert len(opened) < 30
    opened.clear()
    assert load_update(tmp_path, 500).id == "u500"
    assert len(opened) < 5


def test_a_job_that_fails_at_each_start_still_opens_few_files(tmp_path: Path, opened: list[str]) -> None:
    journal = start(tmp_path)
    for sequence in range(1, 101):
        commit(journal, sequence)
    for _ in range(5):
        start(tmp_path)
    opened.clear()
    assert len(start(tmp_path).history().committed) == 100
    assert len(opened) < 10
    assert len(indexes(tmp_path)) == 1


@pytest.fixture
def indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two groups with an index and two entries behind it."""
    monkeypatch.setattr(journal_module, "INDEX_EVERY", 6)
    journal = start(tmp_path)
    commit(journal, 1)
    journal = start(tmp_path)
    for sequence in (2, 3):
        commit(journal, sequence)
    journal.write(Withdrawn("x"))
    journal.write(Withdrawn("y"))
    assert indexes(tmp_path) == ["000002/000006.index.jsonl"]
    return tmp_path


def ids(run: Path) -> tuple[list[str], int]:
    """What the journal has, and how much of it came from an index."""
    indexed = counted_entries(run)[1]
    return [load_update(run, update.sequence).id for update in committed_updates(run)], indexed


def test_a_damaged_index_is_not_used(indexed: Path) -> None:
    path = indexed / "groups" / indexes(indexed)[0]
    assert ids(indexed) == (["u1", "u2", "u3"], 9)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 53):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r".+"):
            read_index(path)
    assert ids(indexed) == (["u1", "u2", "u3"], 0)
    for content in (b"", b"\n", whole[:-1], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert ids(indexed) == (["u1", "u2", "u3"], 0)
    path.unlink()
    assert ids(indexed) == (["u1", "u2", "u3"], 0)
    path.write_bytes(whole)
    assert ids(indexed) == (["u1", "u2", "u3"], 9)


def test_damage_behind_the_index_is_noticed(indexed: Path) -> None:
    (indexed / "groups" / "000002" / "000007.withdrawn.json").unlink()
    with pytest.raises(FileDamaged, match="000007"):
        committed_updates(indexed)


def test_an_index_of_entries_that_do_not_count_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "INDEX_EVERY", 6)
    old = start(tmp_path)
    commit(old, 1)
    new = start(tmp_path)
    for number in range(2):
        # A group that was stopped goes on: its entries are void, and so is an index that has them.
        with pytest.raises(JobFailed):
            old.write(Withdrawn(f"late{number}"))
        with pytest.raises(JobFailed):
            old.write(Withdrawn(f"later{number}"))
    files = [*counted_entries(tmp_path)[0]]
    void = tmp_path / "groups" / "000001" / "000007.index.jsonl"
    write_index(tmp_path, 1, [*files, *_void_entries(tmp_path)])
    assert void.exists()
    assert len(read_index(void)) == 7
    assert new.history().withdrawn == set()
    assert start(tmp_path).history().withdrawn == set()
    assert ids(tmp_path)[0] == ["u1"]


def _void_entries(run: Path) -> list[EntryFile]:
    return [read_entry(run, 1, number, "withdrawn") for number in range(4, 8)]


@pytest.mark.parametrize(
    ("covers", "expected"),
    [
        ([], True),
        ([(1, 3)], True),
        ([(1, 3), (4, 2)], True),
        ([(1, 3), (4, 7), (5, 90)], True),
        ([(1, 2)], True),
        ([(1, 4)], False),  # more than was taken over
        ([(1, 2), (4, 2)], False),  # a hole
        ([(2, 3)], False),  # a group that does not count
        ([(1, 3), (4, 7), (5, 1), (6, 1)], False),  # a later group
    ],
)
def test_an_index_counts_when_it_has_the_first_of_what_counts(
    covers: list[tuple[int, int]], expected: bool
) -> None:
    assert counts(covers, [(1, 3), (4, 7), (5, 1000)]) is expected


def test_an_index_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "INDEX_EVERY", 3)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module, "write_index", full)
    journal = start(tmp_path)
    for sequence in (1, 2):
        commit(journal, sequence)
    assert ids(tmp_path) == (["u1", "u2"], 0)
