"""Memory that large updates are made in: when it is used, what it costs, and what is left of it."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replicast import storing
from replicast.blocks import digest_blocks
from replicast.errors import UpdateRefused
from replicast.storing import LARGE_BYTES, MAX_STORES, Store
from replicast.transport import Parcel, SharedMemoryTransport
from replicast.transport.layout import bytes_of
from replicast.update import Update
from tests.unit.test_transport_shared import files_in, open_files

COUNT = LARGE_BYTES // 4


def large(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(COUNT + seed).astype(np.float32)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[SharedMemoryTransport]]:
    """The transports of two workers of one host."""
    transports = [SharedMemoryTransport("job", rank, directory=tmp_path, mates=range(2)) for rank in range(2)]
    yield transports
    for transport in transports:
        transport.close()
    assert files_in(tmp_path) == []


def handed(pair: list[SharedMemoryTransport], update: Update, name: str, **how: bool) -> Parcel:
    return pair[0].publish(name, update.arrays(), store=update.store, **how)


def received(pair: list[SharedMemoryTransport], parcel: Parcel) -> list[list[bytes]]:
    return [[array.tobytes() for array in transport.receive(parcel, 1.0)] for transport in pair]


def test_only_large_values_of_a_worker_go_into_a_store(tmp_path: Path) -> None:
    assert Update().add("x", large()).store is None
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    assert Update().add("x", large()[:-1]).store is None
    assert Update().add("x", large()[:-1]).add("y", large()).store is not None
    kept = large()
    kept.flags.writeable = False
    untouched = Update().add("x", kept)
    assert untouched.store is None
    assert np.shares_memory(untouched.arrays()[0], kept)
    transport.close()
    assert Update().add("x", large()).store is None
    transport.close()  # a second time withdraws nothing of another
    assert storing._places == []


def test_values_in_a_store_are_copies_that_nobody_can_write_to(pair: list[SharedMemoryTransport]) -> None:
    mine = large()
    transposed = np.asfortranarray(large(3).reshape(-1, 1).repeat(2, axis=1))
    update = Update().add("x", mine).add("y", transposed)
    mine[:] = 0
    first, second = update.arrays()
    assert first.tobytes() == large().tobytes()
    assert second.tobytes() == transposed.tobytes()
    assert [array.flags.c_contiguous for array in (first, second)] == [True, True]
    for array in (first, second):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        assert array.ctypes.data % 64 == 0


def test_a_parcel_of_a_store_is_the_memory_that_the_update_was_made_in(
    pair: list[SharedMemoryTransport],
) -> None:
    update = Update().add("x", large()).add("small", np.ones(3, np.float32)).add("y", large(1))
    parcel = handed(pair, update, "one", to_read=True)
    assert parcel.handed_over
    here, there = (transport.receive(parcel, 1.0) for transport in pair)
    for found in (here, there):
        assert [array.tobytes() for array in found] == [array.tobytes() for array in update.arrays()]
    assert [np.shares_memory(a, b) for a, b in zip(here, update.arrays(), strict=True)] == [True, False, True]
    there[0][:] = 0  # the others' memory is theirs alone
    pair[0].release("one")
    assert update.arrays()[0].tobytes() == here[0].tobytes() == large().tobytes()


def test_what_is_not_published_to_be_read_is_received_in_memory_of_its_own(
    pair: list[SharedMemoryTransport],
) -> None:
    update = Update().assign("x", large())
    parcel = handed(pair, update, "one")
    for transport in pair:
        (found,) = transport.receive(parcel, 1.0)
        found[:] = 0
    assert update.arrays()[0].tobytes() == large().tobytes()


def test_the_digest_is_that_of_the_same_values_anywhere_else(pair: list[SharedMemoryTransport]) -> None:
    update = Update().add("x", large()).add("small", np.ones(3, np.float32))
    stored = handed(pair, update, "one")
    written = pair[0].publish("two", update.arrays())
    assert (stored.handed_over, written.handed_over) == (True, False)
    assert stored.digest == written.digest
    assert stored.blocks == "".join(digest_blocks(bytes_of(array)) for array in update.arrays())


def test_updates_that_begin_alike_do_not_disturb_each_other(pair: list[SharedMemoryTransport]) -> None:
    begun = Update().add("x", large())
    first, second = begun.add("y", large(1)), begun.add("y", large(2))
    third = second.add("z", large(3))
    parcels = [handed(pair, update, str(n)) for n, update in enumerate((third, first, begun))]
    for update, parcel in zip((third, first, begun), parcels, strict=True):
        expected = [array.tobytes() for array in update.arrays()]
        assert received(pair, parcel) == [expected, expected]
    assert first.store is begun.store
    assert [array.nbytes // 4 - COUNT for array in third.arrays()] == [0, 2, 3]


def test_an_update_can_be_published_again_and_is_not_copied_then(
    tmp_path: Path, pair: list[SharedMemoryTransport]
) -> None:
    update = Update().add("x", large())
    for name in ("one", "two", "three"):
        parcel = handed(pair, update, name)
        assert parcel.handed_over
        assert received(pair, parcel) == [[large().tobytes()]] * 2
        if name == "two":
            for published in ("one", "two"):
                pair[0].release(published)
    assert len(list(tmp_path.rglob("store-*"))) == 1
    store = update.store
    assert store is not None
    assert store.nbytes == update.nbytes


def test_a_store_is_there_until_its_parcel_is_released_and_its_update_gone(
    tmp_path: Path, pair: list[SharedMemoryTransport]
) -> None:
    def names() -> list[Path]:
        return list(tmp_path.rglob("store-*"))

    for update_goes_first in (True, False):
        update = Update().add("x", large())
        parcel = handed(pair, update, "one")
        if update_goes_first:  # as in propose(Update().add(...)): nobody has mapped it yet
            del update
            assert len(names()) == 1
            assert received(pair, parcel) == [[large().tobytes()]] * 2
            pair[0].release("one")
        else:
            pair[0].release("one")
            assert len(names()) == 1
            del update
        assert names() == []


def test_what_is_not_mostly_of_the_store_is_copied(pair: list[SharedMemoryTransport]) -> None:
    read_only = large(9)
    read_only.flags.writeable = False
    begun = Update().add("x", large())
    store = begun.store
    assert store is not None
    for number in range(3):
        parcel = handed(pair, begun.with_id(f"u{number}").add("y", read_only), f"p{number}")
        assert not parcel.handed_over
        assert received(pair, parcel) == [[large().tobytes(), large(9).tobytes()]] * 2
        assert store.nbytes == begun.nbytes, "nothing is left in it"
    longer = begun.add("y", large(1)).add("z", large(2))
    assert handed(pair, longer, "longer").handed_over
    assert not handed(pair, begun, "begun").handed_over, "the others would map three times as much"


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOENT, errno.EPERM])
def test_a_store_that_cannot_be_linked_is_copied(
    number: int, pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    parcel = handed(pair, Update().add("x", large()), "one")
    assert not parcel.handed_over
    assert received(pair, parcel) == [[large().tobytes()]] * 2


def test_a_flipped_bit_in_a_store_is_noticed_by_one_of_those_who_share_it(
    tmp_path: Path, pair: list[SharedMemoryTransport]
) -> None:
    for block in range(9):
        parcel = handed(pair, Update().add("x", np.zeros(9 * (1 << 22), np.uint8)), f"p{block}")
        (path,) = tmp_path.rglob("store-*")
        with path.open("r+b") as file:
            file.seek((block << 22) + 12_345)
            file.write(b"\1")
        finder = 1 if block == 7 else 0
        with pytest.raises(UpdateRefused, match=f"of block {block}"):
            pair[finder].receive(parcel, 1.0)
        pair[1 - finder].receive(parcel, 1.0)
        pair[0].release(parcel.id)


def test_a_store_has_no_name_and_dies_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys\nimport numpy as np\nfrom pathlib import Path\n"
        "from replicast.transport import SharedMemoryTransport\nfrom replicast.update import Update\n"
        "transport = SharedMemoryTransport('job', 0, directory=Path(sys.argv[1]))\n"
        f"update = Update().add('x', np.ones({COUNT}, np.float32))\n"
        "print(update.store is not None, flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"True\n"
    assert [name.rpartition("/")[2] for name in files_in(tmp_path)][1:] == ["lock"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [name.rpartition("/")[2] for name in files_in(tmp_path)][1:] == ["lock"]


def test_updates_that_are_kept_do_not_use_up_what_a_process_may_open(
    pair: list[SharedMemoryTransport],
) -> None:
    before = open_files()
    kept = [Update().add("x", large(number)) for number in range(MAX_STORES + 5)]
    assert open_files() == before + MAX_STORES
    parcel = handed(pair, kept[-1], "one")
    assert received(pair, parcel) == [[large(MAX_STORES + 4).tobytes()]] * 2
    arrays = kept[0].arrays()
    kept.clear()
    assert open_files() == before
    assert arrays[0].tobytes() == large(0).tobytes(), "an array outlives its update"


def test_a_store_leaves_as_much_room_as_it_takes(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 2 * COUNT * 4
    held = {"f_bavail": room // 4096, "f_blocks": 8 * room // 4096, "f_frsize": 4096}
    monkeypatch.setattr(os, "fstatvfs", lambda _: type("Held", (), held))
    assert Update().add("x", large()).store is not None
    assert Update().add("x", large(5)).store is None, "half of what is free, and no more"
    held["f_bavail"] *= 10
    kept = Update().add("x", large())
    assert kept.add("y", large()).arrays()[1].tobytes() == large().tobytes()
    assert Update().add("x", large()).store is None, "an eighth of all there is, and no more"
    del kept
    assert Update().add("x", large()).store is not None


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_a_file_system_that_is_full_after_all_costs_a_copy_and_nothing_else(
    fails_at: int, pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, pwrite = [0], os.pwrite

    def full(*given: int) -> int:
        written[0] += 1
        if written[0] == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        update = Update().add("x", large()).add("y", large(1))
    assert written[0] >= fails_at, "the fault did not fire"
    assert [array.tobytes() for array in update.arrays()] == [large().tobytes(), large(1).tobytes()]
    parcel = handed(pair, update, "one")
    assert received(pair, parcel) == [[large().tobytes(), large(1).tobytes()]] * 2


def test_no_room_for_the_rest_of_a_store_is_refused_as_it_is_elsewhere_and_leaves_nothing(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Update().add("x", large()).add("small", np.ones(3, np.float32))
    store = update.store
    assert store is not None
    before, pwrite, tried = store.nbytes, os.pwrite, []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        tried.append(offset)
        if len(tried) % 2:
            return pwrite(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(UpdateRefused, match="Worker 0 has no room"):
            handed(pair, update, "one")
    assert tried[:2] == [before, before + 5], "the fault did not fire"
    assert store.nbytes == os.fstat(store._descriptor).st_size == before
    assert received(pair, handed(pair, update, "two"))[1][0] == large().tobytes()


def test_a_mapping_that_fails_costs_a_copy_and_nothing_else(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [False, True, False, False]
    map_shared = storing.map_shared

    def failing(*given: int) -> np.ndarray:
        if fails.pop(0):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return map_shared(*given)

    monkeypatch.setattr(storing, "map_shared", failing)
    monkeypatch.setattr(storing, "_SEGMENT_BYTES", 1)
    update = Update()
    for number in range(4):
        update = update.add(f"v{number}", large(number))
    assert fails == [], "the fault did not fire"
    expected = [large(number).tobytes() for number in range(4)]
    assert [array.tobytes() for array in update.arrays()] == expected
    assert received(pair, handed(pair, update, "one")) == [expected, expected]


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_array_that_changes_while_it_is_copied_is_looked_at_as_it_was_copied(
    is_warm: bool, pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = large()
    looked = storing.is_finite

    def changing(chunk: np.ndarray) -> bool:
        mine[:] = np.nan  # by another thread, at the worst moment
        return looked(chunk)

    if is_warm:
        storing.prepare(storing._places[0], 2 * mine.nbytes)
    monkeypatch.setattr(storing, "is_finite", changing)
    update = Update().add("x", mine)
    parcel = handed(pair, update, "one")
    assert parcel.handed_over
    found = np.frombuffer(received(pair, parcel)[1][0], np.float32)
    assert np.isnan(found).any()
    assert not np.isnan(found[0]), "the fault came too early"
    assert not parcel.is_finite


def test_a_forked_process_writes_to_nothing_of_its_parents(
    tmp_path: Path, pair: list[SharedMemoryTransport]
) -> None:
    kept = Update().add("x", large())
    storing.prepare(storing._places[0], 8 * LARGE_BYTES)
    parcel = handed(pair, kept, "one")
    with storing._warming, storing._opening:  # held by threads that the child does not have
        child = os.fork()
        if child == 0:
            try:
                made = [Update().add("x", large(1)), kept.add("y", large(2))]
                right = made[0].store is None and made[1].arrays()[1].tobytes() == large(2).tobytes()
                del made, kept
                gc.collect()
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    longer = kept.add("y", large(3))
    assert longer.arrays()[1].tobytes() == large(3).tobytes()
    assert received(pair, parcel) == [[large().tobytes()]] * 2
    assert Update().add("x", large(4)).arrays()[0].tobytes() == large(4).tobytes()
    assert len(list(tmp_path.rglob("store-*"))) == 1


def test_a_signal_handler_may_make_updates_too(pair: list[SharedMemoryTransport]) -> None:
    begun = Update().add("x", large())
    store = begun.store
    assert store is not None
    with store._changing:  # the interrupted thread is in the midst of the same
        longer = begun.add("y", large(1))
    assert longer.arrays()[1].tobytes() == large(1).tobytes()
    with storing._opening:
        assert Update().add("x", large(2)).store is None


def test_python_numbers_are_not_stored_before_their_dtype_is_known(pair: list[SharedMemoryTransport]) -> None:
    assert Update().add("x", [1.0] * (LARGE_BYTES // 4)).store is None


def test_a_spare_gives_way_to_what_is_needed_now(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    storing.prepare(storing._places[0], LARGE_BYTES)
    fallocate = os.posix_fallocate

    def full_until_it_goes(*given: int) -> None:
        if storing._spares:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(*given)

    monkeypatch.setattr(os, "posix_fallocate", full_until_it_goes)
    parcel = pair[0].publish("one", [large()])
    assert storing._spares == []
    assert received(pair, parcel) == [[large().tobytes()]] * 2


def test_threads_may_make_one_update_longer_at_once(pair: list[SharedMemoryTransport]) -> None:
    begun = Update().add("x", large())
    longer: dict[int, Update] = {}

    def lengthen(seed: int) -> None:
        longer[seed] = begun.add("y", large(seed)).add("z", large(seed + 10))

    threads = [threading.Thread(target=lengthen, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, update in longer.items():
        expected = [large().tobytes(), large(seed).tobytes(), large(seed + 10).tobytes()]
        assert [array.tobytes() for array in update.arrays()] == expected
        assert received(pair, handed(pair, update, f"p{seed}")) == [expected, expected]


def test_a_store_says_of_each_array_whether_it_is_finite(tmp_path: Path) -> None:
    store = Store(tmp_path)
    spoilt = large()
    spoilt[-1] = np.inf
    for array in (large(), spoilt):
        assert store.append(array, store.nbytes) is not None
    first, second = store._placed.values()
    others = [np.arange(5), np.zeros(0, np.float32), np.ones(3, ">f4")]
    placed = store.place([first.array, second.array, *others])
    assert placed is not None
    assert placed[:2] == [first, second]
    assert [one.is_finite for one in placed] == [True, False, True, True, True]
    assert [one.offset % 64 for one in placed] == [0] * 5
    assert placed[4].array.tobytes() == np.ones(3, np.float32).tobytes()
    part = store.place([first.array[:-1], second.array])
    assert part is None, "a part of it is another array, and not a small one"


def spare_of(transport: SharedMemoryTransport) -> list[Store]:
    transport._take_spare()  # waits until it is ready
    return storing._spares


def test_when_a_store_was_handed_over_one_of_its_size_is_made_ready_for_the_next_update(
    tmp_path: Path, pair: list[SharedMemoryTransport]
) -> None:
    for number in range(3):
        ready = list(spare_of(pair[0]))
        update = Update().add("x", large(number)).add("y", large(number))
        assert (ready == [update.store]) == (number > 0)
        parcel = handed(pair, update, f"p{number}")
        assert received(pair, parcel) == [[large(number).tobytes()] * 2] * 2
        (path,) = tmp_path.rglob(parcel.file)
        assert path.stat().st_size == parcel.nbytes, "what was made ready in vain was given back"
        pair[0].release(parcel.id)
    assert len(spare_of(pair[0])) == 1
    smaller = Update().add("x", large())
    parcel = handed(pair, smaller, "smaller")
    longer = smaller.add("y", large(1)).add("z", large(2))
    expected = [array.tobytes() for array in longer.arrays()]
    assert expected == [large(n).tobytes() for n in range(3)], "it grows where it was cut"
    assert received(pair, handed(pair, longer, "longer")) == [expected, expected]
    assert received(pair, parcel) == [[large().tobytes()]] * 2


def test_a_spare_store_ends_with_the_transport_and_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SharedMemoryTransport("job", 0, directory=tmp_path)
    before = open_files()

    def publish_and_release() -> None:
        update = Update().add("x", large())
        transport.publish("one", update.arrays(), store=update.store)
        transport.release("one")

    publish_and_release()
    assert len(spare_of(transport)) == 1
    refused = []

    def full(*_: object) -> None:
        refused.append(True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        publish_and_release()
        assert spare_of(transport) == []
    assert refused, "the fault did not fire"
    publish_and_release()
    assert len(spare_of(transport)) == 1
    assert open_files() == before + 1
    transport.close()
    assert storing._spares == []
    assert files_in(tmp_path) == []
