"""Entries of a superseded group are void, wherever the group was stopped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from replicast.core.entries import (
    Committed,
    Decided,
    Entry,
    Payload,
    Receipt,
    Refused,
    Scheduled,
    Stage,
    Started,
    Withdrawn,
)
from replicast.errors import ClusterError, FileDamaged, JobFailed
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence, sees_group
from replicast.storage.journal import FileJournal, committed_updates, load_update
from replicast.storage.run_files import FORMAT, RunInfo, check_free, read_run_info, write_run_info
from replicast.update.digest import digest_state
from replicast.update.schema import Schema
from replicast.update.update import Update
from tests.unit.checkpoint.operations import at_each_operation
from tests.unit.checkpoint.samples import state_of, written


class Crash(BaseException):
    """The process ends here."""


def crash() -> None:
    raise Crash


def start(run: Path) -> FileJournal:
    return FileJournal(run, Fence(run, attempt=0))


def commit(journal: FileJournal, id_: str, sequence: int | None = None) -> None:
    """Commits an update as the next one, or as the one that a group which was stopped takes for the next."""
    sequence = journal.history().next_sequence if sequence is None else sequence
    update = Update(id=id_).scale("dense/bias", 2.0)
    digest = update.content_digest()
    journal.write(Payload(id_, digest, None), update)
    journal.write(Committed(sequence, id_, digest, 3, 0))


def receipt(digest: str, stage: Stage) -> Receipt:
    return Receipt(1, "first", 12, {0: "right", 1: digest}, 1.0, 0.1, 0.0, stage)


def ids(run: Path) -> list[str]:
    """What the journal holds, read by somebody else, with every payload."""
    updates = committed_updates(run)
    found = [load_update(run, update.sequence).id for update in updates]
    assert found == [update.id for update in updates]
    return found


def test_a_group_writes_until_another_takes_the_run(tmp_path: Path) -> None:
    first = Fence(tmp_path, attempt=0)
    first.check()
    second = Fence(tmp_path, attempt=1)
    second.check()
    with pytest.raises(JobFailed, match="attempt 1"):
        first.check()


def test_who_claims_a_run_has_its_name_on_disk_also_when_another_made_the_directory(
    tmp_path: Path, synced: list[Path]
) -> None:
    (tmp_path / "run").mkdir()
    fence = Fence(tmp_path / "run", attempt=0)
    assert synced == [tmp_path / "run", tmp_path, tmp_path / "run" / "groups", fence.directory.as_path()]


def test_a_commit_that_was_stopped_anywhere_overwrites_nothing_of_the_next_group(tmp_path: Path) -> None:
    outcomes = set()
    for run, operations in at_each_operation(tmp_path):
        old = start(run)
        commit(old, "first")
        with operations.installed(lambda run=run: commit(start(run), "new")):
            try:
                commit(old, "late", sequence=2)
                said = "committed"
            except JobFailed:
                said = "taken over"
        if operations.fired is None:
            break
        assert said == "taken over"
        assert ids(run) in (["first", "new"], ["first", "late", "new"])
        outcomes.add(len(ids(run)))
        commit(start(run), "next")
        assert ids(run)[-2:] == ["new", "next"]
    assert outcomes == {2, 3}


def test_a_commit_that_was_killed_anywhere_is_there_or_not_and_the_next_start_continues(
    tmp_path: Path,
) -> None:
    outcomes = set()
    for run, operations in at_each_operation(tmp_path):
        old = start(run)
        commit(old, "first")
        with operations.installed(crash), contextlib.suppress(Crash):
            commit(old, "killed")
        if operations.fired is None:
            break
        outcomes.add(tuple(ids(run)))
        commit(start(run), "new")
        assert ids(run) in (["first", "new"], ["first", "killed", "new"])
    assert outcomes == {("first",), ("first", "killed")}


def test_of_two_groups_that_claim_at_once_one_has_the_run_and_the_other_knows(tmp_path: Path) -> None:
    seen = set()
    for run, operations in at_each_operation(tmp_path):
        others: list[FileJournal] = []
        commit(start(run), "first")
        void = run / "groups" / "000001" / "void.safetensors"
        void.touch()  # The last thing that a start does is to remove it.

        def claim_too(run: Path = run, others: list[FileJournal] = others) -> None:
            others.append(start(run))
            commit(others[0], "other")

        mine = None
        with operations.installed(claim_too), contextlib.suppress(JobFailed):
            mine = start(run)
        if operations.fired is None:
            break
        assert ids(run) == ["first", "other"]
        outcomes = []
        for journal in (mine, *others):
            if journal is not None:
                try:
                    commit(journal, "more")
                    outcomes.append("written")
                except JobFailed:
                    outcomes.append("taken over")
        assert outcomes in (["written"], ["written", "taken over"], ["taken over", "written"])
        assert ids(run) == ["first", "other", "more"]
        seen.add(tuple(outcomes))
    assert len(seen) == 3


def test_a_group_that_was_killed_while_it_claimed_has_taken_nothing_away(tmp_path: Path) -> None:
    for run, operations in at_each_operation(tmp_path):
        commit(start(run), "first")
        with operations.installed(crash), contextlib.suppress(Crash):
            start(run)
        assert ids(run) == ["first"]
        commit(start(run), "next")
        assert ids(run) == ["first", "next"]
    assert operations.count > 5


LATE: list[Entry] = [
    Started(0, 1),
    Committed(2, "first", "digest", 13, 0),
    Receipt(1, "first", 12, {0: "right", 1: "another"}, 1.0, 0.1, 0.0, Stage.FAILED),
    Decided(1, True, 12, 1),
    Scheduled("first", "digest", 20),
    Withdrawn("first"),
    Refused("first", ("ticket",), "why"),
]


@pytest.mark.parametrize("late", LATE, ids=lambda entry: type(entry).__name__)
def test_nothing_that_a_coordinator_writes_later_changes_what_the_journal_says(
    tmp_path: Path, late: Entry
) -> None:
    old = start(tmp_path)
    commit(old, "first")
    new = start(tmp_path)
    new.write(receipt("right", Stage.VERIFIED))
    said = committed_updates(tmp_path)
    with pytest.raises(JobFailed, match="taken over"):
        old.write(late)
    third = start(tmp_path)
    for history in (new.history(), third.history()):
        assert list(history.by_id) == ["first"]
        assert history.receipts[1].stage is Stage.VERIFIED
        assert not any((history.decided, history.scheduled, history.withdrawn, history.refused))
    assert committed_updates(tmp_path) == said


def test_what_was_written_before_the_run_was_taken_over_counts(tmp_path: Path) -> None:
    old = start(tmp_path)
    commit(old, "first")
    old.write(receipt("right", Stage.VERIFIED))
    old.write(Decided(1, True, 12, 1))
    old.write(Withdrawn("second"))
    for _ in range(3):
        history = start(tmp_path).history()
        assert ids(tmp_path) == ["first"]
        assert (list(history.receipts), history.decided[1].kept) == ([1], True)
        assert history.withdrawn == {"second"}


def test_what_a_run_is_about_is_said_by_the_group_that_has_it(tmp_path: Path) -> None:
    old, info = Fence(tmp_path, attempt=0), RunInfo(FORMAT, Schema([]), 2, 1, 0.0)
    write_run_info(Fence(tmp_path, attempt=1), info)
    with pytest.raises(JobFailed, match="taken over"):
        write_run_info(old, replace(info, workers=7, attempt=0))
    assert read_run_info(tmp_path).workers == 2


OLD, NEW = digest_state(state_of(0)), digest_state(state_of(2))


def save(run: Path, fence: Fence, seed: int, step: int = 5) -> None:
    written(CheckpointStore(run, fence), step, seed)


def saved(run: Path) -> dict[int, str]:
    """What a reader finds, to the last byte."""
    store = CheckpointStore(run)
    assert store.problems() == []
    for manifest in store.manifests():
        store.open(manifest.step).verify()
    return {manifest.step: manifest.state_digest for manifest in store.manifests()}


def test_a_checkpoint_that_was_stopped_anywhere_takes_the_place_of_none_of_the_next_group(
    tmp_path: Path,
) -> None:
    for run, operations in at_each_operation(tmp_path):
        old = Fence(run, attempt=0)
        save(run, old, 0)
        save(run, old, 0, step=4)
        take_over = lambda run=run: save(run, Fence(run, attempt=1), 2)  # noqa: E731
        # Unless it was stopped when it had looked at the claim, and removed what it had replaced.
        with operations.installed(take_over), contextlib.suppress(JobFailed):
            save(run, old, 1)
        if operations.fired is None:
            break
        assert saved(run) == {4: OLD, 5: NEW}, operations.fired
        CheckpointStore(run, Fence(run, attempt=2)).clean()
        assert saved(run) == {4: OLD, 5: NEW}
    assert operations.count > 10


def test_a_checkpoint_of_a_superseded_group_is_void(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = Fence(tmp_path, attempt=0)
    save(tmp_path, old, 0, step=5)
    new = Fence(tmp_path, attempt=1)
    for step in (5, 6):
        with pytest.raises(JobFailed, match="taken over"):
            save(tmp_path, old, 1, step=step)
    assert saved(tmp_path) == {5: OLD}
    CheckpointStore(tmp_path, new).clean()
    assert saved(tmp_path) == {5: OLD}
    assert "00000006-1 does not count" in caplog.text


@pytest.mark.parametrize("starts", [0, 1, 3])
@pytest.mark.parametrize("name", ["00000005", "00000005-2"])
def test_a_copy_of_another_runs_checkpoint_is_found_by_the_next_start(
    tmp_path: Path, name: str, starts: int
) -> None:
    for attempt in range(starts):
        Fence(tmp_path, attempt)
    Fence(tmp_path / "other", attempt=0)
    save(tmp_path / "other", Fence(tmp_path / "other", attempt=1), 0)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "other" / "checkpoints" / "00000005-2").rename(tmp_path / "checkpoints" / name)
    store = CheckpointStore(tmp_path, Fence(tmp_path, attempt=9))
    store.clean()
    # The second of three groups is one of this run's own: such a name says that this one wrote it.
    counts = name == "00000005" or starts < 2
    assert saved(tmp_path) == ({5: OLD} if counts else {})
    assert (tmp_path / "checkpoints" / name).exists()


@pytest.mark.parametrize("damage", ["flipped", "another's", "missing"])
def test_a_damaged_claim_is_reported_and_never_guessed(tmp_path: Path, damage: str) -> None:
    commit(start(tmp_path), "first")
    commit(start(tmp_path), "second")
    path = tmp_path / "groups" / "000002" / "log.jsonl"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        first, others = whole.split(b"\n", 1)
        if damage == "another's":
            first = (tmp_path / "groups/000001/log.jsonl").read_bytes().partition(b"\n")[0]
        else:
            first = first[:50] + bytes([first[50] ^ 1]) + first[51:]
        path.write_bytes(first + b"\n" + others)
    for read in (committed_updates, start):
        with pytest.raises(FileDamaged, match=r"000002/log\.jsonl.*Restore it from a backup"):
            read(tmp_path)
    path.write_bytes(whole)
    journal = start(tmp_path)
    journal.check_start(None)
    assert list(journal.history().committed) == [1, 2]


def test_what_is_no_directory_among_the_groups_stops_nothing(tmp_path: Path) -> None:
    commit(start(tmp_path), "first")
    (tmp_path / "groups" / "000007").write_bytes(b"junk")
    (tmp_path / "groups" / "000008").symlink_to("000008")
    commit(start(tmp_path), "second")
    assert ids(tmp_path) == ["first", "second"]


HOLDER = """
import sys
from pathlib import Path
from replicast.storage.claims import Fence
fence = Fence(Path(sys.argv[1]), attempt=0)
print("claimed", flush=True)
if sys.stdin.readline() == "release\\n":
    fence.release()
    print("released", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["release", "exit", "zombie"])
def test_the_run_directory_of_a_job_that_runs_is_not_taken_over(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(ClusterError, match=f"process {holder.pid}.*Stop it first"):
            check_free(tmp_path)
        if end == "release":
            holder.stdin.write("release\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "released\n"
        elif end == "zombie":
            holder.kill()
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        else:
            holder.stdin.write("\n")
            holder.stdin.flush()
            holder.wait()
        assert check_free(tmp_path) == ""
        assert Fence(tmp_path, attempt=1).number == 2
        holder.kill()


def test_a_directory_is_told_from_another_at_the_same_path_of_another_host(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    first = Fence(here, 0)
    other = Fence(elsewhere, 0)
    assert sees_group(here, first.identity)
    assert not sees_group(elsewhere, first.identity), "another run"
    assert not sees_group(tmp_path / "nowhere", first.identity)
    assert not sees_group(here, other.identity)
    assert not sees_group(here, ""), "worker 0 has no run directory"
    first.release()
    second = Fence(here, 1)
    assert sees_group(here, second.identity)
    assert second.identity != first.identity
    assert not (tmp_path / "nowhere").exists()
