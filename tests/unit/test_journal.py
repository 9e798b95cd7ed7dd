import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast import anyjournal
from replicast.errors import FileDamaged, UpdateRefused
from replicast.fence import Fence
from replicast.journal import AnyJournal, Journal, MemoryJournal, Receipt, Record, StagedPayload, summarized
from replicast.strictjson import sealed, unsealed
from replicast.trial import TrialOutcome
from replicast.update import Stage, Update


def update_of(number: int) -> Update:
    return Update(id=f"u{number}", note="why").add("x", np.full(3, number, np.float32)).scale("y", 2)


def record_of(sequence: int, update: Update, staged: StagedPayload) -> Record:
    return Record(
        sequence=sequence,
        id=update.id,
        step=10 * sequence,
        sha256=staged.sha256,
        nbytes=staged.nbytes,
        author=update.author,
        note=update.note,
        edits=summarized(update.edits),
        content_digest=update.content_digest(),
        workers=2,
        attempt=0,
        scheduled=False,
        committed_at=1.5,
    )


def receipt_of(sequence: int) -> Receipt:
    return Receipt(sequence, f"u{sequence}", 10, {0: "aa", 11: "aa"}, 0.25, 0.125, 2.5, Stage.VERIFIED)


def writer(run_dir: Path) -> Journal:
    """A journal of a new group."""
    return Journal(run_dir, Fence(run_dir, attempt=0))


def folder(run_dir: Path) -> Path:
    """Where the first group writes."""
    return run_dir / "groups" / "000001"


def commit(journal: AnyJournal, sequence: int) -> Record:
    update = update_of(sequence)
    staged = journal.stage(update)
    record = record_of(sequence, update, staged)
    journal.commit(staged, record)
    return record


