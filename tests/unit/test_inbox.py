"""The inbox: what lies in it, races between a job and a withdrawal, and worker 0, which reads it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.numpy

from replicast.core.coordinator import OPERATIONS
from replicast.core.entries import Committed, Payload, Pending, Proposal, Refused, Saved, Scheduled, Stage
from replicast.core.messages import Ended
from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import below, make_durably, write_durably
from replicast.replicas.proposals import RETRY_SECS, InboxReader
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence
from replicast.storage.inbox import InboxAnswer, Kind
from replicast.storage.journal import FileJournal
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, eventually
from tests.unit.checkpoint.samples import draft_of, state_of

BIAS, TABLE = "dense/bias", "table/embeddings"
ONES = np.ones(3, np.float32)


def update_of(name: str, value: float = 1.0) -> Update:
    return Update(id=name, note="why").add("x", ONES * np.float32(value))


def stage_of(run: Path, id_: str) -> Stage | None:
    found = inbox.answer_of(run, id_)
    return None if found is None else found.stage


def reader_of(job: Job) -> InboxReader:
    session = job.workers[0].session
    reader = InboxReader(
        session.proposals, session.operations, session.attempt, lambda _path, what, error: None
    )
    job.workers[0].hooks.on_inbox = reader.on_outcome
    return reader


def test_each_kind_of_request_has_its_words_and_its_operation() -> None:
    kinds = set(get_args(Kind))
    assert inbox.WHAT.keys() == kinds
    assert kinds - OPERATIONS.keys() == {"withdraw"}  # the coordinator withdraws an operation without another


def test_the_job_is_woken_by_what_arrives_and_by_nothing_else(tmp_path: Path) -> None:
    make_durably(below(tmp_path) / "inbox")
    with contextlib.closing(inbox.Arrivals(tmp_path)) as arrivals:
        assert not arrivals.wait(0.0)  # from now on the kernel tells
        inbox.submit(tmp_path, update_of("first"))
        assert arrivals.wait(DEADLINE_SECS)
        assert not arrivals.wait(0.0)
        inbox.note_stage(tmp_path, "first", Stage.PREPARED)  # the job's own note
        assert not arrivals.wait(0.0)
        arrivals.wake()
        assert arrivals.wait(DEADLINE_SECS)
    arrivals.wake()  # an outcome that comes late


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
    path.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
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
    with pytest.raises(UpdateRefused, match="`int` >= 1"):
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
    assert f"replicast push '{run_dir}' --add '{moved}'" in str(inbox.ended(run_dir)["delta"].refusal)


def test_a_refusal_reaches_its_author_with_every_field(tmp_path: Path) -> None:
    path = inbox.submit(tmp_path, update_of("a"))
    error = UpdateRefused(
        "Wrong", variable="x", expected="1", received="2", worker=3, remedy="Try again with another"
    )
    inbox.refuse(tmp_path, path, error)
    found = inbox.ended(tmp_path)
    assert list(found) == ["a"]
    refusal, view = found["a"].refusal, found["a"]
    assert refusal is not None
    assert (refusal.to_json(), str(refusal)) == (error.to_json(), str(error))
    assert (view.stage, view.author, view.note) == (Stage.REFUSED, update_of("a").author, update_of("a").note)
    assert (len(view.edits), view.nbytes, view.path) == (1, view.path.stat().st_size, view.path)  # type: ignore[union-attr]
    assert time.time() - view.at < 60
    assert inbox.waiting(tmp_path) == []
    inbox.refuse(tmp_path, path, error)


def test_a_second_try_after_a_refusal_starts_anew(tmp_path: Path) -> None:
    inbox.refuse(tmp_path, inbox.submit(tmp_path, update_of("a")), UpdateRefused("Disk full"))
    inbox.submit(tmp_path, update_of("a", 2.0))
    assert inbox.ended(tmp_path) == {}
    assert stage_of(tmp_path, "a") == Stage.PROPOSED


def test_hostile_files_are_refused_without_being_read_as_a_whole_or_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "inbox"
    directory.mkdir()
    (tmp_path / "refused").mkdir()
    whole = b"".join(update_of("whole").file_chunks())
    (tmp_path / "whole").write_bytes(whole)
    for name, content in {"torn": whole[:-1], "empty": b"", "junk": b"junk" * 100}.items():
        (directory / f"{name}.safetensors").write_bytes(content)
    for name, begin in {"zeros": b"", "ones": b"\xff" * 8, "large": whole}.items():
        (directory / f"{name}.safetensors").write_bytes(begin)
        os.truncate(directory / f"{name}.safetensors", 4 * 2**30)
    for name, target in {"dangling": "nowhere", "whole": "whole", "zero": "/dev/zero"}.items():
        (directory / f"{name}.safetensors").symlink_to(tmp_path / target)
    (directory / os.fsdecode(b"bad\xff.safetensors")).touch()
    (directory / "folder.safetensors").mkdir()
    os.mkfifo(directory / "pipe.safetensors")
    count = len(inbox.waiting(tmp_path))
    with Job(1) as job, monkeypatch.context() as patched:
        patched.setattr("replicast.replicas.proposals.INBOX_SECS", DEADLINE_SECS)
        patched.setattr(os, "readv", lambda *_: pytest.fail("it is read as a whole"))
        patched.setattr(os, "fsync", lambda _: pytest.fail("it waits for the disk"))
        reader_of(job).look(tmp_path, training=True)
    assert list(directory.iterdir()) == []
    assert (len(inbox.ended(tmp_path)), (tmp_path / "whole").exists()) == (count, True)


@pytest.mark.parametrize("content", ['{"reason": 3}', "", "[" * 1000])
def test_a_damaged_reason_is_said_and_hides_no_other(tmp_path: Path, content: str) -> None:
    inbox.refuse(tmp_path, inbox.submit(tmp_path, update_of("b")), UpdateRefused("Wrong"))
    (tmp_path / "refused" / "a.json").write_text(content)
    found = inbox.ended(tmp_path)
    assert list(found) == ["a", "b"]
    assert "The reason cannot be read" in str(found["a"].refusal)
    assert str(found["b"].refusal) == "Wrong."


def made_pending(run: Path, id_: str) -> FileJournal:
    """A job has taken an update, saved a checkpoint and died before the update was committed."""
    fence, update, arrays = Fence(run, attempt=0), update_of(id_), state_of()
    journal, digest = FileJournal(run, fence), update.content_digest()
    journal.write(Payload(id_, digest, None), update)
    pending = Pending(Proposal(id_, digest, None), (f"inbox-{id_}",))
    draft = draft_of(arrays, 5).with_updates(Saved(5, 0, frozenset(), (pending,), None))
    CheckpointStore(run, fence).write(draft, arrays)
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


def test_a_note_that_is_a_link_hides_no_other_old_note(tmp_path: Path) -> None:
    for name in ("a", "c"):
        inbox.note_stage(tmp_path, name, Stage.VERIFIED)
        os.utime(tmp_path / "inbox" / f"{name}.answer.json", (0, 0))
    (tmp_path / "inbox" / "b.answer.json").symlink_to("b.answer.json")
    inbox.clean(tmp_path)
    assert [path.name for path in (tmp_path / "inbox").iterdir()] == ["b.answer.json"]


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
        reader = reader_of(job)
        reader.look(tmp_path, training=True)
        reader.look(tmp_path, training=True)
        assert peak() < 2**23
    refused = {id_: str(error) for id_, error in inbox.ended(tmp_path).items()}
    assert "has holes" in refused.pop("holes")
    assert "Wrong shape of value" in refused.pop("shape")
    assert "perhaps dense/bias" in refused.pop("name")
    assert not refused


def test_who_submits_an_id_that_waits_already_does_not_read_a_larger_file(tmp_path: Path) -> None:
    sparse_file(tmp_path, update_of("a"), {"0.value": (2**23,)})
    with traced_memory() as peak, pytest.raises(UpdateRefused, match="Another update with this id"):
        inbox.submit(tmp_path, update_of("a"))
    assert peak() < 2**23


def test_a_job_that_ends_says_which_updates_it_leaves_in_the_inbox(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(2) as job:
        reader_of(job).finish(tmp_path)
        assert not caplog.messages
        (tmp_path / "inbox").mkdir()
        for name in ("late", "l\nter"):
            write_durably(tmp_path / "inbox" / f"{name}.safetensors", update_of("late").file_chunks())
        reader_of(job).finish(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if "inbox" in record.getMessage()]
    assert said.startswith("2 updates were not applied, because no step was trained since; kept")
    assert "'late'" in said
    assert "\n" not in said


# Taking and withdrawing race.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path


def between(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> list[object]:
    """Lets something happen before the inbox calls one of its functions; returns its result."""
    real, happened, acts = getattr(inbox, name), [], [act]

    def first_act(*arguments: object, **options: object) -> object:
        if acts:
            happened.append(acts.pop()())
        return real(*arguments, **options)

    monkeypatch.setattr(inbox, name, first_act)
    return happened


def test_withdrawing_what_a_job_has_taken_is_the_jobs_to_decide(run: Path) -> None:
    path = inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    assert inbox.take(run, path) is not None
    assert not inbox.withdraw(run, "x", job_is_running=lambda: True)


def test_what_is_withdrawn_while_a_job_reads_it_is_not_taken_in_place_of_its_successor(run: Path) -> None:
    path, withdrawn = inbox.submit(run, update_of("x")), []

    def replaced(_update: Update) -> None:
        if not withdrawn:
            withdrawn.append(inbox.withdraw(run, "x", job_is_running=lambda: True))
            inbox.submit(run, update_of("x", 2.0))

    assert inbox.take(run, path, None, replaced) is None
    assert withdrawn == [True]
    taken = inbox.take(run, path)
    assert taken is not None
    assert taken.update.content_digest() == update_of("x", 2.0).content_digest()


def test_an_update_that_is_taken_while_it_is_withdrawn_is_the_jobs_to_withdraw(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    happened = between(monkeypatch, "note_end", lambda: inbox.take(run, path))
    assert not inbox.withdraw(run, "x", job_is_running=lambda: True)
    assert happened[0] is not None
    assert inbox.waiting(run) == [], "should the job die now, the next one does not bring it back"
    assert inbox.ended(run) == {}, "the job may have committed it"


def test_withdrawing_between_the_jobs_reading_and_its_note_loses_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.submit(run, Update(id="x").assign("learning_rate", 1))
    withdraw = lambda: inbox.withdraw(run, "x", job_is_running=lambda: True)  # noqa: E731
    happened = between(monkeypatch, "note_stage", withdraw)
    assert inbox.take(run, path) is None
    assert happened == [True]


def test_a_withdrawal_or_an_answer_takes_no_path(run: Path) -> None:
    inbox.note_stage(run, "x", Stage.PREPARED)
    assert not inbox.withdraw(run, "../inbox/x", job_is_running=lambda: False)
    assert inbox.answer_of(run, "../inbox/x") is None
    (run / "inbox" / "x.answer.json").write_text("damaged")
    assert inbox.answer_of(run, "x") is None


def test_notes_of_updates_that_left_long_ago_are_removed(run: Path) -> None:
    for name in ("waits", "left", "young"):
        path = inbox.submit(run, Update(id=name).assign("learning_rate", 1))
        if name != "waits":
            path.unlink(missing_ok=True)
    (run / "inbox" / ".tmp-half").touch()
    for name in ("waits.answer.json", "left.answer.json", ".tmp-half"):
        os.utime(run / "inbox" / name, (1000, 1000))
    inbox.clean(run)
    left = sorted(path.name for path in (run / "inbox").iterdir())
    assert left == ["waits.answer.json", "waits.safetensors", "young.answer.json"]


_KILLED = """
import os, signal, sys
from replicast.files import RunPath
from replicast.storage import inbox
RunPath.unlink = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
inbox.withdraw(sys.argv[1], "x", job_is_running=lambda: False)
"""


def test_an_update_whose_withdrawal_was_killed_waits_and_can_be_withdrawn_again(run: Path) -> None:
    inbox.submit(run, update_of("x"))
    ended = subprocess.run([sys.executable, "-c", _KILLED, run], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [one.id for one in inbox.waiting(run)] == ["x"]
    assert inbox.withdraw(run, "x", job_is_running=lambda: False)
    assert inbox.waiting(run) == []


@pytest.mark.parametrize(("value", "refused"), [(1.0, False), (2.0, True)])
def test_of_two_who_submit_the_same_id_at_once_the_second_replaces_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, value: float, refused: bool
) -> None:
    between(monkeypatch, "write_durably", lambda: inbox.submit(run, update_of("x")))
    with pytest.raises(UpdateRefused) if refused else contextlib.nullcontext():
        inbox.submit(run, update_of("x", value))
    (waiting,) = inbox.waiting(run)
    assert inbox.read(waiting.path).update.content_digest() == update_of("x").content_digest()


# The other requests.


class Asked:
    """A job with the requests of its worker 0, and authors outside it."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        self.job, self.run_dir = job, run_dir
        self.ended: list[Ended] = []
        self.of_job = reader_of(job)
        job.workers[0].hooks.on_ended = self._ended

    def _ended(self, ended: Ended) -> None:
        self.ended.append(ended)
        self.of_job.ended(ended)

    def ask(self, kind: Kind, secs: float = 60.0, **arguments: Any) -> str:
        return inbox.ask(self.run_dir, kind, author="me", timeout_secs=secs, **arguments).id

    def look(self, *, training: bool = True) -> None:
        self.of_job.look(self.run_dir, training=training)
        self.settle()

    def settle(self) -> None:
        self.of_job.take_outcomes(self.run_dir)
        self.of_job.settle(self.run_dir)

    def answered(self, id_: str) -> InboxAnswer | None:
        self.settle()
        return inbox.answer_of(self.run_dir, id_)

    def answer(self, id_: str) -> InboxAnswer:
        """The job trains until it has answered."""
        self.look()
        self.job.train(3)
        eventually(lambda: self.answered(id_))
        found = inbox.answer_of(self.run_dir, id_)
        assert found is not None
        return found

    def values(self, id_: str, shape: tuple[int, ...]) -> Any:
        return inbox.values_of(self.run_dir, id_, shape, "float32")

    def refusal(self, id_: str) -> str:
        self.look()
        eventually(lambda: self.answered(id_))
        found = inbox.answer_of(self.run_dir, id_)
        assert found is not None
        assert found.stage is Stage.REFUSED
        return found.problem


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr("replicast.replicas.proposals.INBOX_SECS", DEADLINE_SECS)  # one look sees all
    with Job(2) as job:
        yield Asked(job, tmp_path)


