import contextlib
import json
import math
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from replicast.core.entries import Committed, Payload, Refused, Saved, Scheduled
from replicast.core.records import Pending, Proposal, Stage
from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import below, make_durably, write_durably
from replicast.replicas.inbox import Inbox
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal
from replicast.testing.job import Job
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.unit.checkpoint.samples import draft_of, state_of

ONES = np.ones(3, np.float32)


def update_of(name: str, value: float = 1.0) -> Update:
    return Update(id=name, note="why").add("x", ONES * np.float32(value))


def test_what_is_submitted_waits_and_can_be_read(tmp_path: Path) -> None:
    assert inbox.waiting(tmp_path) == []
    path = inbox.submit(tmp_path, update_of("a"), at_step=7)
    assert path.as_path() == tmp_path / "inbox" / "a.safetensors"
    (entry,) = inbox.waiting(tmp_path)
    assert (entry.id, entry.path, entry.nbytes) == ("a", path, path.stat().st_size)
    read = inbox.read(path)
    assert (read.update.content_digest(), read.update.id) == (update_of("a").content_digest(), "a")
    assert (read.at_step, read.trial) == (7, None)
    assert inbox.read(inbox.submit(tmp_path, update_of("b"))).at_step is None
    inbox.done(path)
    inbox.done(path)
    assert [entry.id for entry in inbox.waiting(tmp_path)] == ["b"]


def test_the_names_of_inbox_and_refused_are_on_disk_before_anything_lies_there(
    tmp_path: Path, synced: list[Path]
) -> None:
    path = inbox.submit(tmp_path, update_of("a"))
    assert synced == [tmp_path, tmp_path / "inbox"]
    synced.clear()
    inbox.refuse(tmp_path, path, UpdateRefused("Wrong"))
    assert synced[:2] == [tmp_path, tmp_path / "refused"]


def test_a_trial_is_read_back_and_another_one_under_the_same_id_is_refused(tmp_path: Path) -> None:
    trial = Trial(50, "accuracy", 0.05, "max")
    path = inbox.submit(tmp_path, update_of("a"), trial=trial)
    assert inbox.read(path).trial == trial
    assert inbox.submit(tmp_path, update_of("a"), trial=trial) == path
    with pytest.raises(UpdateRefused, match="Another update with this id"):
        inbox.submit(tmp_path, update_of("a"))
    write_durably(path, update_of("a").file_chunks({"trial": {"steps": 0}}))
    with pytest.raises(UpdateRefused, match="from 1 to"):
        inbox.read(path)


@pytest.mark.parametrize(
    "trial",
    [
        {"steps": 5, "max_increase": 10**400},
        {"steps": 5, "max_increase": -(10**400)},
        {"steps": 5, "max_increase": 1e300},
        {"steps": 10**30},
        {"steps": 5, "metric": "loss" * 1000},
        {"steps": 5, "metric": "loss\x1b[2J"},
        {"steps": 5, "metric": ["loss"]},
        {"steps": 5, "mode": {"a": 1}},
        [5],
        "trial",
        5,
    ],
)
def test_a_trial_has_bounds_and_whatever_is_beyond_them_is_refused(tmp_path: Path, trial: Any) -> None:
    path = below(tmp_path) / "inbox" / "a.safetensors"
    path.parent.mkdir()
    write_durably(path, update_of("a").file_chunks({"trial": trial}))
    with pytest.raises((UpdateRefused, FileDamaged), match=r"trial|JSON"):
        inbox.read(path)


def test_the_oldest_comes_first_and_what_is_being_written_does_not_show(tmp_path: Path) -> None:
    for age, name in ((30, "b"), (10, "c"), (20, "a")):
        os.utime(inbox.submit(tmp_path, update_of(name)).as_path(), (1000 - age, 1000 - age))
    (tmp_path / "inbox" / ".tmp-1.safetensors").write_text("half")
    (tmp_path / "inbox" / ".tmp-2").write_text("half")
    (tmp_path / "inbox" / "notes.txt").write_text("not ours")
    assert [entry.id for entry in inbox.waiting(tmp_path)] == ["b", "a", "c"]
    assert [entry.submitted_at for entry in inbox.waiting(tmp_path)] == [970, 980, 990]


