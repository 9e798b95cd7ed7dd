"""Shared memory: what lies in the directory, what a full one does, and what is left by those who died."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from replicast.errors import ClusterError, UpdateRefused
from replicast.transport import Parcel, SharedMemoryTransport
from replicast.transport import directory as directory_module
from replicast.transport.arriving import PROGRESS_BYTES
from replicast.transport.directory import JobDirectory, remove_leftovers
from replicast.transport.shared import ANNOUNCED_BYTES, EXPECTED_AT_ONCE, Draft
from tests.unit.test_transport_conformance import some

PREFIX = f"replicast-{os.getuid()}-"

HOLD = """
import sys
from pathlib import Path
import numpy as np
from replicast.transport import SharedMemoryTransport

transport = SharedMemoryTransport(sys.argv[2], 0, directory=Path(sys.argv[1]))
transport.publish("one", [np.arange(1000)])
print("ready", flush=True)
sys.stdin.read()
"""


def held_by_another_process(place: Path, job: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place), job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def files_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_parcel_is_one_file_of_its_size_that_only_this_user_can_read(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    parcel = transport.publish("one", [some(100), some(5)])
    assert files_in(tmp_path) == [f"{PREFIX}job", f"{PREFIX}job/lock", f"{PREFIX}job/parcel-one"]
    assert (tmp_path / f"{PREFIX}job").stat().st_mode & 0o777 == 0o700
    status = (tmp_path / f"{PREFIX}job/parcel-one").stat()
    assert (status.st_size, status.st_mode & 0o777) == (parcel.nbytes + PROGRESS_BYTES, 0o600)
    assert parcel.nbytes == 448 + 64
    transport.close()


def test_a_released_parcel_is_gone_and_a_spare_for_the_next_is_kept_only_if_it_is_worth_it(
    tmp_path: Path,
) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    for name, count in (("small", 10), ("large", 1_000_000)):
        transport.publish(name, [some(count)])
        transport.release(name)
    assert not list(tmp_path.rglob("parcel-*"))
    transport.publish("other-size", [some(10)])  # waits for the spare, and gives its room back
    assert not list(tmp_path.rglob("draft-*"))
    transport.close()
    assert files_in(tmp_path) == []


def test_two_threads_that_release_at_once_leave_one_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    for name in ("one", "two"):
        transport.publish(name, [some(1 << 18)])
    meeting, take_spare = threading.Barrier(2), transport._take_spare

    def taken_by_both() -> Draft | None:
        spare = take_spare()
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
        return spare

    monkeypatch.setattr(transport, "_take_spare", taken_by_both)
    threads = [threading.Thread(target=transport.release, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    transport.reserve(8)  # waits for the spare, and gives its room back
    assert len(list(tmp_path.rglob("draft-*"))) == 1
    transport.close()


def test_a_spare_carries_nothing_of_the_parcel_before(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    first = transport.publish("first", [some(1_000_003)])
    kept = transport.receive(first, 1.0)
    transport.release("first")
    second = transport.publish("second", [some(1_000_003, seed=2)])
    (found,) = transport.receive(second, 1.0)
    assert found.tobytes() == some(1_000_003, seed=2).tobytes()
    assert kept[0].tobytes() == some(1_000_003).tobytes()
    transport.close()


def test_only_what_is_published_to_be_read_is_received_where_the_others_look(tmp_path: Path) -> None:
    source = SharedMemoryTransport("job", 0, directory=tmp_path)
    other = SharedMemoryTransport("job", 1, directory=tmp_path)
    source.publish("first", [some(LARGE)])
    source.release("first")  # for the next there is a spare, which is mapped
    for name, to_read in (("read", True), ("kept", False)):
        parcel = source.publish(name, [some(LARGE)], to_read=to_read)
        mapped = source._published[name].mapped
        assert mapped is not None
        (here,), (there,) = source.receive(parcel, 1.0), other.receive(parcel, 1.0)
        assert np.shares_memory(here, mapped) == to_read
        there[:] = 0  # the others' memory is theirs alone, whatever the source has
        source.release(name)
        assert here.tobytes() == some(LARGE).tobytes()
        assert source._lent == {}
    source.close()
    other.close()


def test_no_room_says_how_much_is_needed_and_free_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SharedMemoryTransport("job", 3, directory=tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(UpdateRefused, match=r"Worker 3 has no room .* REPLICAST_SHM_DIR") as caught:
            transport.publish("one", [some(1_000_000)])
    assert caught.value.worker == 3
    assert caught.value.expected == "4,000,000 bytes free"
    assert str(tmp_path) in caught.value.problem
    assert not [name for name in files_in(tmp_path) if "draft" in name or "parcel" in name]
    transport.publish("one", [some(10)])
    transport.close()


def test_a_file_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", broken)
        with pytest.raises(OSError, match="Input/output error"):
            transport.publish("one", [some(10)])
    assert files_in(tmp_path) == [f"{PREFIX}job", f"{PREFIX}job/lock"]
    transport.close()


def test_a_full_file_system_for_the_spare_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    transport.publish("one", [some(1_000_000)])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        transport.release("one")
        assert transport._take_spare() is None
    transport.publish("two", [some(1_000_000)])
    transport.close()
    assert files_in(tmp_path) == []


def test_a_file_that_is_too_short_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    parcel = transport.publish("one", [some(10_000)])
    os.truncate(tmp_path / f"{PREFIX}job" / "parcel-one", 64)
    with pytest.raises(UpdateRefused, match="damaged") as caught:
        transport.receive(parcel, 1.0)
    assert (caught.value.expected, caught.value.received) == ("40,064 bytes", "64 bytes")
    transport.close()


def test_a_flipped_bit_in_shared_memory_is_noticed(tmp_path: Path) -> None:
    source = SharedMemoryTransport("job", 0, directory=tmp_path)
    transport = SharedMemoryTransport("job", 2, directory=tmp_path)
    parcel = source.publish("one", [some(10_000)])
    with (tmp_path / f"{PREFIX}job" / "parcel-one").open("r+b") as file:
        file.seek(20_000)
        byte = file.read(1)[0]
        file.seek(20_000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(UpdateRefused, match="damaged at worker 2") as caught:
        transport.receive(parcel, 1.0)
    assert caught.value.worker == 2
    transport.close()
    source.close()


LARGE = ANNOUNCED_BYTES // 4 + 3


def test_a_large_parcel_is_taken_while_it_is_written(tmp_path: Path) -> None:
    source = SharedMemoryTransport("job", 0, directory=tmp_path)
    other = SharedMemoryTransport("job", 1, directory=tmp_path)
    for number in range(3):  # the first into a new file, the next into a spare one
        parcel = source.publish(f"p{number}", [some(LARGE, seed=number), some(7)], announce=other.expect)
        taken = other._expected[parcel.id].result(30.0)
        assert taken is not None
        assert "".join(taken[1].values()) == parcel.blocks
        source.release(parcel.id)  # now only the head start has the bytes
        large, small = other.receive(parcel, 1.0)
        assert large.tobytes() == some(LARGE, seed=number).tobytes()
        assert small.tobytes() == some(7).tobytes()
    source.close()
    other.close()


def test_a_small_parcel_is_not_announced(tmp_path: Path) -> None:
    source = SharedMemoryTransport("job", 0, directory=tmp_path)
    announced: list[Parcel] = []
    source.publish("small", [some(10)], announce=announced.append)
    assert announced == []
    source.close()


def test_a_head_start_on_other_bytes_is_not_believed(tmp_path: Path) -> None:
    source = SharedMemoryTransport("job", 0, directory=tmp_path)
    other = SharedMemoryTransport("job", 1, directory=tmp_path)
    path = tmp_path / f"{PREFIX}job"

    def write_something_else_first(parcel: Parcel) -> None:
        content = np.zeros(parcel.nbytes + PROGRESS_BYTES, np.uint8)
        content[:1000] = 7  # and not between the arrays, where nobody writes
        content[parcel.nbytes :].view(np.int64)[0] = parcel.nbytes
        (path / f"coming-{parcel.id}").write_bytes(content.tobytes())
        other.expect(parcel)
        other._expected[parcel.id].result(30.0)

    parcel = source.publish("one", [some(LARGE)], announce=write_something_else_first)
    assert "".join(other._expected[parcel.id].result(0.0)[1].values()) != parcel.blocks  # type: ignore[index]
    (found,) = other.receive(parcel, 1.0)
    assert found.tobytes() == some(LARGE).tobytes()
    source.close()
    other.close()


def test_what_was_announced_and_never_comes_is_given_up(tmp_path: Path) -> None:
    source = SharedMemoryTransport("job", 0, directory=tmp_path)
    other = SharedMemoryTransport("job", 1, directory=tmp_path)

    def announced_in_vain(parcel: Parcel) -> None:
        other.expect(parcel)
        raise KeyboardInterrupt

    for number in range(EXPECTED_AT_ONCE + 2):
        with pytest.raises(KeyboardInterrupt):
            source.publish(f"p{number}", [some(LARGE)], announce=announced_in_vain)
    assert len(other._expected) == EXPECTED_AT_ONCE
    assert not list(tmp_path.rglob("coming-*"))
    other.close()  # and the suite fails if one of its threads is left
    source.close()


def test_arrays_that_live_on_hold_no_file_open(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    before = open_files()
    kept = []
    for number in range(50):
        parcel = transport.publish(str(number), [some(20, number)])
        kept += transport.receive(parcel, 1.0)
        transport.release(str(number))
    assert open_files() == before
    transport.close()
    assert all(array.tobytes() == some(20, number).tobytes() for number, array in enumerate(kept))


@pytest.mark.parametrize("name", ["", "a/b", "../x", "ä", "x" * 201])
def test_an_id_that_could_lead_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    with pytest.raises(ValueError, match="Received: "):
        transport.publish(name, [some(1)])
    transport.close()
    with pytest.raises(ValueError, match="Received: "):
        SharedMemoryTransport(name, 0, directory=tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.zeros(2, "i4,f4")])
def test_only_numbers_can_be_sent(array: np.ndarray, tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    with pytest.raises(TypeError, match="Received: dtype"):
        transport.publish("one", [array])
    transport.close()


def test_leftovers_of_a_killed_process_are_removed_and_those_of_a_live_one_are_not(tmp_path: Path) -> None:
    dead, alive = held_by_another_process(tmp_path, "dead"), held_by_another_process(tmp_path, "alive")
    try:
        end(dead)
        assert (tmp_path / f"{PREFIX}dead" / "parcel-one").exists()
        transport = SharedMemoryTransport("mine", 0, directory=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}alive", f"{PREFIX}mine"]
        assert (tmp_path / f"{PREFIX}alive" / "parcel-one").exists()
        transport.close()
    finally:
        end(alive)
    assert remove_leftovers(tmp_path) == [tmp_path / f"{PREFIX}alive"]


def test_one_dead_worker_of_a_live_job_takes_nothing_from_the_others(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("job", 1, directory=tmp_path)
    other = held_by_another_process(tmp_path, "job")
    end(other)
    parcel = transport.publish("two", [some(10)])
    assert remove_leftovers(tmp_path) == []
    assert transport.receive(parcel, 1.0)[0].tobytes() == some(10).tobytes()
    transport.close()
    assert files_in(tmp_path) == [], "the last one leaves nothing, also not what the dead one published"


def test_the_last_to_close_removes_the_directory(tmp_path: Path) -> None:
    first, second = (SharedMemoryTransport("job", rank, directory=tmp_path) for rank in range(2))
    first.close()
    assert (tmp_path / f"{PREFIX}job").is_dir()
    second.close()
    assert files_in(tmp_path) == []


def test_nothing_that_is_not_a_directory_of_this_user_is_touched(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    for directory in (place, elsewhere):
        directory.mkdir()
    (elsewhere / "precious").write_text("kept")
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").write_text("kept")
    (place / "replicast-other").mkdir()
    assert remove_leftovers(place) == []
    assert files_in(place) == [f"{PREFIX}file", f"{PREFIX}link", "replicast-other"]
    assert files_in(elsewhere) == ["precious"]


def test_a_link_in_the_place_of_a_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError, match="symbolic link"):
        SharedMemoryTransport("job", 0, directory=tmp_path)
    assert files_in(tmp_path / "elsewhere") == []


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}job").mkdir()
    (tmp_path / f"{PREFIX}job").chmod(0o755)
    with pytest.raises(ClusterError, match="mode 755"):
        SharedMemoryTransport("job", 0, directory=tmp_path)


def test_a_directory_removed_while_it_is_being_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_lock, removed = directory_module._open_lock, []

    def overtaken(descriptor: int) -> int:
        if not removed:  # another process finds the directory without an owner, just before we own it
            removed.append(True)
            monkeypatch.setattr(directory_module, "_open_lock", open_lock)
            assert remove_leftovers(tmp_path) == [tmp_path / f"{PREFIX}job"]
            monkeypatch.setattr(directory_module, "_open_lock", overtaken)
        return open_lock(descriptor)

    monkeypatch.setattr(directory_module, "_open_lock", overtaken)
    held = JobDirectory(tmp_path, "job")
    assert removed, "the race was not run"
    assert files_in(tmp_path) == [f"{PREFIX}job", f"{PREFIX}job/lock"]
    held.close()


def test_a_directory_removed_between_opening_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, removed = directory_module._locked, []

    def overtaken(lock: int, kind: int) -> bool:
        if not removed:
            removed.append(True)
            assert remove_leftovers(tmp_path) == [tmp_path / f"{PREFIX}job"]
        return locked(lock, kind)

    monkeypatch.setattr(directory_module, "_locked", overtaken)
    held = JobDirectory(tmp_path, "job")
    assert removed, "the race was not run"
    assert (tmp_path / f"{PREFIX}job" / "lock").stat().st_nlink == 1
    held.close()
    assert files_in(tmp_path) == []