def test_an_answer_names_who_asked_the_step_and_the_attempt(asked: Asked) -> None:
    found = asked.answer(asked.ask("save"))
    assert (found.kind, found.author, found.stage, found.attempt) == ("save", "me", Stage.VERIFIED, 0)
    assert found.step == asked.job.checkpoints[-1].step
    assert inbox.requests(asked.run_dir) == []


def test_a_pull_gives_the_values_of_one_boundary_and_their_digest_on_every_worker(asked: Asked) -> None:
    asked.job.on_all(lambda worker: worker.state.values[BIAS].__iadd__(3))
    id_ = asked.ask("pull", name="bias")
    found = asked.answer(id_)
    assert found.details["name"] == BIAS
    assert found.details["equal"]
    assert len(found.details["digests"]) == 2
    np.testing.assert_array_equal(asked.values(id_, (3,)), np.full(3, 3, np.float32))
    assert inbox.waiting(asked.run_dir) == [], "the values are no update"


def test_a_pull_of_rows_gives_these_rows_in_their_order(asked: Asked) -> None:
    for worker in asked.job.workers:
        worker.state.values[TABLE] = np.arange(16, dtype=np.float32).reshape(8, 2)
    id_ = asked.ask("pull", name=TABLE, rows=((6, 8), (0, 1)))
    asked.answer(id_)
    assert asked.values(id_, (3, 2)).tolist() == [[12, 13], [14, 15], [0, 1]]


