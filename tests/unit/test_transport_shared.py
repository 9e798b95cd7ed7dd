"""Shared memory: the files in the directory, a full file system, and files that dead processes left."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.errors import ClusterError, UpdateRefused
from replicast.transport import Transport, shared
from replicast.transport.shared import KEPT_BYTES, SharedFile, remove_leftovers
from replicast.update.digest import BLOCK_BYTES
from tests.unit.test_transport_conformance import some

PREFIX = f"replicast-memory-{os.getuid()}-"
LARGE = KEPT_BYTES[0] // 4 + 3

HOLD = """
import sys
from pathlib import Path
import numpy as np
from replicast.transport import Transport

transport = Transport(sys.argv[2], 0, directory=Path(sys.argv[1]))
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


def open_files(directory: Path) -> int:
    """How many files of a directory this process has open, also those without a name; not those of others."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, by a thread that another test has left
            found += str(descriptor.readlink()).startswith(str(directory))
    return found


def fails(number: int) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Transport]:
    """Worker 0 of a job. When it and `other` are closed, nothing is left of what they had."""
    before = open_files(tmp_path)
    transport = Transport("job", 0, directory=tmp_path)
    yield transport
    transport.close()
    assert files_in(tmp_path) == []
    assert open_files(tmp_path) == before


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Transport]:
    transport = Transport("job", 1, directory=tmp_path)
    yield transport
    transport.close()


def test_no_room_says_how_much_is_needed_and_free_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Transport
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        with pytest.raises(UpdateRefused, match=r"Worker 1 has no room .* REPLICAST_SHM_DIR") as caught:
            other.publish("one", [some(1_000_000)])
    assert caught.value.worker == 1
    assert caught.value.expected == "4,000,000 bytes free"
    assert str(tmp_path) in caught.value.problem
    assert files_in(tmp_path) == []
    other.publish("one", [some(10)])


def test_a_file_that_is_too_short_is_refused_before_it_is_mapped(tmp_path: Path, source: Transport) -> None:
    parcel = source.publish("one", [some(10_000)])
    os.truncate(tmp_path / f"{PREFIX}job-one", 64)
    with pytest.raises(UpdateRefused, match="damaged") as caught:
        source.receive(parcel, 120.0)
    assert (caught.value.expected, caught.value.received) == ("40,000 bytes", "64 bytes")


@pytest.mark.parametrize("name", ["", "a/b", "../x", "ä", "x" * 101])
def test_an_id_that_could_lead_elsewhere_is_refused(name: str, tmp_path: Path, source: Transport) -> None:
    with pytest.raises(ValueError, match="Received: "):
        source.publish(name, [some(1)])
    with pytest.raises(ValueError, match="Received: "):
        Transport(name, 0, directory=tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.zeros(2, "i4,f4")])
def test_only_numbers_can_be_sent(array: np.ndarray, source: Transport) -> None:
    with pytest.raises(TypeError, match="Received: dtype"):
        source.publish("one", [array])


def test_leftovers_of_a_killed_process_are_removed_and_those_of_a_live_one_are_not(tmp_path: Path) -> None:
    dead, alive = held_by_another_process(tmp_path, "dead"), held_by_another_process(tmp_path, "alive")
    try:
        end(dead)
        assert (tmp_path / f"{PREFIX}dead-one").exists()
        transport = Transport("mine", 0, directory=tmp_path)
        assert files_in(tmp_path) == [f"{PREFIX}alive-one"]
        transport.close()
    finally:
        end(alive)
    assert remove_leftovers(tmp_path) == [tmp_path / f"{PREFIX}alive-one"]
    assert files_in(tmp_path) == []


def test_a_parcel_is_one_file_of_its_size_that_only_this_user_can_read(
    tmp_path: Path, source: Transport
) -> None:
    parcel = source.publish("one", [some(100), some(5)])
    assert files_in(tmp_path) == [f"{PREFIX}job-one"]
    status = (tmp_path / f"{PREFIX}job-one").stat()
    assert (status.st_size, status.st_mode & 0o777) == (parcel.nbytes, 0o600)
    assert parcel.nbytes == 448 + 64


def test_memory_that_all_only_read_is_used_again_and_mapped_once(
    tmp_path: Path, source: Transport, other: Transport
) -> None:
    before, seen = open_files(tmp_path), []
    for seed, count in enumerate((LARGE, LARGE, LARGE - 100)):
        parcel = source.publish(f"p{seed}", [some(count, seed)], to_read=True)
        for transport in (source, other):
            (found,) = transport.receive(parcel, 120.0)
            assert found.tobytes() == some(count, seed).tobytes()
            seen.append(found.ctypes.data)
        source.release(f"p{seed}", reuse=True)
        assert files_in(tmp_path) == [f"{PREFIX}job-p0"]
    assert len(set(seen)) == 2, "each worker maps the memory once"
    assert open_files(tmp_path) == before + 1


@pytest.mark.parametrize(
    ("count", "reuse", "to_read"), [(10, True, True), (LARGE, False, True), (LARGE, True, False)]
)
def test_what_is_small_or_may_still_be_in_use_is_not_used_again(
    count: int,
    reuse: bool,
    to_read: bool,
    tmp_path: Path,
    source: Transport,
    other: Transport,
) -> None:
    parcel = source.publish("one", [some(count)], to_read=to_read)
    (kept,) = other.receive(parcel, 120.0)
    source.release("one", reuse=reuse)
    assert files_in(tmp_path) == []
    source.publish("two", [some(count, seed=2)], to_read=True)
    assert kept.tobytes() == some(count).tobytes()


def test_of_two_parcels_that_are_released_one_keeps_its_memory(
    tmp_path: Path, source: Transport, other: Transport
) -> None:
    parcels = [source.publish(name, [some(LARGE)], to_read=True) for name in ("a", "b")]
    for parcel in parcels:
        other.receive(parcel, 120.0)
    for name in ("b", "a"):  # the others have mapped b last, and a is kept
        source.release(name, reuse=True)
    assert files_in(tmp_path) == [f"{PREFIX}job-a"]
    (found,) = other.receive(source.publish("c", [some(LARGE, seed=3)], to_read=True), 1.0)
    assert found.tobytes() == some(LARGE, seed=3).tobytes()


@pytest.mark.parametrize(("workers", "is_kept"), [(1, True), (2, False)])
def test_memory_that_is_too_large_to_be_kept_is_held_by_no_worker(
    workers: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 4 * (LARGE + 13)
    small = os.statvfs_result((1, 1, 8 * nbytes, 0, 0, 0, 0, 0, 0, 255))  # the workers may keep an eighth
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    ranks = range(workers)
    source, other = (
        Transport("job", rank, directory=tmp_path, local_ranks=ranks) for rank in (0, workers - 1)
    )
    other.receive(source.publish("one", [some(LARGE)], to_read=True), 1.0)
    other.release("one")
    source.release("one", reuse=True)
    assert bool(files_in(tmp_path)) is is_kept
    assert (str(tmp_path) in Path("/proc/self/maps").read_text()) is is_kept
    source.close()
    other.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_threads_that_release_at_once_leave_one_file_and_none_after_the_end(
    tmp_path: Path, source: Transport
) -> None:
    before = open_files(tmp_path)
    names = [str(number) for number in range(8)]
    for name in names:
        source.publish(name, [some(LARGE)], to_read=True)
    meeting = threading.Barrier(len(names))

    def release(name: str) -> None:
        meeting.wait(120)
        source.release(name, reuse=True)

    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(release, names))
    assert len(files_in(tmp_path)) == 1
    assert open_files(tmp_path) == before + 1
    source.close()
    source.publish("late", [some(LARGE)], to_read=True)
    source.release("late", reuse=True)  # by a thread that is late


def test_what_cannot_be_named_or_mapped_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Transport
) -> None:
    before = open_files(tmp_path)
    for owner, name in ((os, "link"), (shared, "map_shared")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails(errno.EIO))
            with pytest.raises(OSError, match="Input/output error"):
                source.publish("one", [some(10)])
        assert files_in(tmp_path) == []
        assert open_files(tmp_path) == before
    first = source.publish("one", [some(10)])
    with pytest.raises(FileExistsError):
        source.publish("one", [some(11)])
    assert source.receive(first, 120.0)[0].tobytes() == some(10).tobytes()


def test_kept_memory_is_given_back_if_its_space_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Transport
) -> None:
    before, fallocate = open_files(tmp_path), os.posix_fallocate
    source.publish("one", [some(LARGE)], to_read=True)
    source.release("one", reuse=True)

    def full_until_it_goes(descriptor: int, offset: int, nbytes: int) -> None:
        if open_files(tmp_path) > before + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full_until_it_goes)
    parcel = source.publish("two", [some(2 * LARGE)], to_read=True)
    assert source.receive(parcel, 120.0)[0].tobytes() == some(2 * LARGE).tobytes()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_flipped_bit_is_noticed_by_exactly_one_of_those_who_share_the_memory(
    size: int, tmp_path: Path
) -> None:
    ranks = range(size)
    transports = [Transport("job", rank, directory=tmp_path, local_ranks=ranks) for rank in ranks]
    for block in range(4):
        name = f"p{block}"
        parcel = transports[0].publish(name, [np.zeros(3 * BLOCK_BYTES + 1, np.uint8)], to_read=True)
        with (tmp_path / f"{PREFIX}job-{name}").open("r+b") as file:
            file.seek(block * BLOCK_BYTES)
            file.write(b"\1")
        refusals = []
        for transport in transports:
            try:
                transport.receive(parcel, 120.0)
            except UpdateRefused as refusal:
                refusals.append(refusal)
        (refusal,) = refusals
        assert f"damaged at worker {refusal.worker}" in refusal.problem
        assert f"of block {block}" in str(refusal.expected)
        transports[0].release(name)
    for transport in transports:
        transport.close()


def test_arrays_that_live_on_hold_no_file_open(tmp_path: Path, source: Transport) -> None:
    before, kept = open_files(tmp_path), []
    for number in range(50):
        parcel = source.publish(str(number), [some(20, number)], to_read=number % 2 == 0)
        kept += source.receive(parcel, 120.0)
        source.release(str(number))
    assert open_files(tmp_path) == before
    source.close()
    assert all(array.tobytes() == some(20, number).tobytes() for number, array in enumerate(kept))


def test_a_forked_process_changes_nothing_of_what_its_parent_received(source: Transport) -> None:
    parcel = source.publish("one", [some(LARGE)])
    (mine,) = source.receive(parcel, 120.0)
    child = os.fork()
    if child == 0:
        mine[:] = 0
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.tobytes() == source.receive(parcel, 120.0)[0].tobytes() == some(LARGE).tobytes()


def test_one_dead_worker_of_a_live_job_takes_nothing_from_the_others(
    tmp_path: Path, other: Transport
) -> None:
    parcel = other.publish("two", [some(10)])
    end(held_by_another_process(tmp_path, "job"))
    assert remove_leftovers(tmp_path) == [tmp_path / f"{PREFIX}job-one"]
    assert other.receive(parcel, 120.0)[0].tobytes() == some(10).tobytes()


def test_a_file_is_locked_before_it_has_a_name(tmp_path: Path) -> None:
    file = SharedFile(tmp_path, 64)
    assert files_in(tmp_path) == []
    file.complete(tmp_path / f"{PREFIX}x")
    assert remove_leftovers(tmp_path) == []
    file.remove()
    assert files_in(tmp_path) == []


def test_only_files_of_this_user_with_our_name_are_removed_or_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    for directory in (place, elsewhere, place / f"{PREFIX}directory"):
        directory.mkdir()
    (elsewhere / "precious").write_text("kept")
    (place / f"{PREFIX}link").symlink_to(elsewhere / "precious")
    (place / "replicast-notes").write_text("kept")
    os.mkfifo(place / f"{PREFIX}pipe")
    assert remove_leftovers(place) == [place / f"{PREFIX}pipe"], "opening the pipe must not block"
    assert files_in(place) == [f"{PREFIX}directory", f"{PREFIX}link", "replicast-notes"]
    assert files_in(elsewhere) == ["precious"]
    transport = Transport("job", 0, directory=place)
    parcel = transport.publish("one", [some(10)])
    other_user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    (place / f"{PREFIX}job-one").rename(place / f"replicast-memory-{other_user}-job-one")
    with pytest.raises(UpdateRefused, match="waited"):
        transport.receive(parcel, 0.01)
    transport.close()


def test_a_directory_that_cannot_hold_unnamed_files_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", fails(errno.EOPNOTSUPP))
    with pytest.raises(ClusterError, match=r"REPLICAST_SHM_DIR.*not supported"):
        Transport("job", 0, directory=tmp_path)


def test_a_release_never_raises_even_when_the_directory_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "shm"
    place.mkdir()
    transport = Transport("job", 0, directory=place)
    before = open_files(tmp_path)
    transport.publish("one", [some(LARGE)])
    shutil.rmtree(place)
    transport.release("one")
    transport.close()
    assert open_files(tmp_path) == before