def test_submitting_the_same_again_changes_nothing_and_another_of_its_id_is_refused(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of("a"), at_step=3)
    before = path.stat()
    assert inbox.submit(tmp_path, update_of("a"), at_step=3) == path
    assert path.stat().st_ino == before.st_ino
    for update, step in ((update_of("a", 2.0), 3), (update_of("a"), 4), (update_of("a"), None)):
        with pytest.raises(UpdateRefused, match=r"Another update with this id.*Received: a\."):
            inbox.submit(tmp_path, update, at_step=step)
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 2**63])
def test_an_invalid_step_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UpdateRefused, match="step"):
        inbox.submit(tmp_path, update_of("a"), at_step=step)
    assert inbox.waiting(tmp_path) == []
    path = below(tmp_path) / "inbox" / "a.safetensors"
    path.parent.mkdir()
    write_durably(path, update_of("a").file_chunks({"at_step": step}))
    with pytest.raises(UpdateRefused, match="step"):
        inbox.read(path)


def test_a_file_with_the_name_of_another_is_refused(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of("a"))
    other = path.with_name("b.safetensors")
    path.rename(other)
    with pytest.raises(UpdateRefused, match="named like the update in it") as raised:
        inbox.read(other)
    assert (raised.value.expected, raised.value.received) == ("a.safetensors", "b.safetensors")


def test_a_plain_file_dropped_in_is_refused_with_the_command_that_would_work(tmp_path: Path) -> None:
    run_dir = tmp_path / "my runs"
    path = below(run_dir) / "inbox" / "delta.safetensors"
    make_durably(path.parent)
    safetensors.numpy.save_file({"x": ONES}, path.as_path())
    with pytest.raises(FileDamaged) as raised:
        inbox.read(path)
    inbox.refuse(run_dir, path, raised.value)
    moved = run_dir / "refused" / "delta.safetensors"
    assert moved.exists()
    assert f"replicast push '{run_dir}' --add '{moved}'" in str(inbox.refusals(run_dir)["delta"])


def test_a_refusal_reaches_its_author_with_every_field(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of("a"))
    error = UpdateRefused(
        "Wrong", variable="x", expected="1", received="2", worker=3, remedy="Try again with another"
    )
    inbox.refuse(tmp_path, path, error)
    found = inbox.refusals(tmp_path)
    assert list(found) == ["a"]
    assert found["a"].to_json() == error.to_json()
    assert str(found["a"]) == str(error)
    assert inbox.waiting(tmp_path) == []
    inbox.refuse(tmp_path, path, error)


def test_a_second_try_after_a_refusal_starts_anew(tmp_path: Path) -> None:
    inbox.refuse(tmp_path, inbox.submit(tmp_path, update_of("a")), UpdateRefused("Disk full"))
    inbox.note_stage(tmp_path, "a", Stage.REFUSED)
    inbox.submit(tmp_path, update_of("a", 2.0))
    assert inbox.refusals(tmp_path) == {}
    stage = inbox.stage_of(tmp_path, "a")
    assert stage is not None
    assert stage["stage"] == Stage.PROPOSED


