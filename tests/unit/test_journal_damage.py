"""What a journal loses: damage hides no other entry; a start stops where it needs what is not there."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.core.entries import (
    Committed,
    Decided,
    Entry,
    Payload,
    Pending,
    Proposal,
    Receipt,
    Refused,
    Saved,
    Scheduled,
    Stage,
    Started,
    Withdrawn,
)
from replicast.errors import FileDamaged, PayloadRemoved, UpdateRefused
from replicast.files import RunPath
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import (
    FileJournal,
    MemoryJournal,
    Updates,
    committed_updates,
    load_update,
    undo,
)
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, eventually
from tests.unit.checkpoint.samples import written as saved_state
from tests.unit.logs import (
    Damage,
    cut,
    damage,
    flip,
    join,
    kind_of,
    lines_of,
    log_of,
    remove,
    rewritten,
    sealed,
    split,
)
from tests.unit.played_job import PlayedJob, invoke, made_run
from tests.unit.runtime.playing import scheduled


@pytest.fixture(autouse=True)
def nothing_for_reverts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.storage.journal.REVERTIBLE_BYTES", 0)


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


DAMAGES = [flip, cut, remove, split]


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
IGNORED = {"claim": "the claim", "started": "the start", "receipt": "the receipt of update 1 (u1)"}
NEEDED: dict[str | int, str] = {
    3: "the commit of update 1 (u1)",
    "decided": "the decision of update 1",
    "withdrawn": "the withdrawal of update w",
    "refused": "the refusal of update r",
    "scheduled": "the schedule of update u2",
}
KINDS = {kind: words for kind, words in {**IGNORED, **NEEDED}.items() if isinstance(kind, str)}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_readers_show_all_other_entries_and_name_the_damaged_one(
    tmp_path: Path, kind: str, how: Damage
) -> None:
    written(tmp_path, *ALL)
    written(tmp_path)
    number = damage(tmp_path, kind, how)
    journal = Updates(tmp_path)
    assert list(journal.history.by_id) == ["u1", "u2"]
    (found,) = journal.damaged
    assert f"000001/log.jsonl is damaged: entry {number}, {KINDS[kind]}: " in str(found.error)
    views = [journal.committed(sequence) for sequence in (1, 2)]
    assert [len(view.edits) for view in views] == [1, 1]
    assert (views[0].outcome is None) == (kind == "decided")
    assert (len(views[0].receipts) == 0) == (kind == "receipt")
    assert Updates(tmp_path).has_promised("u1"), "it is known whatever else is damaged"


@pytest.mark.parametrize("how", [*DAMAGES, join])
def test_a_damaged_record_or_payload_hides_nothing_else(tmp_path: Path, how: Damage) -> None:
    written(tmp_path, *(entry for n in (1, 2, 3) for entry in (payload(f"u{n}"), committed(n, f"u{n}"))))
    damage(tmp_path, 4, how)
    if how is not join:
        damage(tmp_path, 4 if how is remove else 5 + (how is split), how)
    journal = Updates(tmp_path)
    assert list(journal.history.committed) == [1, 3]
    assert [(one.first, one.number) for one in journal.damaged] == [(4, 5)]
    third = journal.committed(3)
    assert (third.id, third.step, third.edits, third.nbytes) == ("u3", 30, (), 0)
    assert Updates(tmp_path).has_promised("u1")
    with pytest.raises(FileDamaged, match="entries 4 to 5"):
        Updates(tmp_path).has_promised("u2")


def test_a_group_whose_files_are_all_gone_hides_no_other(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"))
    written(tmp_path, payload("u2"), committed(2, "u2"))
    log_of(tmp_path).unlink()
    journal = Updates(tmp_path)
    assert list(journal.history.committed) == [2]
    assert "000001/log.jsonl is damaged: entries 0 to 2: cannot be read" in str(journal.damaged[0].error)


CHANGED = [{"step": "10"}, {"step": 10.0}, {"step": True}, {"step": None}, {"sequence": 2}, {"unknown": 1}]


@pytest.mark.parametrize("fields", CHANGED, ids=str)
def test_an_entry_with_another_value_is_damage_although_its_seal_is_right(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), Withdrawn("x"))
    damage(tmp_path, 2, rewritten())
    assert list(Updates(tmp_path).history.committed) == [1]
    damage(tmp_path, 2, rewritten(**fields))
    (found,) = Updates(tmp_path).damaged
    assert (found.group, found.number) == (1, 2)


BODIES = [
    (b'"step":10,', b'"step":10,"step":10,'),
    (b'"step":10,', b'"step": 10,'),
    (b'"step":10,', b'"step":NaN,'),
    (b'"step":10,', b'"step":1e999,'),
    (b'"step":10,', b'"step":' + b"[" * 10000 + b"]" * 10000 + b","),
    (b'"type":"Committed"', b'"type":"Saved"'),
    (b'"type":"Committed"', b'"type":"Claim"'),
    (b'"number":2', b'"number":0'),
    (b'"number":2', b'"number":1'),
]


@pytest.mark.parametrize("nbytes", [b"-1", b"1" + b"0" * 400], ids=lambda nbytes: nbytes[:5].decode())
def test_a_payload_of_impossible_size_is_damage(tmp_path: Path, nbytes: bytes) -> None:
    written(tmp_path, payload("u1"), Withdrawn("x"))
    (line,) = [line for line in lines_of(tmp_path) if b'"nbytes":' in line]
    body = re.sub(b'"nbytes":[0-9]+', b'"nbytes":' + nbytes, line[: line.rindex(b',"seal"')] + b"}")
    log_of(tmp_path).write_bytes(log_of(tmp_path).read_bytes().replace(line, sealed(body)))
    (found,) = Updates(tmp_path).damaged
    assert (found.group, found.number) == (1, 1)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[1][:30].decode())
def test_a_line_that_replicast_would_not_write_is_damage_although_its_seal_is_right(
    tmp_path: Path, body: tuple[bytes, bytes]
) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), Withdrawn("x"))
    (line,) = [line for line in lines_of(tmp_path) if body[0] in line]
    before = line[: line.rindex(b',"seal"')] + b"}"
    log_of(tmp_path).write_bytes(log_of(tmp_path).read_bytes().replace(line, sealed(before.replace(*body))))
    (found,) = Updates(tmp_path).damaged
    assert (found.group, found.number) == (1, 2)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NO_FILES = [pipe, device, folder, huge]


@pytest.mark.parametrize("put", NO_FILES, ids=lambda put: put.__name__)
@pytest.mark.parametrize("group", [1, 2])
def test_what_is_no_plain_file_of_bounded_size_is_no_log_and_nobody_hangs(
    tmp_path: Path, put: Callable[[Path], None], group: int
) -> None:
    for sequence in (1, 2):
        written(tmp_path, payload(f"u{sequence}"), committed(sequence, f"u{sequence}"))
    log_of(tmp_path, group).unlink()
    put(log_of(tmp_path, group))
    for read in (committed_updates, started, lambda run: Updates(run).has_promised("u3")):
        with pytest.raises(FileDamaged, match=rf"00000{group}/log\.jsonl"):
            read(tmp_path)


@pytest.mark.parametrize("put", NO_FILES, ids=lambda put: put.__name__)
def test_what_lies_in_the_place_of_a_payload_is_damage(tmp_path: Path, put: Callable[[Path], None]) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"))
    path = tmp_path / "groups" / "000001" / "000001.safetensors"
    path.unlink()
    put(path)
    with pytest.raises(FileDamaged, match=r"000001\.safetensors"):
        load_update(tmp_path, 1)
    assert len(committed_updates(tmp_path)) == 1


def checkpoint(*holds: int, pending: tuple[str, ...] = ()) -> Saved:
    proposals = tuple(
        Pending(Proposal(id_, digest_of(id_), (id_, digest_of(id_))), (id_,)) for id_ in pending
    )
    return Saved(30, 0, frozenset(holds), proposals, None)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", NEEDED)
def test_a_start_stops_at_a_damaged_entry_that_it_needs_and_says_of_which_update_and_what_to_do(
    tmp_path: Path, kind: str | int, how: Damage
) -> None:
    written(tmp_path, *ALL)
    whole = log_of(tmp_path).read_bytes()
    number = damage(tmp_path, kind, how)
    for _ in range(2):
        said = (
            re.escape(f"entry {number}, {NEEDED[kind]}: ") + r".*\. The job cannot start without it: it says"
        )
        with pytest.raises(FileDamaged, match=said) as raised:
            started(tmp_path)
        assert raised.value.path.name == "log.jsonl"
        assert "Restore the file from a backup, or start the job in a new run directory" in str(raised.value)
    log_of(tmp_path).write_bytes(whole)  # It is back from a backup.
    started(tmp_path).check_start(checkpoint())
    assert Updates(tmp_path).damaged == []


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", IGNORED)
def test_every_start_ignores_a_damaged_entry_that_none_needs_and_says_so_once(
    tmp_path: Path, kind: str, how: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, *ALL)
    written(tmp_path)  # The claim of the last group is needed.
    number = damage(tmp_path, kind, how)
    for _ in range(2):
        caplog.clear()
        journal = started(tmp_path)
        journal.check_start(checkpoint())
        (said,) = caplog.messages
        assert f"000001/log.jsonl is damaged: entry {number}, {IGNORED[kind]}: " in said
        assert said.endswith(". The job starts without it.")
    journal.write(payload("u3"), update_of("u3"))
    journal.write(committed(3, "u3"))
    assert [update.id for update in committed_updates(tmp_path)] == ["u1", "u2", "u3"]
    assert (read_chain(tmp_path).length, len(read_chain(tmp_path).problems)) == (len(ALL) + 4, 1)


@pytest.mark.parametrize("first", [4, 5])
def test_of_two_damaged_entries_in_a_row_nobody_can_tell_what_they_were(tmp_path: Path, first: int) -> None:
    """A decision and a receipt; a receipt and a withdrawal."""
    written(tmp_path, *ALL)
    for number in (first, first + 1):
        damage(tmp_path, number, flip)
    with pytest.raises(
        FileDamaged, match=rf"entries {first} to {first + 1}: .* it may say what became of an"
    ):
        started(tmp_path)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("last", [receipt(1, "u1"), Withdrawn("w")], ids=["ignored", "needed"])
def test_the_claim_of_the_next_group_tells_what_the_last_entry_was(
    tmp_path: Path, last: Entry, how: Damage
) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), last)
    for _ in range(2):  # The second one has no entries: its claim and that of the third tell the same.
        written(tmp_path)
    damage(tmp_path, 3, how)
    if isinstance(last, Receipt):
        started(tmp_path)
    else:
        with pytest.raises(
            FileDamaged, match=r"entry 3, the withdrawal of update w: .* it says what became of"
        ):
            started(tmp_path)


def test_what_was_the_last_entry_when_a_group_took_over_and_could_not_be_read_may_be_anything(
    tmp_path: Path,
) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), receipt(1, "u1"))
    damage(tmp_path, 3, flip)
    for _ in range(2):
        with pytest.raises(FileDamaged, match=r"entry 3: .* it may say what became of an update"):
            started(tmp_path)


def test_a_receipt_that_a_power_failure_has_left_as_zeros_stops_no_start(tmp_path: Path) -> None:
    """Nobody waits for the sync of a receipt and of the payload behind it."""
    written(tmp_path, payload("u1"), committed(1, "u1"), receipt(1, "u1"), payload("u2"))
    damage(tmp_path, 3, lambda line: b"\0" * (len(line) - 1) + b"\n")
    assert started(tmp_path).load("u2", digest_of("u2")).id == "u2"


@pytest.mark.parametrize(("first", "how"), [(3, join), (3, flip), (4, flip)], ids=["join", "two", "one"])
def test_after_a_backup_of_a_log_with_a_damaged_end_is_back_no_update_is_lost(
    tmp_path: Path, first: int, how: Damage
) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), payload("u2"), committed(2, "u2"))
    backup = log_of(tmp_path).read_bytes()
    for number in range(first, 4 if how is join else 5):
        damage(tmp_path, number, how)
    with pytest.raises(FileDamaged, match="from a backup"):
        started(tmp_path)
    log_of(tmp_path).write_bytes(backup)
    assert list(started(tmp_path).history().committed) == [1, 2]


def test_a_damaged_payload_promises_nothing_so_its_update_can_be_withdrawn(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), Withdrawn("x"))
    damage(tmp_path, 1, flip)
    assert not Updates(tmp_path).has_promised("u1")


def test_a_trial_that_has_ended_has_no_end_to_come_although_its_receipt_is_damaged(tmp_path: Path) -> None:
    decided = Decided(1, False, 14, 1, "worse", 2.0)
    written(tmp_path, payload("u1"), committed(1, "u1", Trial(4)), decided, receipt(1, "u1"), Withdrawn("x"))
    assert Updates(tmp_path).committed(1).trial_until is None
    damage(tmp_path, 4, flip)
    assert Updates(tmp_path).committed(1).trial_until is None


def test_a_gap_in_the_numbers_of_updates_is_not_excused_by_a_lost_receipt(tmp_path: Path) -> None:
    written(tmp_path, payload("u1"), committed(1, "u1"), receipt(1, "u1"), Withdrawn("x"), committed(2, "u2"))
    damage(tmp_path, 3, flip)
    damage(tmp_path, 5, rewritten(sequence=3))
    with pytest.raises(FileDamaged, match="entry 5 must be the record of update 2"):
        started(tmp_path)


def test_a_withdrawal_from_outside_is_refused_only_if_a_damaged_entry_may_be_of_this_update(
    tmp_path: Path,
) -> None:
    written(tmp_path, *ALL)
    damage(tmp_path, "scheduled", flip)
    assert not Updates(tmp_path).has_promised("u3")
    damage(tmp_path, "withdrawn", flip)
    with pytest.raises(FileDamaged, match="entry 6, the withdrawal of update w"):
        Updates(tmp_path).has_promised("w")


@pytest.mark.parametrize("what", ["committed", "scheduled", "pending"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_start_that_needs_values_whose_entry_is_damaged_names_the_entry_and_the_update(
    tmp_path: Path, what: str, how: Damage
) -> None:
    ends: dict[str, tuple[Entry, ...]] = {
        "committed": (committed(1, "u1"),),
        "scheduled": (Scheduled("u1", digest_of("u1"), 50),),
        "pending": (Withdrawn("x"),),
    }
    written(tmp_path, payload("u1"), *ends[what])
    whole = log_of(tmp_path).read_bytes()
    damage(tmp_path, "payload", how)
    saved = checkpoint(pending=("u1",)) if what == "pending" else checkpoint()
    journal = started(tmp_path)
    said = r"log\.jsonl is damaged: entry 1, the payload of update u1: .*"
    with pytest.raises(FileDamaged, match=said + "update u1 must be applied again.*Restore the file"):
        journal.check_start(saved)
    with pytest.raises(FileDamaged, match=said):
        journal.load("u1", digest_of("u1"))
    if what != "scheduled":
        journal.check_start(checkpoint(1))
    log_of(tmp_path).write_bytes(whole)  # It is back from a backup, and its values are still there.
    again = started(tmp_path)
    again.check_start(saved)
    assert again.load("u1", digest_of("u1")).id == "u1"


@pytest.mark.parametrize("what", ["committed", "scheduled", "pending"])
def test_a_start_stops_where_values_that_it_needs_are_missing_and_names_the_file(
    tmp_path: Path, what: str
) -> None:
    ends: dict[str, tuple[Entry, ...]] = {
        "committed": (committed(1, "u1"),),
        "scheduled": (Scheduled("u1", digest_of("u1"), 50),),
        "pending": (),
    }
    written(tmp_path, payload("u1"), *ends[what])
    (tmp_path / "groups" / "000001" / "000001.safetensors").unlink()
    saved = checkpoint(pending=("u1",)) if what == "pending" else checkpoint()
    with pytest.raises(FileDamaged, match=r"000001\.safetensors.*update u1 must be applied again"):
        started(tmp_path).check_start(saved)
    if what != "scheduled":
        started(tmp_path).check_start(checkpoint(1))


def test_a_start_from_scratch_that_needs_removed_values_is_told_to_restore(tmp_path: Path) -> None:
    fence = Fence(tmp_path, attempt=0)
    journal = FileJournal(tmp_path, fence)
    for sequence in (1, 2):
        journal.write(payload(f"u{sequence}"), update_of(f"u{sequence}"))
        journal.write(committed(sequence, f"u{sequence}"))
    journal.remove_payloads({1}, frozenset())
    with pytest.raises(FileDamaged, match="the values of an update are missing"):
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
    journal.write(receipt(1, "u1"))
    damage(tmp_path, "committed", flip)
    with pytest.raises(FileDamaged, match=r"directory: copy .*/00000012-1 to NEW/checkpoints/ and start"):
        started(tmp_path)


def bias(value: float, id_: str) -> Update:
    return Update(id=id_).add("dense/bias", np.full(3, value, np.float32))


def trained(run: Path) -> None:
    """A job of two workers: one update, then a checkpoint-free end."""
    with Job(2, started(run)) as job:
        ticket = job.workers[1].propose(bias(1.0, "first"))
        job.train(4)
        assert ticket.result(DEADLINE_SECS).sequence == 1


@pytest.mark.parametrize("name", ["log.jsonl", "000001.safetensors"])
def test_a_job_whose_values_are_damaged_ends_with_their_file_named(tmp_path: Path, name: str) -> None:
    trained(tmp_path)
    if name == "log.jsonl":
        damage(tmp_path, "payload", flip)
    else:
        path = tmp_path / "groups" / "000001" / name
        path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(FileDamaged, match=name), Job(2, started(tmp_path), attempt=1) as job:
        job.train(6)


# A line of what a job has written is damaged: the next attempt ends with the bits of an undisturbed one.


def number_in(run: Path, kind: str, id_: str, group: int = 1) -> int:
    """The number of the entry of this kind and update."""
    entries = [json.loads(line)["entry"] for line in lines_of(run, group)]
    (number,) = [n for n, one in enumerate(entries) if one["type"] == kind and one["id"] == id_]
    return number


def assigned(value: float, id_: str) -> Update:
    return Update(id=id_).assign("dense/bias", np.full(3, value, np.float32))


def first_attempt(run: Path) -> Saved:
    """Two updates, a checkpoint, a third; one is withdrawn, two are scheduled for later. Ends at step 12."""
    with Job(2, started(run)) as job:
        for id_, value in (("first", 1.0), ("second", 2.0), ("third", 3.0)):
            ticket = job.workers[1].propose(assigned(value, id_))
            job.train(3)
            assert ticket.result(DEADLINE_SECS).stage is Stage.VERIFIED
            eventually(lambda one=id_: any(line.id == one for line in job.journal.history().before.values()))
            if id_ == "second":
                job.on_all(lambda worker: worker.save_in_passing())
                eventually(lambda: job.checkpoints)
        scheduled(job.workers[0].propose(assigned(9.0, "withdrawn"), at_step=50))
        scheduled(job.workers[1].propose(bias(4.0, "later"), at_step=20))
        withdrawing = job.withdraw("withdrawn")
        eventually(lambda: withdrawing in job.outcomes)
        assert job.outcomes[withdrawing].stage is Stage.WITHDRAWN
        scheduled(job.workers[0].propose(bias(5.0, "last"), at_step=24))
        job.train(3)
        return job.checkpoints[-1]


def second_attempt(run: Path, saved: Saved) -> tuple[Any, Any]:
    """From the checkpoint of step 6 to step 26, with another update; what each worker has in the end."""
    with Job(2, started(run), attempt=1, checkpoints=[saved]) as job:
        ticket = scheduled(job.workers[1].propose(bias(6.0, "fourth"), at_step=15))
        job.train(20)
        assert ticket.result(DEADLINE_SECS).stage is Stage.VERIFIED
        return job.values(), [worker.applied for worker in job.workers]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved, Any]:
    run = tmp_path_factory.mktemp("whole") / "run"
    saved = first_attempt(run)
    copy = shutil.copytree(run, run.with_name("copy"))
    return run, saved, second_attempt(copy, saved)


UNNEEDED = [
    *(("Receipt", one) for one in ("first", "second", "third")),
    *(("Before", one) for one in ("first", "second", "third")),
    *(("Payload", one) for one in ("first", "second", "withdrawn")),
]


@pytest.mark.parametrize(("kind", "id_"), UNNEEDED)
def test_a_job_whose_log_has_lost_what_no_start_needs_goes_on_with_the_same_bits(
    whole_run: tuple[Path, Saved, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, id_: str
) -> None:
    """The checkpoint holds the first two updates; the third is applied again."""
    whole, saved, expected = whole_run
    run = shutil.copytree(whole, tmp_path / "run")
    number = damage(run, number_in(run, kind, id_), flip)
    files = {path.name for path in log_of(run).parent.iterdir()}
    assert second_attempt(run, saved) == expected
    (said,) = [one for one in caplog.messages if "damaged" in one]
    assert f"log.jsonl is damaged: entry {number}, the " in said
    assert id_ in said
    assert files == {path.name for path in log_of(run).parent.iterdir()}, "the log may come back"
    seen = Updates(run)
    assert list(seen.history.by_id) == ["first", "second", "third", "fourth", "later", "last"]
    assert (seen.history.withdrawn, seen.history.scheduled) == ({"withdrawn"}, {})
    log_of(run).write_bytes(log_of(whole).read_bytes())
    assert [view.nbytes for view in committed_updates(run)[:3]].count(0) == 0
    assert load_update(run, 1).content_digest() == assigned(1.0, "first").content_digest()


LOST = [("Committed", "first"), ("Committed", "third"), ("Scheduled", "later"), ("Withdrawn", "withdrawn")]


@pytest.mark.parametrize(("kind", "id_"), [*LOST, ("Payload", "third"), ("Payload", "later")])
def test_a_job_whose_log_has_lost_what_its_start_needs_stops_and_names_the_update(
    whole_run: tuple[Path, Saved, Any], tmp_path: Path, kind: str, id_: str
) -> None:
    whole, saved, _ = whole_run
    run = shutil.copytree(whole, tmp_path / "run")
    number = damage(run, number_in(run, kind, id_), flip)
    with pytest.raises(FileDamaged, match=rf"entry {number}, the .* of update .*{id_}.*The job cannot start"):
        second_attempt(run, saved)


def test_a_revert_is_refused_when_the_entry_of_the_values_before_or_of_the_update_is_damaged(
    whole_run: tuple[Path, Saved, Any], tmp_path: Path
) -> None:
    whole, saved, _ = whole_run
    for kind, why in (("Before", "not kept"), ("Payload", "the payload of update second")):
        run = shutil.copytree(whole, tmp_path / kind)
        damage(run, number_in(run, kind, "second"), flip)
        with Job(2, started(run), attempt=1, checkpoints=[saved]) as job:
            ticket = job.workers[1].session.proposals.revert(2, "", force=True)
            job.train(20)
            with pytest.raises(UpdateRefused, match=why):
                ticket.result(DEADLINE_SECS)


def test_values_before_an_update_are_not_those_of_an_earlier_attempt_when_the_later_entry_is_damaged(
    whole_run: tuple[Path, Saved, Any], tmp_path: Path
) -> None:
    whole, saved, _ = whole_run
    run = shutil.copytree(whole, tmp_path / "run")
    second_attempt(run, saved)  # It has applied the third update again.
    kept = Updates(run).journal
    assert kept.load_before(3) is not None
    number = damage(run, number_in(run, "Before", "third", 2), flip, group=2)
    assert Updates(run).journal.load_before(3) is None
    assert Updates(run).journal.before[1] == kept.before[1]
    damage(run, number, flip, group=2)  # It is back. An earlier one does not matter.
    damage(run, number_in(run, "Before", "third"), flip)
    assert Updates(run).journal.before == kept.before


def test_what_a_later_update_did_whose_entry_is_damaged_must_not_be_undone_unless_forced(
    whole_run: tuple[Path, Saved, Any], tmp_path: Path
) -> None:
    run = shutil.copytree(whole_run[0], tmp_path / "run")
    damage(run, number_in(run, "Payload", "third"), flip)
    plan = undo(run, 2, forced=True)
    assert plan.since == ("update 3 has unknown edits since then",)
    with pytest.raises(UpdateRefused, match="Update 2 is not the last one: update 3 has unknown edits"):
        plan.check()


def scheduled_run(run: Path) -> None:
    with Job(2, started(run)) as job:
        job.workers[1].propose(bias(1.0, "later"), at_step=6)
        job.train(3)


def test_a_scheduled_update_whose_values_are_damaged_is_not_refused_for_good(tmp_path: Path) -> None:
    scheduled_run(tmp_path)
    path = tmp_path / "groups" / "000001" / "000001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(flip(whole))
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


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("number", range(1, 6))  # Nothing shows that the last one is missing.
def test_log_status_show_and_push_show_everything_else(run: Path, number: int, how: Damage) -> None:
    kind = kind_of(lines_of(run, 2)[number])
    damage(run, number, how, group=2)
    name = f"000002/log.jsonl is damaged: entry {number}, the {kind.replace('committed', 'commit')} of update"
    other = "second" if number <= 3 else "first"
    log = invoke("log", run, "--json")
    listed = [json.loads(line) for line in log.stdout.splitlines()]
    assert log.exit_code == 1
    assert name in log.stderr
    assert len(listed) == (1 if kind == "committed" else 2)
    shown = next(one for one in listed if one["id"] == other)
    assert (shown["stage"], shown["author"], len(shown["edits"])) == ("verified", "ann@box", 1)
    status = invoke("status", run)
    assert (status.exit_code, name in status.stderr, "ann@box" in status.stdout) == (1, True, True)
    show = invoke("show", run, other)
    assert (show.exit_code, name in show.stderr, "ann@box" in show.stdout) == (0, True, True)
    push = invoke("push", run, "--set", "learning_rate=2", "--id", "third")
    assert (push.exit_code, name in push.stderr, "pushed third" in push.stdout) == (0, True, True)
    plain = invoke("log", run)
    assert ("not known: its entry is damaged" in plain.stdout) == (kind == "payload")


SUMMARIES = [b"5", b"{}", b"[1]", b"[{}]", b'[{"a":1e999}]', b'[{"operation":5,"variable":5,"shape":5}]']


@pytest.mark.parametrize("edits", SUMMARIES, ids=bytes.decode)
def test_edits_of_any_kind_in_a_line_whose_seal_is_right_hide_no_update(run: Path, edits: bytes) -> None:
    (line,) = [line for line in lines_of(run, 2) if b'"type":"Payload","id":"first"' in line]
    begin, end = line.index(b'"edits":') + len(b'"edits":'), line.index(b'},"written_at"')
    body = line[:begin] + edits + line[end : line.rindex(b',"seal"')] + b"}"
    log_of(run, 2).write_bytes(log_of(run, 2).read_bytes().replace(line, sealed(body)))
    listed = [json.loads(line) for line in invoke("log", run, "--json").stdout.splitlines()]
    assert [(one["id"], len(one["edits"])) for one in listed] == [("first", 0), ("second", 1)]
    for command in ("log", "status"):
        assert invoke(command, run).exit_code == 0


def test_an_update_that_is_not_found_may_be_the_damaged_one(run: Path) -> None:
    damage(run, 5, flip, group=2)
    result = invoke("show", run, "2")
    assert result.exit_code == 1
    assert "There is no update 2" in result.stderr
    assert "log.jsonl is damaged: entry 5" in result.stderr


# Values that no start needs are removed; the entries stay, and every kept checkpoint can be restored.


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
    commit(started(tmp_path), 1, 2)
    journal = started(tmp_path)
    commit(journal, 3, 4, 5)
    before = committed_updates(tmp_path)
    kept = [frozenset({1, 2, 3}), frozenset({1, 2, 3, 5})]  # what each checkpoint contains
    assert journal.remove_payloads(kept[0] & kept[1], None) == 3
    assert journal.remove_payloads(kept[0] & kept[1], None) == 0
    assert payloads(tmp_path) == 2
    for reader in (journal, started(tmp_path)):
        history = reader.history()
        assert list(history.committed) == [1, 2, 3, 4, 5]
        again = [[reader.load(one.id, one.digest).id for one in history.after(holds)] for holds in kept]
        assert again == [["u4", "u5"], ["u4"]]
    assert committed_updates(tmp_path) == before


def test_what_was_refused_or_withdrawn_is_removed_and_what_waits_is_not(tmp_path: Path) -> None:
    journal = started(tmp_path)
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
    store(started(tmp_path), "u1")
    journal = started(tmp_path)
    commit(journal, 1)
    assert journal.remove_payloads(frozenset(), None) == 1
    assert load_update(tmp_path, 1).id == "u1"
    assert journal.remove_payloads({1}, None) == 1
    assert payloads(tmp_path) == 0


def test_what_an_attempt_that_died_has_left_is_removed_unless_a_start_can_bring_it_back(
    tmp_path: Path,
) -> None:
    first = started(tmp_path)
    for id_ in ("left", "scheduled", "pending", "committed"):
        store(first, id_)
    first.write(Scheduled("scheduled", digest_of("scheduled"), 50))
    first.write(Committed(1, "committed", digest_of("committed"), 10, 0))
    journal = started(tmp_path)
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
        assert started(tmp_path).load(id_, digest_of(id_)).id == id_


def test_a_group_that_was_taken_over_removes_nothing(tmp_path: Path) -> None:
    store(started(tmp_path), "left")
    old = started(tmp_path)
    commit(old, 1)
    started(tmp_path)
    assert old.remove_payloads({1}, frozenset()) == 0
    assert payloads(tmp_path) == 2


def test_a_disk_that_removes_nothing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = started(tmp_path)
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
    journal = started(tmp_path)
    commit(journal, 1, 2, 3)
    size = (tmp_path / "groups" / "000001" / "000001.safetensors").stat().st_size
    monkeypatch.setattr("replicast.storage.journal.REVERTIBLE_BYTES", 2 * size)
    assert journal.remove_payloads({1, 2, 3}, None) == 1
    with pytest.raises(PayloadRemoved):
        load_update(tmp_path, 1)
    assert load_update(tmp_path, 2).id == "u2"
    assert load_update(tmp_path, 3).id == "u3"
