"""One damaged entry hides no other from readers, and stops a start only if it may change what is applied."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replicast.core.entries import (
    Committed,
    Decided,
    Entry,
    Payload,
    Receipt,
    Refused,
    Saved,
    Scheduled,
    Started,
    Withdrawn,
)
from replicast.core.records import Pending, Proposal, Stage
from replicast.errors import FileDamaged, PayloadRemoved
from replicast.storage import inbox
from replicast.storage import journal as journal_module
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal
from replicast.storage.updates import Updates, has_promised
from replicast.testing.job import DEADLINE_SECS, Job
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.unit.checkpoint.samples import written as saved_state
from tests.unit.played_job import PlayedJob, invoke, made_run


def update_of(id_: str) -> Update:
    return Update(id=id_).add("x", np.ones(3, np.float32))


def digest_of(id_: str) -> str:
    return update_of(id_).content_digest()


def payload(id_: str) -> Payload:
    return Payload(id_, digest_of(id_), None)


def committed(sequence: int, id_: str, trial: Trial | None = None) -> Committed:
    return Committed(sequence, id_, digest_of(id_), 10 * sequence, 0, trial, None if trial is None else 1.0)


def receipt(sequence: int, id_: str) -> Receipt:
    return Receipt(sequence, id_, 10 * sequence, {0: "aa"}, 0.1, 0.1, 1.0, Stage.VERIFIED)


def started(run: Path) -> FileJournal:
    return FileJournal(run, Fence(run, attempt=0))


def written(run: Path, *entries: Entry) -> None:
    journal = started(run)
    for entry in entries:
        journal.write(entry, update_of(entry.id) if isinstance(entry, Payload) else None)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [flip, truncate, remove]


def entry_file(run: Path, kind: str) -> Path:
    (path,) = run.glob(f"groups/*/*.{kind}.json")
    return path


ALL = (
    Started(0, None),
    payload("u1"),
    committed(1, "u1", Trial(4)),
    Decided(1, True, 14, 1, "why", 1.0),
    receipt(1, "u1"),
    Withdrawn("w"),
    Refused("r", ("t",), "why"),
    payload("u2"),
    Scheduled("u2", digest_of("u2"), 20),
    Committed(2, "u2", digest_of("u2"), 20, 0),
)
KINDS = ("started", "decided", "receipt", "withdrawn", "refused", "scheduled")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_readers_show_all_other_entries_and_name_the_damaged_file(
    tmp_path: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    written(tmp_path, *ALL)
    path = entry_file(tmp_path, kind)
    damage(path)
    journal = Updates(tmp_path)
    assert [record.id for record, _ in journal.committed.values()] == ["u1", "u2"]
    (found,) = journal.damaged
    assert path.name.startswith(found.error.path.name)
    views = [journal.committed_update(*journal.committed[sequence]) for sequence in (1, 2)]
    assert [len(view.edits) for view in views] == [1, 1]
    assert (views[0].decided is None) == (kind == "decided")
    assert (len(views[0].receipts) == 0) == (kind == "receipt")
    assert has_promised(tmp_path, "u1"), "it is known whatever else is damaged"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_or_payload_hides_nothing_else(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    directory = tmp_path / "groups" / "000001"
    written(tmp_path, *(entry for n in (1, 2, 3) for entry in (payload(f"u{n}"), committed(n, f"u{n}"))))
    damage(directory / "000004.committed.json")
    damage(directory / "000005.payload.json")
    journal = Updates(tmp_path)
    assert list(journal.committed) == [1, 3]
    assert [one.number for one in journal.damaged] == ([4] if damage is remove else [4, 5])
    third = journal.committed_update(*journal.committed[3])
    assert (third.id, third.step, third.edits, third.nbytes) == ("u3", 30, (), 0)
    assert has_promised(tmp_path, "u1")
    with pytest.raises(FileDamaged, match="000004"):
        has_promised(tmp_path, "u2")


def test_a_group_whose_files_are_all_gone_hides_no_other(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"))
    written(tmp_path, payload("u2"), committed(2, "u2"))
    for path in (*(tmp_path / "groups" / "000001").iterdir(), *tmp_path.glob("groups/*/*.index.jsonl")):
        path.unlink()
    journal = Updates(tmp_path)
    assert list(journal.committed) == [2]
    assert "the entries up to 000002 are missing too" in str(journal.damaged[0])


def test_entries_of_a_group_whose_claim_is_missing_are_not_taken_for_void(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"))
    written(tmp_path, payload("u2"), committed(2, "u2"))
    claim = tmp_path / "groups" / "000002" / "claim.json"
    whole = claim.read_bytes()
    claim.unlink()
    for read in (Updates, started):
        with pytest.raises(FileDamaged, match=r"000002/claim\.json is missing.*Restore it from a backup"):
            read(tmp_path)
    claim.write_bytes(whole)
    journal = started(tmp_path)
    journal.check_start(None)
    assert list(journal.history().committed) == [1, 2]


def test_what_is_no_directory_among_the_groups_stops_nothing(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"))
    (tmp_path / "groups" / "000007").write_bytes(b"junk")
    (tmp_path / "groups" / "000008").symlink_to("000008")
    assert list(Updates(tmp_path).committed) == [1]
    journal = started(tmp_path)
    journal.write(Withdrawn("x"))
    assert list(journal.history().committed) == [1]


def checkpoint(*holds: int, pending: tuple[str, ...] = ()) -> Saved:
    proposals = tuple(
        Pending(Proposal(id_, digest_of(id_), (id_, digest_of(id_))), (id_,)) for id_ in pending
    )
    return Saved(30, 0, frozenset(holds), proposals, None)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_start_goes_on_without_an_entry_that_changes_nothing(
    tmp_path: Path, kind: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, *ALL)
    damage(entry_file(tmp_path, kind))
    left = sorted(tmp_path.glob("groups/000001/*"))
    for _ in range(3):  # a start, and those behind it
        journal = started(tmp_path)
        with caplog.at_level(logging.WARNING):
            journal.check_start(checkpoint(1, 2))
        assert "This start does not need it" in caplog.text
        assert list(journal.history().committed) == [1, 2]
        journal.write(Withdrawn("x"))
        caplog.clear()
    assert sorted(tmp_path.glob("groups/000001/*")) == left, "the damaged file is left in place"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_start_stops_at_a_record_that_is_damaged_and_says_what_to_do(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), receipt(1, "u1"))
    damage(entry_file(tmp_path, "committed"))
    with pytest.raises(FileDamaged) as raised:
        started(tmp_path)
    assert raised.value.path.name.startswith("000002")
    assert "The job cannot start without it" in str(raised.value)
    assert "it may be the record of update 1" in str(raised.value)
    assert "Restore the file from a backup, or start the job in a new run directory" in str(raised.value)


TRIED = (payload("u1"), committed(1, "u1", Trial(4)), Decided(1, False, 14, 1), receipt(1, "u1"))
LATER = (payload("u1"), Scheduled("u1", digest_of("u1"), 50), Withdrawn("y"))
ENDED = (payload("u1"), Scheduled("u1", digest_of("u1"), 50), Withdrawn("u1"), Started(0, None))
REFUSED = (payload("u1"), Scheduled("u1", digest_of("u1"), 50), Refused("u1", (), "why"), Started(0, None))
PENDING = (payload("u1"), Withdrawn("u1"), Started(0, None))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("entries", "kind", "saved", "said"),
    [
        (TRIED, "decided", None, "the trial of update 1 might be decided differently"),
        (LATER, "scheduled", checkpoint(), "update u1 may be scheduled"),
        (ENDED, "withdrawn", checkpoint(), "update u1, which is scheduled, may have been withdrawn"),
        (
            REFUSED,
            "refused",
            checkpoint(),
            "update u1, which is scheduled, may have been withdrawn or refused",
        ),
        (PENDING, "withdrawn", checkpoint(pending=("u1",)), "update u1, which is pending in the checkpoint"),
    ],
    ids=["decided", "scheduled", "withdrawn", "refused", "withdrawn-in-checkpoint"],
)
def test_a_start_stops_at_an_entry_that_may_change_what_is_applied(
    tmp_path: Path,
    entries: tuple[Entry, ...],
    kind: str,
    saved: Saved | None,
    said: str,
    damage: Callable[[Path], None],
) -> None:
    written(tmp_path / "whole", *entries)
    started(tmp_path / "whole").check_start(saved)
    written(tmp_path, *entries)
    path = entry_file(tmp_path, kind)
    damage(path)
    with pytest.raises(FileDamaged) as raised:  # A missing file may be a record too.
        started(tmp_path).check_start(saved)
    assert path.name.startswith(raised.value.path.name)
    assert said in str(raised.value) or damage is remove
    assert "Restore the file from a backup" in str(raised.value)


def test_an_update_in_the_inbox_that_may_have_been_withdrawn_stops_the_start(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of("u1"))
    written(tmp_path, payload("u1"), Withdrawn("u1"), Started(0, None))
    flip(entry_file(tmp_path, "withdrawn"))
    with pytest.raises(FileDamaged, match="update u1, which is in the inbox, may have been withdrawn"):
        started(tmp_path).check_start(None)
    os.utime(path.as_path())  # It is submitted after what follows the damaged entry.
    started(tmp_path).check_start(None)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["committed", "scheduled", "pending"])
def test_a_start_stops_at_a_payload_that_it_needs_and_only_then(
    tmp_path: Path, what: str, damage: Callable[[Path], None]
) -> None:
    ends: dict[str, tuple[Entry, ...]] = {
        "committed": (committed(1, "u1"),),
        "scheduled": (Scheduled("u1", digest_of("u1"), 50),),
        "pending": (),
    }
    written(tmp_path, Started(0, None), payload("u1"), *ends[what], Started(1, None))
    damage(entry_file(tmp_path, "payload"))
    saved = checkpoint(pending=("u1",)) if what == "pending" else checkpoint()
    journal = started(tmp_path)
    with pytest.raises(FileDamaged) as raised:
        journal.check_start(saved)
    assert raised.value.path.name.startswith("000002")
    assert "u1" in str(raised.value) or "update 1, committed at step 10" in str(raised.value)
    assert (tmp_path / "groups" / "000001" / "000002.safetensors").exists(), "a backup has only the entry"
    if what == "committed":
        journal.check_start(checkpoint(1))
    if what == "pending":
        journal.check_start(checkpoint())


@pytest.mark.parametrize("damage", [truncate, remove])
def test_a_start_stops_at_values_that_it_needs_and_names_the_file(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    written(tmp_path, payload("u1"), Scheduled("u1", digest_of("u1"), 50))
    damage(tmp_path / "groups" / "000001" / "000001.safetensors")
    with pytest.raises(FileDamaged, match=r"000001\.safetensors.*update u1 is scheduled for step 50"):
        started(tmp_path).check_start(checkpoint())


def test_an_entry_that_is_back_from_a_backup_ends_the_damage(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), receipt(1, "u1"))
    path = entry_file(tmp_path, "committed")
    whole = path.read_bytes()
    path.unlink()
    for _ in range(2):
        with pytest.raises(FileDamaged):
            started(tmp_path)
    path.write_bytes(whole)
    started(tmp_path).check_start(None)
    assert Updates(tmp_path).damaged == []


def test_an_index_that_has_what_a_damaged_file_said_is_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "INDEX_EVERY", 4)
    written(tmp_path, payload("u1"), committed(1, "u1"), receipt(1, "u1"), Withdrawn("x"), Withdrawn("y"))
    for name in ("000002.committed.json", "000005.withdrawn.json"):
        flip(tmp_path / "groups" / "000001" / name)
    for _ in range(3):
        journal = started(tmp_path)
        journal.check_start(None)
        for number in range(6):
            journal.write(Withdrawn(f"z{number}"))
        assert list(journal.history().committed) == [1]
    assert [one.error.path.name for one in Updates(tmp_path).damaged] == ["000005.withdrawn.json"]
    flip(tmp_path / "groups" / "000001" / "000001.payload.json")
    view = Updates(tmp_path)
    assert view.committed_update(*view.committed[1]).id == "u1"
    assert "000001.payload.json" in [one.error.path.name for one in view.damaged]


def test_a_start_from_scratch_that_needs_removed_values_is_told_to_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicast.storage.journal.REVERTIBLE_BYTES", 0)
    fence = Fence(tmp_path, attempt=0)
    journal = FileJournal(tmp_path, fence)
    for sequence in (1, 2):
        journal.write(payload(f"u{sequence}"), update_of(f"u{sequence}"))
        journal.write(committed(sequence, f"u{sequence}"))
    journal.remove_payloads({1}, frozenset())
    with pytest.raises(FileDamaged, match="cannot be read: No such file"):
        journal.check_start(None)  # There is no checkpoint, so nothing was removed on purpose.
    saved_state(CheckpointStore(tmp_path, fence), 12, sequence=1)
    again = started(tmp_path)
    again.check_start(checkpoint(1))
    with pytest.raises(PayloadRemoved) as raised:
        again.check_start(None)
    assert "every checkpoint that is kept contains it, and this start has restored none" in str(raised.value)
    assert "Call replicas.restore() before training" in str(raised.value)


def test_a_start_that_cannot_go_on_names_the_checkpoint_to_go_on_from_elsewhere(tmp_path: Path) -> None:
    fence = Fence(tmp_path, attempt=0)
    journal = FileJournal(tmp_path, fence)
    journal.write(payload("u1"), update_of("u1"))
    journal.write(committed(1, "u1"))
    saved_state(CheckpointStore(tmp_path, fence), 12, sequence=1)
    flip(entry_file(tmp_path, "committed"))
    with pytest.raises(FileDamaged, match=r"directory: copy .*/00000012-1 to NEW/checkpoints/ and start"):
        started(tmp_path)


def bias(value: float, id_: str) -> Update:
    return Update(id=id_).add("dense/bias", np.full(3, value, np.float32))


def trained(run: Path) -> None:
    """A job of two workers: one update, then a checkpoint-free end."""
    with Job(2, started(run)) as job:
        ticket = job.workers[1].session.propose(bias(1.0, "first"))
        job.train(4)
        assert ticket.result(DEADLINE_SECS).sequence == 1


def test_a_job_trains_on_beside_a_damaged_receipt(tmp_path: Path) -> None:
    trained(tmp_path)
    truncate(entry_file(tmp_path, "receipt"))
    with Job(2, started(tmp_path), attempt=1) as job:
        ticket = job.workers[0].session.propose(bias(2.0, "second"))
        job.train(6)
        assert ticket.result(DEADLINE_SECS).sequence == 2
        assert [float(worker.state.values["dense/bias"][0]) for worker in job.workers] == [3.0, 3.0]


@pytest.mark.parametrize("name", ["000001.payload.json", "000001.safetensors"])
def test_a_job_whose_values_are_damaged_ends_with_their_file_named(tmp_path: Path, name: str) -> None:
    trained(tmp_path)
    flip(tmp_path / "groups" / "000001" / name)
    job = Job(2, started(tmp_path), attempt=1)
    with pytest.raises(FileDamaged, match=name), job:
        job.train(6)


def scheduled_run(run: Path) -> None:
    with Job(2, started(run)) as job:
        job.workers[1].session.propose(bias(1.0, "later"), at_step=6)
        job.train(3)


def test_a_scheduled_update_whose_values_are_damaged_is_not_refused_for_good(tmp_path: Path) -> None:
    scheduled_run(tmp_path)
    path = tmp_path / "groups" / "000001" / "000001.safetensors"
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(FileDamaged, match=r"000001\.safetensors"), Job(2, started(tmp_path)) as job:
        job.train(8)
    path.write_bytes(whole)
    with Job(2, started(tmp_path), attempt=2) as job:
        job.train(8)
        assert [worker.applied for worker in job.workers] == [[(6, "later")]] * 2


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two verified updates, seen from its parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    made = made_run()
    job = PlayedJob(made)
    for id_ in ("first", "second"):
        inbox.submit(made, Update(id=id_, author="ann@box").assign("learning_rate", 1))
        job.act_all()
    return made


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", range(1, 6))  # Nothing shows that the last one is missing.
def test_log_status_show_and_push_show_everything_else(
    run: Path, number: int, damage: Callable[[Path], None]
) -> None:
    (path,) = run.glob(f"groups/000002/{number:06d}.*.json")
    damage(path)
    name = path.name if damage is not remove else path.name[:6]
    other = "second" if number <= 3 else "first"
    log = invoke("log", run, "--json")
    listed = [json.loads(line) for line in log.stdout.splitlines()]
    lost = "committed" in path.name
    assert log.exit_code == 1
    assert name in log.stderr
    assert len(listed) == (1 if lost else 2)
    shown = next(one for one in listed if one["id"] == other)
    assert (shown["stage"], shown["author"], len(shown["edits"])) == ("verified", "ann@box", 1)
    status = invoke("status", run)
    assert (status.exit_code, name in status.stderr, "ann@box" in status.stdout) == (1, True, True)
    show = invoke("show", run, other)
    assert (show.exit_code, name in show.stderr, "ann@box" in show.stdout) == (0, True, True)
    push = invoke("push", run, "--set", "learning_rate=2", "--id", "third")
    assert (push.exit_code, name in push.stderr, "pushed third" in push.stdout) == (0, True, True)
    plain = invoke("log", run)
    assert ("not known: its entry is damaged" in plain.stdout) == ("payload" in path.name)


def test_an_update_that_is_not_found_may_be_the_damaged_one(run: Path) -> None:
    flip(run / "groups" / "000002" / "000005.committed.json")
    result = invoke("show", run, "2")
    assert result.exit_code == 1
    assert "There is no update 2" in result.stderr
    assert "000005.committed.json is damaged" in result.stderr
