"""The journal: exactly the entries that were written are read back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from replicast.core.entries import (
    Before,
    Committed,
    Decided,
    Entry,
    Payload,
    Receipt,
    Refused,
    Saved,
    Scheduled,
    Stage,
    Started,
    Withdrawn,
)
from replicast.errors import FileDamaged, JobFailed, PayloadRemoved
from replicast.storage import journal as journal_module
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import (
    FileJournal,
    Journal,
    MemoryJournal,
    NotWritten,
    PerhapsWritten,
    StoredJournal,
    Updates,
    committed_updates,
    load_update,
    summary,
)
from replicast.update.trial import Trial, TrialOutcome
from replicast.update.update import Update
from tests.unit.logs import lines_of, log_of

OUTCOME = TrialOutcome(1, "reverted", 14, "loss", 1.0, 2.0, "why")


def update_of(number: int) -> Update:
    return Update(id=f"u{number}", note="why").add("x", np.full(3, number, np.float32)).scale("y", 2)


def payload_of(update: Update) -> Payload:
    return Payload(update.id, update.content_digest(), object(), "me", update.note)


def committed_of(sequence: int) -> Committed:
    update = update_of(sequence)
    return Committed(sequence, update.id, update.content_digest(), 10 * sequence, 0, workers=2)


def receipt_of(sequence: int, attempt: int = 0) -> Receipt:
    digests = {0: "aa", 11: "aa"}
    return Receipt(sequence, f"u{sequence}", 10, digests, 0.25, 0.125, 2.5, Stage.VERIFIED, None, attempt)


def entries_of_each_kind() -> list[Entry]:
    return [
        Started(3, None),
        Started(4, 17),
        payload_of(update_of(1)),
        Scheduled("u1", update_of(1).content_digest(), 10, Trial(4, "accuracy", -0.5, "max")),
        Committed(1, "u1", update_of(1).content_digest(), 10, 4, Trial(4), 1.0, True, 2),
        Decided(1, False, 14, 1, "why", 2.0),
        Receipt(1, "u1", 10, {0: "aa", 11: "bb"}, 0.25, 0.5, 2.5, Stage.REVERTED, OUTCOME, 4, (7, 7)),
        Withdrawn("u2"),
        Refused("u3", ("a", "b"), "why", whole=False),
    ]


def writer(run_dir: Path) -> FileJournal:
    """A journal of a new group."""
    return FileJournal(run_dir, Fence(run_dir, attempt=0))


def folder(run_dir: Path) -> Path:
    """Where the first group writes."""
    return run_dir / "groups" / "000001"


def write(journal: Journal, entry: Entry) -> None:
    journal.write(entry, update_of(int(entry.id[1:])) if isinstance(entry, Payload) else None)


def commit(journal: Journal, sequence: int) -> Committed:
    write(journal, payload_of(update_of(sequence)))
    record = committed_of(sequence)
    journal.write(record)
    return record


def load(journal: Journal, sequence: int) -> Update:
    update = update_of(sequence)
    return journal.load(update.id, update.content_digest())


@pytest.fixture(params=["files", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    return writer(tmp_path) if request.param == "files" else MemoryJournal()


def test_what_is_committed_is_read_back_in_order(journal: Journal) -> None:
    assert journal.history().committed == {}
    records = [commit(journal, sequence) for sequence in range(1, 12)]
    history = journal.history()
    assert list(history.committed.values()) == records
    for sequence in range(1, 12):
        loaded = load(journal, sequence)
        assert loaded.content_digest() == update_of(sequence).content_digest()
        assert (loaded.id, loaded.note) == (f"u{sequence}", "why")


def test_every_kind_of_entry_is_read_back_as_it_was(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for entry in entries_of_each_kind():
        write(journal, entry)
    read = [line.entry for line in StoredJournal(tmp_path).lines]
    expected = entries_of_each_kind()
    payload, given = read.pop(2), expected.pop(2)
    assert isinstance(payload, Payload)
    assert isinstance(given, Payload)
    assert (payload.id, payload.digest) == (given.id, given.digest)
    assert (payload.author, payload.note, payload.content, payload.file) == (
        "me",
        "why",
        UNSET,
        "000003.safetensors",
    )
    assert read == expected
    written = {type(entry) for entry in read}
    assert written == {Started, Scheduled, Committed, Decided, Receipt, Withdrawn, Refused}


def test_a_metric_that_is_no_finite_number_was_not_measured(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    journal.write(Committed(2, "u1", "d", 20, 0, Trial(4), float("nan")))
    journal.write(Decided(2, False, 24, 2, "why", float("inf")))
    record, decided = (line.entry for line in StoredJournal(tmp_path).lines[-2:])
    assert isinstance(record, Committed)
    assert isinstance(decided, Decided)
    assert (record.before, decided.during) == (None, None)


def test_a_number_is_read_back_although_its_author_gave_an_integer(tmp_path: Path) -> None:
    entries = [
        Scheduled("u1", "d", 10, Trial(4, max_increase=1)),
        Receipt(1, "u1", 10, {0: "aa"}, 0, 0, 2, Stage.VERIFIED),
    ]
    journal = writer(tmp_path)
    for entry in entries:
        journal.write(entry)
    stored = StoredJournal(tmp_path)
    assert not stored.damaged
    assert [line.entry for line in stored.lines] == entries


def test_text_that_is_not_valid_unicode_is_escaped(tmp_path: Path) -> None:
    writer(tmp_path).write(Refused("u1", ("file \udcff",), "no file \udcff"))
    run = Updates(tmp_path)
    assert str(run.ended["u1"].refusal) == "no file \\udcff."
    assert run.history.refused == {"file \\udcff"}
    assert not run.damaged


def test_a_payload_without_its_update_and_a_checkpoint_are_mistakes(journal: Journal) -> None:
    with pytest.raises(ValueError, match="Received: None"):
        journal.write(payload_of(update_of(1)))
    with pytest.raises(ValueError, match="Received: u2"):
        journal.write(payload_of(update_of(1)), update_of(2))
    with pytest.raises(ValueError, match="the checkpoint store"):
        journal.write(Saved(3, 0, frozenset(), (), None))
    with pytest.raises((FileDamaged, PayloadRemoved)):
        load(journal, 1)


def test_an_update_has_the_next_number_or_is_not_written(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    record = commit(journal, 1)
    for sequence in (1, 3):
        with pytest.raises(ValueError, match="The next update is 2"):
            journal.write(committed_of(sequence))
    assert list(writer(tmp_path).history().committed.values()) == [record]


def test_what_the_first_update_of_a_run_is_reached_by_is_on_disk_too(
    tmp_path: Path, synced: list[Path]
) -> None:
    run_dir = tmp_path / "runs" / "first"
    commit(writer(run_dir), 1)
    assert {tmp_path, tmp_path / "runs", run_dir, run_dir / "groups", folder(run_dir)} <= set(synced)


def test_what_a_coordinator_that_died_left_behind_is_ignored_and_removed_by_the_next(tmp_path: Path) -> None:
    commit(writer(tmp_path), 1)
    left = ("000003.safetensors", ".tmp-123", "x.safetensors")
    for name in left:
        (folder(tmp_path) / name).write_bytes(b"a coordinator died here")
    assert len(committed_updates(tmp_path)) == 1
    journal = writer(tmp_path)
    assert not [name for name in left if (folder(tmp_path) / name).exists()]
    commit(journal, 2)
    assert [load(journal, sequence).id for sequence in (1, 2)] == ["u1", "u2"]


def test_every_flipped_bit_of_a_log_is_noticed(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for entry in entries_of_each_kind():
        write(journal, entry)
    whole = log_of(tmp_path).read_bytes()
    end = len(whole) - len(
        lines_of(tmp_path)[-1]
    )  # Whether the last line is torn or damaged is another question.
    for bit in range(0, 8 * end, 31):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        log_of(tmp_path).write_bytes(flipped)
        (problem,) = read_chain(tmp_path).problems
        assert "log.jsonl is damaged" in problem
    log_of(tmp_path).write_bytes(whole)
    assert len(committed_updates(tmp_path)) == 1


@pytest.mark.parametrize("zeros", [False, True])
def test_a_line_that_did_not_reach_the_disk_whole_was_never_written(tmp_path: Path, zeros: bool) -> None:
    commit(writer(tmp_path), 1)
    whole, last = log_of(tmp_path).read_bytes(), len(lines_of(tmp_path)[-1])
    for length in range(1, last):
        torn = whole[: len(whole) - length] + (b"\0" * (length - 1) + b"\n" if zeros and length > 1 else b"")
        log_of(tmp_path).write_bytes(torn)
        assert committed_updates(tmp_path) == []
    journal = writer(tmp_path)
    journal.check_start(None)
    assert journal.history().committed == {}
    commit(journal, 1)
    assert [one.id for one in committed_updates(tmp_path)] == ["u1"]


def test_a_log_that_somebody_else_has_written_to_takes_no_more_entries(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    with log_of(tmp_path).open("ab") as file:
        file.write(b"{")
    with pytest.raises(FileDamaged, match="wrong size"):
        journal.write(Withdrawn("x"))


def test_a_start_reads_each_log_once_however_many_entries_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real: Callable[..., int] = os.open

    def counted(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_ACCMODE | os.O_DIRECTORY) == os.O_RDONLY:
            opened.append(Path(path).name)
        return real(path, flags, *args, **kwargs)

    for sequences in ((1, 2, 3), (4, 5, 6)):
        journal = writer(tmp_path)
        for sequence in sequences:
            commit(journal, sequence)
    for _ in range(5):  # Groups without entries are not read.
        writer(tmp_path)
    with monkeypatch.context() as patching:
        patching.setattr(os, "open", counted)
        assert len(committed_updates(tmp_path)) == 6
    assert opened == ["log.jsonl"] * 4  # the last claim, and the logs of three groups


def test_an_update_costs_so_many_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = writer(tmp_path)
    synced: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(path.name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    counts = []
    for step in (
        lambda: write(journal, payload_of(update_of(1))),
        lambda: journal.write(committed_of(1)),
        journal.sync,
        lambda: journal.write(Before(1, "u1", journal.stage_before(update_of(1)))),
        lambda: journal.write(receipt_of(1)),
        journal.sync,
        journal.sync,
    ):
        synced.clear()
        step()
        counts.append(len(synced))
    # Values take two: the file and its directory. A line takes one, which nobody waits for in two cases.
    assert counts == [2, 1, 0, 3, 0, 1, 0]


def test_a_line_that_cannot_be_synced_later_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = writer(tmp_path)
    journal.write(receipt_of(1))
    with monkeypatch.context() as patched:
        fail_at(patched, 0, [])
        with pytest.raises(JobFailed, match=r"cannot be synced \(No space"):
            journal.sync()
    journal.sync()


def test_every_flipped_byte_of_a_payload_is_noticed(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    path = folder(tmp_path) / "000001.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(FileDamaged, match="sha256"):
            load(journal, 1)
    path.write_bytes(whole[:100])
    with pytest.raises(FileDamaged, match="sha256"):
        load_update(tmp_path, 1)
    path.write_bytes(whole + b"x")
    with pytest.raises(FileDamaged, match="too large"):
        load_update(tmp_path, 1)
    path.write_bytes(whole)
    assert load(journal, 1).id == "u1"


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int, fired: list[str]) -> None:
    """Makes the given one of all writes, syncs and renames fail, counted together from 0."""
    count = iter(range(1000))
    for name in ("write", "fsync", "rename"):
        real: Callable[..., Any] = getattr(os, name)

        def faulty(*args: Any, real: Callable[..., Any] = real, name: str = name, **kwargs: Any) -> Any:
            if next(count) == call:
                fired.append(name)
                if name == "write":  # A disk that is nearly full takes the beginning.
                    real(args[0], args[1][: len(args[1]) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, faulty)


@pytest.mark.parametrize("entry", [payload_of(update_of(2)), committed_of(2)], ids=["payload", "committed"])
def test_wherever_the_disk_fails_an_entry_is_written_or_not_or_unknown(tmp_path: Path, entry: Entry) -> None:
    outcomes: list[tuple[str | None, str]] = []
    for call in range(100):
        run_dir = tmp_path / str(call)
        fired: list[str] = []
        journal = writer(run_dir)
        commit(journal, 1)
        before = {path.name: path.read_bytes() for path in folder(run_dir).iterdir()}
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(monkeypatch, call, fired)
            try:
                write(journal, entry)
                outcome = "written"
            except NotWritten as error:
                outcome = "not written" if "No space left on device). Free space" in str(error) else ""
            except PerhapsWritten:
                outcome = "unknown"
        outcomes.append((fired[0] if fired else None, outcome))
        if outcome == "not written":
            assert {path.name: path.read_bytes() for path in folder(run_dir).iterdir()} == before
            assert len(StoredJournal(run_dir).lines) == 2
            write(journal, entry)
        else:
            journal.write(receipt_of(1))  # It has its place, whatever becomes of it.
        assert len(FileJournal(run_dir, Fence(run_dir, attempt=1)).history().committed) in (1, 2)
        assert type(StoredJournal(run_dir).lines[2].entry) is type(entry)
        if not fired:
            break
    last = ["written"] if isinstance(entry, Payload) else ["unknown", "written"]
    assert [outcome for _, outcome in outcomes[-len(last) :]] == last
    assert {outcome for _, outcome in outcomes[: -len(last)]} == {"not written"}
    called = {"write", "fsync", "rename"} if isinstance(entry, Payload) else {"write", "fsync"}
    assert {name for name, _ in outcomes} == {*called, None}


def test_summaries_say_what_is_written() -> None:
    update = (
        Update()
        .add("a", np.ones((2, 3), np.float32))
        .scale("b", 2)
        .add_rows("c", [5, 9], np.ones((2, 4), np.float32))
        .add_low_rank("d", np.ones((7, 1), np.float32), np.ones((1, 8), np.float32))
    )
    assert [summary(edit) for edit in update.edits] == [
        {"operation": "add", "variable": "a", "shape": [2, 3]},
        {"operation": "scale", "variable": "b", "shape": None, "value": 2.0},
        {"operation": "add_rows", "variable": "c", "shape": [2, 4]},
        {"operation": "add_low_rank", "variable": "d", "shape": [7, 8]},
    ]


def test_a_journal_in_memory_keeps_all_entries_and_the_values_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "KEPT_BYTES", 30)  # of which each has 12
    journal = MemoryJournal()
    for sequence in range(1, 5):
        commit(journal, sequence)
    write(journal, payload_of(update_of(4)))
    assert list(journal.history().committed) == [1, 2, 3, 4]
    for sequence in (1, 2):
        with pytest.raises(PayloadRemoved, match="in memory"):
            load(journal, sequence)
    assert [load(journal, sequence).id for sequence in (3, 4)] == ["u3", "u4"]


def test_all_that_is_known_of_an_update_is_joined(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for entry in entries_of_each_kind():
        write(journal, entry)
    journal.write(receipt_of(1, attempt=5))
    (update,) = committed_updates(tmp_path)
    assert (update.scheduled, update.heals, update.trial, update.before) == (True, True, Trial(4), 1.0)
    assert update.outcome == OUTCOME
    assert [receipt.attempt for receipt in update.receipts] == [4, 5]
    assert update.stage is Stage.VERIFIED
    assert [edit["operation"] for edit in update.edits] == ["add", "scale"]
    assert update.nbytes == (folder(tmp_path) / "000003.safetensors").stat().st_size
    assert Updates(tmp_path).history.withdrawn == {"u2"}
    assert [(one.id, one.stage) for one in Updates(tmp_path).ended.values()] == [("u2", Stage.WITHDRAWN)]


def test_the_journal_tells_who_what_and_when_of_what_was_refused_or_withdrawn(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for number in (1, 2):
        write(journal, payload_of(update_of(number)))
    journal.write(Withdrawn("u1"))
    journal.write(Refused("u2", ("c",), "too late"))
    withdrawn, refused = Updates(tmp_path).ended.values()
    for one in (withdrawn, refused):
        assert (one.author, one.note, len(one.edits), one.at > 0) == ("me", "why", 2, True)
    assert (withdrawn.stage, refused.stage) == (Stage.WITHDRAWN, Stage.REFUSED)
    assert str(refused.refusal) == "too late."


def test_what_is_scheduled_waits_until_it_is_committed_withdrawn_or_refused(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for number in (1, 2, 3, 4):
        write(journal, payload_of(update_of(number)))
        journal.write(Scheduled(f"u{number}", update_of(number).content_digest(), 100 - number))
    assert [one.id for one in Updates(tmp_path).scheduled()] == ["u4", "u3", "u2", "u1"]
    journal.write(committed_of(1))
    journal.write(Withdrawn("u2"))
    journal.write(Refused("u3", (), "why"))
    (left,) = Updates(tmp_path).scheduled()
    assert (left.id, left.step, left.author, len(left.edits)) == ("u4", 96, "me", 2)
    assert [update.stage for update in committed_updates(tmp_path)] == [Stage.COMMITTED]