def test_a_pull_says_when_the_workers_have_different_values(asked: Asked) -> None:
    asked.job.workers[1].state.values[BIAS][:] = 9
    id_ = asked.ask("pull", name=BIAS)
    found = asked.answer(id_)
    assert not found.details["equal"]
    assert asked.values(id_, (3,)).tolist() == [0, 0, 0]


def test_an_unknown_variable_is_refused_with_suggestions(asked: Asked) -> None:
    assert "perhaps dense/bias" in asked.refusal(asked.ask("pull", name="dense/bais"))
    assert "There is no such row" in asked.refusal(asked.ask("pull", name=TABLE, rows=((7, 9),)))


def test_two_pulls_are_answered_one_after_the_other(asked: Asked) -> None:
    first, second = asked.ask("pull", name=BIAS), asked.ask("pull", name=TABLE)
    asked.answer(min(first, second))
    asked.answer(max(first, second))
    assert asked.values(second, (8, 2)).shape == (8, 2)
    with pytest.raises(FileDamaged, match="other values"):
        asked.values(second, (8, 3))


def test_a_request_waits_while_no_training_runs_until_its_deadline_has_passed(asked: Asked) -> None:
    patient, late = asked.ask("audit"), asked.ask("audit", secs=-1.0)
    asked.look(training=False)
    assert "deadline" in asked.refusal(late)
    assert inbox.answer_of(asked.run_dir, patient) is None


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_request_is_not_late_because_the_author_s_clock_is_another_one(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    asked.look()
    with monkeypatch.context() as there:
        moment = time.time() + hours * 3600
        there.setattr("time.time", lambda: moment)
        id_, late = asked.ask("save"), asked.ask("audit", secs=-1.0)
    assert "deadline" in asked.refusal(late)
    assert asked.answer(id_).stage is Stage.VERIFIED


def test_a_request_that_waits_when_the_job_restarts_is_answered_by_the_next_attempt(
    asked: Asked, tmp_path: Path
) -> None:
    id_ = asked.ask("save")
    asked.look()  # taken by the job, which dies before its next boundary
    with asked.job.next_attempt() as again:
        found = Asked(again, tmp_path).answer(id_)
    assert (found.stage, found.attempt) == (Stage.VERIFIED, 1)


def test_a_request_whose_job_died_between_the_answer_and_its_removal_is_not_done_again(asked: Asked) -> None:
    id_ = asked.ask("leave")
    inbox.note_stage(asked.run_dir, id_, Stage.VERIFIED, step=5)
    asked.look()
    asked.job.train(2)
    assert inbox.requests(asked.run_dir) == []
    assert not any(ended.asked_by for ended in asked.ended)
    assert (found := inbox.answer_of(asked.run_dir, id_)) is not None
    assert found.step == 5


def test_whoever_still_waits_when_the_job_ends_is_told_so(asked: Asked) -> None:
    asked.look()
    id_ = asked.ask("audit")
    asked.of_job.finish(asked.run_dir)
    assert "The job has ended at step 0" in asked.refusal(id_)


def test_whoever_stops_the_job_is_answered_before_it_exits(asked: Asked) -> None:
    id_ = asked.ask("leave")
    asked.look()
    asked.of_job.left(asked.run_dir, "")
    found = inbox.stopped_by(asked.run_dir, 0)
    assert found == inbox.answer_of(asked.run_dir, id_)
    assert found is not None
    assert (found.author, found.problem) == ("me", "")
    assert inbox.stopped_by(asked.run_dir, 1) is None


HOSTILE: dict[str, Any] = {
    "empty": b"",
    "no-json": b"{",
    "a-list": b"[]",
    "too-deep": b'{"kind":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "huge": b'{"kind": "' + b"a" * 2**21 + b'"}',
    "other-kind": {"kind": "format the disk"},
    "withdraw-nothing": {"kind": "withdraw"},
    "no-deadline": {"deadline": "tomorrow"},
    "infinite": b'{"kind": "save", "author": "", "requested_at": 0, "deadline": 1e999}',
    "long-author": {"author": "a" * 300},
    "surrogate": {"author": "\ud800"},
    "surrogate-kind": {"kind": "\ud800"},
    "surrogate-name": {"kind": "pull", "name": "\ud800"},
    "pull-of-nothing": {"kind": "pull"},
    "name-of-nothing": {"name": "dense/bias"},
    "rows-backwards": {"kind": "pull", "name": BIAS, "rows": [[3, 1]]},
    "many-rows": {"kind": "pull", "name": BIAS, "rows": [[0, 1]] * 10_001},
    "negative-row": {"kind": "pull", "name": BIAS, "rows": [[-1, 2]]},
    "late": {"deadline": 0.0},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_request_is_refused_with_a_reason_and_delays_no_other(asked: Asked, name: str) -> None:
    content = HOSTILE[name]
    if isinstance(content, dict):
        usual = {"kind": "save", "author": "you", "requested_at": 0.0, "deadline": time.time() + 60}
        content = json.dumps(usual | content).encode()
    good = asked.ask("audit")
    (asked.run_dir / "inbox" / "0-bad.request.json").write_bytes(content)
    assert asked.refusal("0-bad")
    eventually(lambda: not (asked.run_dir / "inbox" / "0-bad.request.json").exists())
    asked.look()
    asked.job.train(3)
    eventually(lambda: any(good in ended.asked_by for ended in asked.ended))


@pytest.mark.parametrize("kind", ["audit", "leave", "withdraw"])
def test_a_request_whose_name_is_not_valid_unicode_is_refused_and_ends_no_job(
    asked: Asked, kind: Kind
) -> None:
    good = asked.ask(kind, name="x" if kind == "withdraw" else "")
    path = asked.run_dir / "inbox" / f"{good}.request.json"
    path.rename(path.with_name("\udcff.request.json"))
    assert "not valid Unicode" in asked.refusal("\udcff")
    asked.job.train(3)


def test_what_cannot_be_read_or_removed_is_answered_once(asked: Asked) -> None:
    inbox = asked.run_dir / "inbox"
    good = asked.ask("save")
    (inbox / "a-directory.request.json").mkdir()
    os.mkfifo(inbox / "a-pipe.request.json")
    (inbox / "a-link.request.json").symlink_to("/dev/zero")
    assert asked.answer(good).stage is Stage.VERIFIED
    for name in ("a-directory", "a-pipe", "a-link"):
        assert "Not a valid request" in asked.refusal(name)
    answer = inbox / "a-directory.answer.json"
    before = answer.stat().st_mtime_ns
    asked.look()
    asked.job.train(1)
    assert answer.stat().st_mtime_ns == before


def test_answers_that_nobody_fetches_are_removed_after_an_hour(asked: Asked) -> None:
    id_ = asked.ask("pull", name=BIAS)
    asked.answer(id_)
    assert inbox.requests(asked.run_dir) == []
    for path in (asked.run_dir / "inbox").glob(f"{id_}.*"):
        os.utime(path, (0, 0))
    inbox.clean(asked.run_dir)
    assert not list((asked.run_dir / "inbox").iterdir())


def test_an_author_who_gives_up_leaves_nothing_behind(asked: Asked) -> None:
    id_ = asked.ask("audit")
    inbox.forget(asked.run_dir, id_)
    asked.look()
    assert not list((asked.run_dir / "inbox").iterdir())


def test_an_answer_that_the_disk_does_not_take_is_written_later(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = inbox.write_durably, [OSError(28, "No space left on device")]

    def write(path: Path, chunks: Any) -> None:
        if failures:
            raise failures.pop()
        real(path, chunks)

    monkeypatch.setattr(inbox, "write_durably", write)
    id_ = asked.ask("pull", name="nothing")
    asked.look()
    eventually(lambda: not failures)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RETRY_SECS + 1)
    assert "There is no variable" in asked.refusal(id_)


def test_an_update_whose_taking_the_disk_does_not_let_note_waits_and_is_taken_later(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.submit(asked.run_dir, Update(id="x").add(BIAS, ONES), at_step=10**6)

    def full() -> None:
        raise OSError(28, "No space left on device")

    between(monkeypatch, "note_stage", full)
    asked.look()
    assert ([one.path for one in inbox.waiting(asked.run_dir)], inbox.ended(asked.run_dir)) == ([path], {})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RETRY_SECS + 1)
    asked.look()
    eventually(lambda: asked.settle() or stage_of(asked.run_dir, "x") is Stage.SCHEDULED)


def test_a_withdrawal_is_answered_when_the_job_has_done_or_refused_it(asked: Asked) -> None:
    path = inbox.submit(asked.run_dir, Update(id="later").add(BIAS, ONES), at_step=10**6)
    asked.look()
    eventually(lambda: asked.settle() or stage_of(asked.run_dir, "later") is Stage.SCHEDULED)
    later, unknown = asked.ask("withdraw", name="later"), asked.ask("withdraw", name="unknown")
    assert asked.answer(later).stage is Stage.WITHDRAWN
    assert (stage_of(asked.run_dir, "later"), path.exists()) == (Stage.WITHDRAWN, False)
    assert "unknown, or committed already" in asked.refusal(unknown)


def test_a_withdrawal_that_removes_the_file_while_the_job_takes_it_has_happened(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.submit(asked.run_dir, Update(id="x").add(BIAS, ONES))
    between(monkeypatch, "note_stage", path.unlink)
    asked.look()
    assert stage_of(asked.run_dir, "x") is None, "no job has it"
    # Whoever has removed it has read the job's note before, and asks the job.
    assert asked.answer(asked.ask("withdraw", name="x", note="wrong")).stage is Stage.WITHDRAWN
    ended = inbox.ended(asked.run_dir)["x"]
    assert (ended.stage, ended.withdrawn_by, ended.reason) == (Stage.WITHDRAWN, "me", "wrong")
    inbox.submit(asked.run_dir, Update(id="x").add(BIAS, ONES), at_step=10**6)
    asked.look()
    eventually(lambda: asked.settle() or stage_of(asked.run_dir, "x") is Stage.SCHEDULED)
    assert asked.answer(asked.ask("withdraw", name="x")).stage is Stage.WITHDRAWN
    assert "unknown, or committed already" not in str(inbox.ended(asked.run_dir)["x"])


def test_a_request_that_is_not_valid_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UpdateRefused, match="names a variable"):
        inbox.ask(tmp_path, "pull", author="me", timeout_secs=1.0)
    assert not list(tmp_path.iterdir())


def test_an_update_that_replaced_a_lost_one_is_not_said_to_be_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its author withdraws the first one while the job reads it, and pushes another one with its id."""
    read = inbox.read

    def read_and_replace(path: Any, *rest: Any) -> Any:
        monkeypatch.setattr(inbox, "read", read)
        found = read(path, *rest)
        assert inbox.withdraw(tmp_path, "x", lambda: True)
        inbox.submit(tmp_path, Update(id="x").scale(BIAS, 3.0))
        return found

    with Job(1) as job:
        reader = reader_of(job)
        inbox.submit(tmp_path, Update(id="x").scale(BIAS, 2.0))
        request = inbox.ask(tmp_path, "withdraw", author="ada", timeout_secs=60.0, name="x")
        monkeypatch.setattr(inbox, "read", read_and_replace)
        for _ in range(2):
            reader.look(tmp_path, training=True)
        job.train(2)
        eventually(lambda: (reader.take_outcomes(tmp_path), reader.settle(tmp_path), not reader._taken)[-1])
        assert (stage_of(tmp_path, request.id), stage_of(tmp_path, "x")) == (Stage.REFUSED, Stage.VERIFIED)