@pytest.fixture(params=["files", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> AnyJournal:
    return writer(tmp_path) if request.param == "files" else MemoryJournal()


def test_what_is_committed_is_read_back_in_order(journal: AnyJournal) -> None:
    assert journal.records() == []
    records = [commit(journal, sequence) for sequence in range(1, 12)]
    assert journal.records() == records
    for sequence in range(1, 12):
        loaded = journal.load(sequence)
        assert loaded.content_digest() == update_of(sequence).content_digest()
        assert (loaded.id, loaded.note) == (f"u{sequence}", "why")


def test_what_is_only_staged_is_nothing_to_anybody(journal: AnyJournal) -> None:
    staged = journal.stage(update_of(1))
    assert journal.records() == []
    journal.discard(staged)
    journal.discard(staged)
    journal.stage(update_of(2))
    journal.clean()
    assert journal.records() == []
    assert commit(journal, 1) == journal.records()[0]


def test_receipts_are_read_back(journal: AnyJournal) -> None:
    commit(journal, 1)
    assert journal.receipts() == {}
    journal.write_receipt(receipt_of(1))
    assert journal.receipts() == {1: receipt_of(1)}
    assert len(journal.records()) == 1


def test_a_place_beyond_the_next_and_a_record_of_another_are_mistakes(journal: AnyJournal) -> None:
    staged = journal.stage(update_of(1))
    with pytest.raises(ValueError, match="Received: 2"):
        journal.commit(staged, record_of(2, update_of(1), staged))
    with pytest.raises(ValueError, match="Received: u5 for u1"):
        journal.commit(staged, record_of(1, update_of(5), staged))
    with pytest.raises(FileDamaged):
        journal.load(7)


def test_a_second_journal_sees_what_the_first_wrote(tmp_path: Path) -> None:
    record = commit(writer(tmp_path), 1)
    assert Journal(tmp_path).records() == [record]
    assert sorted(path.name for path in folder(tmp_path).iterdir()) == [
        "000001.record.json",
        "000001.safetensors",
        "claim.json",
    ]
    with pytest.raises(ValueError, match="Only the group that has claimed"):
        commit(Journal(tmp_path), 2)


def test_what_the_first_update_of_a_run_is_reached_by_is_on_disk_too(
    tmp_path: Path, synced: list[Path]
) -> None:
    run_dir = tmp_path / "runs" / "first"
    commit(writer(run_dir), 1)
    assert {tmp_path, tmp_path / "runs", run_dir, run_dir / "groups", folder(run_dir)} <= set(synced)


def test_the_millionth_entry_has_more_digits(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    journal._writer._entries = 999_999  # rather than to write them all
    journal.write_receipt(receipt_of(1))
    assert (folder(tmp_path) / "1000000.receipt.json").exists()
    with pytest.raises(FileDamaged, match="000002"):
        journal.records()


def test_a_place_that_is_taken_is_given_to_no_other(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    record = commit(journal, 1)
    staged = journal.stage(update_of(2))
    with pytest.raises(ValueError, match="The next place is 2"):
        journal.commit(staged, record_of(1, update_of(2), staged))
    assert journal.records() == [record]


def test_what_a_coordinator_that_died_left_behind_is_ignored_and_removed_by_the_next(tmp_path: Path) -> None:
    commit(writer(tmp_path), 1)
    left = ("000002.safetensors", ".tmp-123", ".pending-x.safetensors")
    for name in left:
        (folder(tmp_path) / name).write_bytes(b"a coordinator died here")
    journal = writer(tmp_path)
    assert len(journal.records()) == 1
    journal.clean()
    assert not [name for name in left if (folder(tmp_path) / name).exists()]
    commit(journal, 2)
    assert [journal.load(sequence).id for sequence in (1, 2)] == ["u1", "u2"]


def damage_json(directory: Path) -> str:
    (directory / "000001.record.json").write_text("{")
    return "000001.record.json"


def damage_fields(directory: Path) -> str:
    (directory / "000001.record.json").write_bytes(sealed({"sequence": "x", "group": 1, "entry": 1}))
    return "000001.record.json"


def damage_number(directory: Path) -> str:
    fields = unsealed((directory / "000001.record.json").read_bytes())
    (directory / "000001.record.json").write_bytes(sealed(fields | {"sequence": 2}))
    return "000001.record.json"


def damage_place(directory: Path) -> str:
    (directory / "000001.record.json").write_bytes((directory / "000002.record.json").read_bytes())
    return "000001.record.json"


def damage_hole(directory: Path) -> str:
    (directory / "000001.record.json").unlink()
    return "000001"


def damage_missing_payload(directory: Path) -> str:
    (directory / "000001.safetensors").unlink()
    return "000001.safetensors"


def damage_short_payload(directory: Path) -> str:
    os.truncate(directory / "000001.safetensors", 100)
    return "000001.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        damage_json,
        damage_fields,
        damage_number,
        damage_place,
        damage_hole,
        damage_missing_payload,
        damage_short_payload,
    ],
)
def test_damage_is_named_by_its_file(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    commit(journal, 2)
    name = damage(folder(tmp_path))
    with pytest.raises(FileDamaged) as raised:
        Journal(tmp_path).records()
    assert raised.value.path.name == name
    with pytest.raises(FileDamaged):
        Journal(tmp_path).load(1)


@pytest.mark.parametrize("kind", ["record", "receipt", "moved", "trial", "withdrawn"])
def test_a_flipped_bit_of_an_entry_is_noticed(tmp_path: Path, kind: str) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    journal.write_receipt(receipt_of(1))
    journal.move(1, 9)
    journal.write_outcome(TrialOutcome(1, "kept", 12, "loss", 1.0, 0.5, "why"))
    journal.withdraw(1)
    (path,) = folder(tmp_path).glob(f"*.{kind}.json")
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 101):  # test_strictjson.py: every one
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(FileDamaged, match=f"{kind}.json"):
            all_of(Journal(tmp_path))
    path.write_bytes(whole)
    assert all_of(Journal(tmp_path)) == [1] * 5


def all_of(journal: Journal) -> list[int]:
    """Reads everything; how much there is of each kind."""
    details = (journal.receipts(), journal.moves(), journal.outcomes(), journal.withdrawn())
    return [len(journal.records()), *map(len, details)]


def test_every_flipped_byte_of_a_payload_is_noticed(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    path = folder(tmp_path) / "000001.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(FileDamaged, match="sha256"):
            journal.load(1)
    path.write_bytes(whole)
    journal.load(1)


def test_a_damaged_receipt_is_named(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    commit(journal, 1)
    described = {"sequence": 1, "stage": "dreamt", "group": 1, "entry": 2}
    (folder(tmp_path) / "000002.receipt.json").write_bytes(sealed(described))
    with pytest.raises(FileDamaged, match=r"000002\.receipt\.json"):
        journal.receipts()


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int, fired: list[str]) -> None:
    """Makes the given one of all writes, syncs and renames fail, counted together from 0."""
    count = iter(range(1000))
    for name in ("write", "fsync", "rename"):
        real: Callable[..., Any] = getattr(os, name)

        def faulty(*args: Any, real: Callable[..., Any] = real, name: str = name, **kwargs: Any) -> Any:
            if next(count) == call:
                fired.append(name)
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, faulty)


def test_wherever_the_disk_fails_an_update_is_committed_or_not_or_nobody_can_know(tmp_path: Path) -> None:
    outcomes: list[tuple[str | None, str]] = []
    for call in range(100):
        run_dir, fired = tmp_path / str(call), []
        journal = writer(run_dir)
        commit(journal, 1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(monkeypatch, call, fired)
            try:
                commit(journal, 2)
                outcome = "committed"
            except UpdateRefused:
                outcome = "refused"
            except FileDamaged:
                outcome = "unknown"
        outcomes.append((fired[0] if fired else None, outcome))
        names = {path.name for path in folder(run_dir).iterdir()}
        expected = {"claim.json", "000001.record.json", "000001.safetensors"}
        if outcome == "refused":
            assert names == expected
            assert len(Journal(run_dir).records()) == 1
        else:
            assert names == expected | {"000002.record.json", "000002.safetensors"}
            assert Journal(run_dir).load(2).id == "u2"
        if not fired:
            break
    assert [outcome for _, outcome in outcomes[-2:]] == ["unknown", "committed"]
    assert {outcome for _, outcome in outcomes[:-2]} == {"refused"}
    assert {name for name, _ in outcomes} == {"write", "fsync", "rename", None}


def test_summaries_say_what_is_written() -> None:
    update = (
        Update()
        .add("a", np.ones((2, 3), np.float32))
        .scale("b", 2)
        .add_rows("c", [5, 9], np.ones((2, 4), np.float32))
        .add_low_rank("d", np.ones((7, 1), np.float32), np.ones((1, 8), np.float32))
    )
    assert summarized(update.edits) == (
        {"operation": "add", "variable": "a", "shape": [2, 3]},
        {"operation": "scale", "variable": "b", "shape": None},
        {"operation": "add_rows", "variable": "c", "shape": [2, 4]},
        {"operation": "add_low_rank", "variable": "d", "shape": [7, 8]},
    )


def test_a_journal_in_memory_keeps_the_records_of_all_and_the_values_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(anyjournal, "KEPT_BYTES", 30)  # of which each has 12
    journal = MemoryJournal()
    for sequence in range(1, 5):
        commit(journal, sequence)
    assert [record.sequence for record in journal.records()] == [1, 2, 3, 4]
    for sequence in (1, 2):
        with pytest.raises(FileDamaged, match="kept no longer"):
            journal.load(sequence)
    assert [journal.load(sequence).id for sequence in (3, 4)] == ["u3", "u4"]