def test_hostile_files_are_refused_and_moved_away(tmp_path: Path) -> None:
    directory = tmp_path / "inbox"
    directory.mkdir()
    (directory / "torn.safetensors").write_bytes(b"".join(update_of("torn").file_chunks())[:-1])
    (directory / "empty.safetensors").touch()
    (directory / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    (directory / "folder.safetensors").mkdir()
    (directory / "large.safetensors").write_bytes(b"0" * 2000)
    (directory / os.fsdecode(b"bad\xff.safetensors")).touch()
    os.mkfifo(directory / "pipe.safetensors")
    entries = inbox.waiting(tmp_path)
    assert len(entries) == 7
    for entry in entries:
        with pytest.raises(FileDamaged) as raised:
            inbox.read(entry.path, max_bytes=1000)
        inbox.refuse(tmp_path, entry.path, raised.value)
    assert inbox.waiting(tmp_path) == []
    assert len(inbox.refusals(tmp_path)) == 7


def test_stages_are_noted_over_each_other(tmp_path: Path) -> None:
    assert inbox.stage_of(tmp_path, "a") is None
    inbox.note_stage(tmp_path, "a", Stage.PREPARED)
    inbox.note_stage(tmp_path, "a", Stage.COMMITTED, step=7)
    found = inbox.stage_of(tmp_path, "a")
    assert found is not None
    assert (found["stage"], found["step"]) == ("committed", 7)
    (tmp_path / "inbox" / "a.stage.json").write_text("")
    assert inbox.stage_of(tmp_path, "a") is None
    assert inbox.stage_of(tmp_path, "../inbox/a") is None
    assert inbox.waiting(tmp_path) == []


@pytest.mark.parametrize("content", ['{"reason": 3}', "", "[" * 1000])
def test_a_damaged_reason_is_said_and_hides_no_other(tmp_path: Path, content: str) -> None:
    inbox.refuse(tmp_path, inbox.submit(tmp_path, update_of("b")), UpdateRefused("Wrong"))
    (tmp_path / "refused" / "a.json").write_text(content)
    found = inbox.refusals(tmp_path)
    assert list(found) == ["a", "b"]
    assert "a.json" in str(found["a"])
    assert found["b"].problem == "Wrong"


def made_pending(run: Path, id_: str) -> FileJournal:
    """A job has taken an update, saved a checkpoint and died before the update was committed."""
    fence, update, arrays = Fence(run, attempt=0), update_of(id_), state_of()
    journal, digest = FileJournal(run, fence), update.content_digest()
    journal.write(Payload(id_, digest, None), update)
    pending = Pending(Proposal(id_, digest, None), (f"inbox-{id_}",))
    draft = draft_of(arrays, 5).with_updates(Saved(5, 0, frozenset(), (pending,), None))
    CheckpointStore(run, fence).write(draft, arrays.items())
    return journal


@pytest.mark.parametrize("entry", [None, "scheduled", "committed"])
def test_what_the_next_start_will_apply_cannot_be_withdrawn_from_the_inbox(
    tmp_path: Path, entry: str | None
) -> None:
    path = inbox.submit(tmp_path, update_of("a"))
    journal, digest = made_pending(tmp_path, "a"), update_of("a").content_digest()
    if entry == "scheduled":
        journal.write(Scheduled("a", digest, 9))
    if entry == "committed":
        journal.write(Committed(1, "a", digest, 9, 0))
    assert not inbox.withdraw(tmp_path, "a", job_is_running=lambda: False)
    assert path.exists()


def test_what_was_refused_and_submitted_again_can_be_withdrawn(tmp_path: Path) -> None:
    made_pending(tmp_path, "a").write(Refused("a", ("inbox-a",), "why"))
    path = inbox.submit(tmp_path, update_of("a"))
    assert inbox.withdraw(tmp_path, "a", job_is_running=lambda: False)
    assert not path.exists()


@pytest.mark.parametrize("reverts", [-1, "1", 2**70, True, 1.0])
def test_a_revert_of_what_is_no_number_is_refused(tmp_path: Path, reverts: Any) -> None:
    path = inbox.submit(tmp_path, Update(id="undo"), reverts=reverts)
    with pytest.raises((UpdateRefused, FileDamaged)):
        inbox.read(path)


def test_a_revert_has_no_edits_of_its_own(tmp_path: Path) -> None:
    assert inbox.read(inbox.submit(tmp_path, Update(id="undo"), reverts=3, forced=True)).reverts == 3
    path = inbox.submit(tmp_path, Update(id="both").add("w", 1.0), reverts=3)
    with pytest.raises(UpdateRefused, match="no edits"):
        inbox.read(path)


def test_a_withdrawal_that_cannot_be_removed_hides_no_other(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        inbox.request_withdrawal(tmp_path, name)
    (tmp_path / "inbox" / "b.withdraw.json").unlink()
    (tmp_path / "inbox" / "b.withdraw.json").mkdir()
    assert sorted(inbox.take_withdrawals(tmp_path)) == ["a", "c"]


def test_a_note_that_is_a_link_hides_no_other_old_note(tmp_path: Path) -> None:
    for name in ("a", "c"):
        inbox.note_stage(tmp_path, name, Stage.VERIFIED)
        os.utime(tmp_path / "inbox" / f"{name}.stage.json", (0, 0))
    (tmp_path / "inbox" / "b.stage.json").symlink_to("b.stage.json")
    inbox.clean(tmp_path)
    assert [path.name for path in (tmp_path / "inbox").iterdir()] == ["b.stage.json"]


@contextlib.contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """The most memory that Python and numpy have allocated at one time since the beginning."""
    tracemalloc.start()
    last: list[int] = []
    try:
        yield lambda: last[0] if last else tracemalloc.get_traced_memory()[1]
    finally:
        last.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def sparse_file(run_dir: Path, update: Update, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Puts the update into the inbox with other shapes in its header, and holes for values."""
    begin = bytes(next(update.file_chunks()))
    header, end = json.loads(begin[8:]), 0
    for name, shape in shapes.items():
        begin_of, end = end, end + 4 * math.prod(shape)
        header[name] |= {"shape": shape, "data_offsets": [begin_of, end]}
    text = json.dumps(header).encode()
    path = run_dir / "inbox" / f"{update.id}.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    assert path.stat().st_blocks < 100
    return path


def test_what_a_header_or_the_size_on_disk_shows_to_be_wrong_is_refused_without_memory_for_it(
    tmp_path: Path,
) -> None:
    bias = np.ones(3, np.float32)
    sparse_file(tmp_path, Update(id="holes").add("dense/bias", bias), {"0.value": (2**27,)})
    sparse_file(tmp_path, Update(id="shape").add("dense/bias", bias), {"0.value": (2**23,)})
    sparse_file(tmp_path, Update(id="name").add("dense/bais", bias), {"0.value": (2**23,)})
    with Job(2) as job, traced_memory() as peak:
        taken = Inbox(job.workers[0].session, lambda path, what, error: pytest.fail(f"{what}: {error}"))
        job.workers[0].on_inbox = taken.on_outcome
        taken.propose(tmp_path)
        taken.propose(tmp_path)
        assert peak() < 2**23
    refused = {id_: str(error) for id_, error in inbox.refusals(tmp_path).items()}
    assert "has holes" in refused.pop("holes")
    assert "Wrong shape of value" in refused.pop("shape")
    assert "perhaps dense/bias" in refused.pop("name")
    assert not refused


def test_a_file_with_holes_is_not_read_even_if_it_fits(tmp_path: Path) -> None:
    path = sparse_file(tmp_path, update_of("a"), {"0.value": (2**27,)})
    with (
        traced_memory() as peak,
        pytest.raises(FileDamaged, match=r"has holes.*53687\d+ bytes on disk.*bytes on disk"),
    ):
        inbox.take(tmp_path, path)
    assert peak() < 2**23


def test_who_submits_an_id_that_waits_already_does_not_read_a_larger_file(tmp_path: Path) -> None:
    sparse_file(tmp_path, update_of("a"), {"0.value": (2**23,)})
    with traced_memory() as peak, pytest.raises(UpdateRefused, match="Another update with this id"):
        inbox.submit(tmp_path, update_of("a"))
    assert peak() < 2**23


def test_a_job_that_ends_says_which_updates_it_leaves_in_the_inbox(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(2) as job:
        inboxes = [Inbox(worker.session, lambda *_: None) for worker in job.workers]
        job.workers[0].on_inbox = inboxes[0].on_outcome
        for one in inboxes:
            one.settle_last(tmp_path)
        assert not caplog.messages
        (tmp_path / "inbox").mkdir()
        for name in ("late", "l\nter"):
            write_durably(tmp_path / "inbox" / f"{name}.safetensors", update_of("late").file_chunks())
        for one in inboxes:
            one.settle_last(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if "inbox" in record.getMessage()]
    assert said.startswith("not applied, because no step was trained since: 2 updates wait in the inbox")
    assert "'late'" in said
    assert "\n" not in said
