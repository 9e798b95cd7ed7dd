"""The exchange through shared memory, with real processes: sums, order, dtypes, and who ends in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.allreduce import (
    CHUNK_BYTES,
    SEMAPHORE_BYTES,
    Exchange,
    ExchangePlan,
    Form,
    Semaphore,
    WorkerPart,
    open_exchange,
    part_bytes,
)
from replicast.config import HOST_ID, SHM_DIR, host_id
from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.errors import JobFailed
from replicast.transport.shared import SharedFile

DEADLINE_SECS = 60.0

WORKER = """
import sys
from pathlib import Path
from tests.unit import test_allreduce
test_allreduce.work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
"""


def some_calls(seed: int) -> list[list[tuple[Form, tuple[int, ...]]]]:
    """Random calls, the same for all workers: dtypes, shapes, and what is to be done with each value."""
    random = np.random.default_rng(seed)
    calls = []
    for _ in range(12):
        values = []
        for _ in range(random.integers(1, 8)):
            dtype = np.dtype(str(random.choice(["f4", "f4", "f8", "i4", "i8", "u1", "c8"])))
            gathered = bool(random.integers(0, 3) == 0)
            weighted = bool(random.integers(0, 2)) and dtype.kind == "f"
            # Empty ones, some that fit into a chunk, and some that need several.
            shape = [(), (0,), (7,), (3, 5), (2, 0), (CHUNK_BYTES // 8 + 3,), (300, 1000)][
                random.integers(0, 7)
            ]
            values.append((Form(dtype, gathered and shape != (), weighted), shape))
        calls.append(values)
    return calls


def values_of(call: list[tuple[Form, tuple[int, ...]]], number: int, rank: int) -> list[np.ndarray]:
    """What a worker gives in a call; it has its own number of rows of what is gathered."""
    random = np.random.default_rng([number, rank])
    shapes = [(random.choice([0, 1, 3, 200]), *shape[1:]) if form.gathered else shape for form, shape in call]
    return [
        (random.standard_normal(shape) * 100).astype(form.dtype)
        for shape, (form, _) in zip(shapes, call, strict=True)
    ]


def weight_of(number: int, rank: int) -> float:
    return float(np.random.default_rng([number, rank, 1]).integers(1, 5))


def expected(call: list[tuple[Form, tuple[int, ...]]], number: int, size: int) -> list[np.ndarray]:
    """The same, computed without shared memory: in rank order, one after the other."""
    given = [values_of(call, number, rank) for rank in range(size)]
    weights = [np.float32(weight_of(number, rank)) for rank in range(size)]
    results = []
    for i, (form, _) in enumerate(call):
        parts = [given[rank][i] for rank in range(size)]
        if form.weighted:
            parts = [part * weight.astype(form.dtype) for part, weight in zip(parts, weights, strict=True)]
        if form.gathered:
            total = np.concatenate(parts)
        else:
            total = parts[0].copy()
            for part in parts[1:]:
                total = (total + part).astype(form.dtype)
        results.append(total / sum(weights).astype(form.dtype) if form.weighted else total)
    return results


def joined(rank: int, size: int, place: Path, check: Any = lambda: None) -> Exchange:
    file = SharedFile(place, part_bytes(size))
    own = WorkerPart.of(file, size)
    file.complete(place / f"part-{rank}")
    parts = []
    for other in range(size):
        until = time.monotonic() + DEADLINE_SECS
        while other != rank and not (place / f"part-{other}").exists():
            assert time.monotonic() < until, f"worker {other} is missing"
            time.sleep(0.001)
        parts.append(own if other == rank else WorkerPart.open(place / f"part-{other}", size))
    return Exchange(rank, parts, check)


def work(rank: int, size: int, place: Path, task: str) -> None:
    """A worker: compares each result with what it should be, bit for bit, and dawdles now and then."""
    ended = place / "ended"

    def check() -> None:
        if ended.exists():
            raise JobFailed(f"worker {ended.read_text()} ended", worker=int(ended.read_text()))

    exchange = joined(rank, size, place, check)
    if task == "for ever":
        value = np.full(CHUNK_BYTES, rank, np.float32)
        for number in range(10**9):
            exchange.combine(ExchangePlan([Form(value.dtype)]), 1.0, [value])
            if number == 3:
                (place / f"in-{rank}").touch()
    random = np.random.default_rng(rank)
    for number, call in enumerate(some_calls(int(task))):
        plan = ExchangePlan([form for form, _ in call])
        given = values_of(call, number, rank)
        if random.integers(0, 4) == 0:
            time.sleep(0.01)
        results = exchange.combine(plan, weight_of(number, rank), given)
        for result, right in zip(results, expected(call, number, size), strict=True):
            assert (result.dtype, result.shape) == (right.dtype, right.shape)
            assert result.tobytes() == right.tobytes(), (number, call)
    (place / f"done-{rank}").touch()


def start(size: int, place: Path, task: str) -> list[subprocess.Popen[str]]:
    root = Path(__file__).resolve().parents[2]
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(size), str(place), task],
            cwd=root,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def end(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    said = []
    for process in processes:
        try:
            said.append(process.communicate(timeout=DEADLINE_SECS)[1])
        finally:
            process.kill()
    return said


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 1), (4, 2)])
def test_every_worker_gets_the_sums_in_rank_order_bit_for_bit(tmp_path: Path, size: int, seed: int) -> None:
    processes = start(size, tmp_path, str(seed))
    said = end(processes)
    assert [process.returncode for process in processes] == [0] * size, said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_or_freezes_in_an_exchange_keeps_nobody(
    tmp_path: Path, how: signal.Signals
) -> None:
    processes = start(3, tmp_path, "for ever")
    try:
        wait_for([tmp_path / f"in-{rank}" for rank in range(3)])
        processes[1].send_signal(how)
        # As the watching thread of a job does, which notices it by the lock or by missing heartbeats.
        watched = WorkerPart.open(tmp_path / "part-1", 3)
        if how == signal.SIGKILL:
            processes[1].wait(DEADLINE_SECS)
            assert watched.owner_is_dead()
        else:
            assert not watched.owner_is_dead()
        (tmp_path / "ended.tmp").write_text("1")
        (tmp_path / "ended.tmp").rename(tmp_path / "ended")
        said = end([processes[0], processes[2]])
        assert all("worker 1 ended" in text for text in said), said
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()  # type: ignore[union-attr]


def wait_for(paths: Sequence[Path]) -> None:
    until = time.monotonic() + DEADLINE_SECS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until
        time.sleep(0.01)


def together(size: int, function: Any) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return [
            done.result(DEADLINE_SECS) for done in [threads.submit(function, rank) for rank in range(size)]
        ]


def opened(
    size: int, environs: Sequence[dict[str, str]], unwilling: dict[int, str] | None = None
) -> list[Any]:
    store = MemoryCoordination.Store()

    def open_one(rank: int) -> Any:
        direct = DirectExchange(MemoryCoordination(store), "allreduce", rank, size)
        return open_exchange(direct, environs[rank], lambda: None, (unwilling or {}).get(rank, ""))

    return together(size, open_one)


def test_an_exchange_leaves_no_name_in_shared_memory(tmp_path: Path) -> None:
    exchanges = opened(2, [{SHM_DIR: str(tmp_path)}] * 2)
    assert list(tmp_path.iterdir()) == []
    plan = ExchangePlan([Form(np.dtype("f4"))])
    sums = together(2, lambda rank: exchanges[rank].combine(plan, 1.0, [np.float32([rank + 1])]))
    assert [total[0].tolist() for total in sums] == [[3.0], [3.0]]


@pytest.mark.parametrize("has_come", [False, True])
def test_who_waits_for_the_exchange_is_told_that_the_job_has_failed(tmp_path: Path, has_come: bool) -> None:
    store, environ = MemoryCoordination.Store(), {SHM_DIR: str(tmp_path)}

    def has_failed(_: int) -> bool:
        raise JobFailed("worker 1 failed first: no such column", worker=1)

    if has_come:  # and failed before it said whether it has mapped the memory of the others
        said = json.dumps((host_id(environ), "no-such-file", ""))
        DirectExchange(MemoryCoordination(store), "allreduce", 1, 2).tell("shared memory/1", said)
    with pytest.raises(JobFailed, match="worker 1 failed first"):
        open_exchange(
            DirectExchange(MemoryCoordination(store), "allreduce", 0, 2, has_failed), environ, lambda: None
        )
    assert list(tmp_path.iterdir()) == []


def test_one_worker_without_shared_memory_decides_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        place.mkdir()
    fallocate = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if "/1/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    environs = [{SHM_DIR: str(place), HOST_ID: "one"} for place in places]
    reason = "worker 1 has no shared memory ([Errno 28] No space left on device)"
    assert opened(2, environs) == [reason, reason]
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_workers_that_cannot_see_each_others_memory_decide_alike(tmp_path: Path) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        place.mkdir()
    one, other = opened(2, [{SHM_DIR: str(place), HOST_ID: "one"} for place in places])
    assert one == other
    assert one.startswith("worker 0 cannot map the shared memory of all workers")
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_workers_of_several_hosts_and_one_that_does_not_want_to_do_not_share_memory(tmp_path: Path) -> None:
    environ = {SHM_DIR: str(tmp_path)}
    several = opened(2, [{**environ, HOST_ID: "one"}, {**environ, HOST_ID: "other"}])
    assert several == ["the workers are on several hosts"] * 2
    assert opened(2, [environ] * 2, {1: "worker 1 has a GPU"}) == ["worker 1 has a GPU"] * 2
    assert list(tmp_path.iterdir()) == []


def test_workers_with_other_values_are_told_so_and_mix_nothing(tmp_path: Path) -> None:
    exchanges = opened(2, [{SHM_DIR: str(tmp_path)}] * 2)

    def call(rank: int) -> str:
        with pytest.raises(JobFailed) as caught:
            exchanges[rank].combine(
                ExchangePlan([Form(np.dtype("f4"))]), 1.0, [np.zeros(3 + rank, np.float32)]
            )
        return str(caught.value)

    assert all("in the same step: other shapes" in said for said in together(2, call))


def test_nothing_is_summed_any_more_after_a_call_that_failed(tmp_path: Path) -> None:
    exchanges = opened(2, [{SHM_DIR: str(tmp_path)}] * 2)
    plan, long = ExchangePlan([Form(np.dtype("f4"))]), np.ones(CHUNK_BYTES // 2, np.float32)

    def call(rank: int, value: np.ndarray) -> str:
        with pytest.raises(JobFailed) as caught:
            exchanges[rank].combine(plan, 1.0, [value])
        return str(caught.value)

    together(2, lambda rank: call(rank, long[: None if rank == 0 else 3]))
    # Worker 0 had written two chunks. Worker 1 would take the second for the first one of this call.
    assert all("continues after a step" in said for said in together(2, lambda rank: call(rank, 2 * long)))


def test_a_worker_without_rows_adds_nothing_to_means_also_if_its_value_is_nan(tmp_path: Path) -> None:
    exchanges = opened(2, [{SHM_DIR: str(tmp_path)}] * 2)
    plan, values = (
        ExchangePlan([Form(np.dtype("f4"), weighted=True)]),
        [np.float32([6]), np.float32([np.nan])],
    )
    means = together(2, lambda rank: exchanges[rank].combine(plan, [3.0, 0.0][rank], [values[rank]]))
    assert [mean[0].tolist() for mean in means] == [[6.0], [6.0]]


def test_a_result_is_not_overwritten_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    exchanges = opened(2, [{SHM_DIR: str(tmp_path)}] * 2)
    plan = ExchangePlan([Form(np.dtype("f4")), Form(np.dtype("f4"))])

    def call(rank: int) -> list[float]:
        kept = []
        for number in range(5):
            values = [np.full(1000, number, np.float32)] * 2
            kept.append(exchanges[rank].combine(plan, 1.0, values)[1])
        return [float(total.mean()) for total in kept]

    assert together(2, call) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_a_worker_that_sleeps_looks_at_the_job_however_the_wall_clock_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    semaphore = Semaphore(np.zeros(SEMAPHORE_BYTES, np.uint8))
    semaphore.create()
    for clock in ("time", "time_ns"):
        monkeypatch.setattr(f"time.{clock}", lambda: pytest.fail("it waits by the wall clock"))
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise JobFailed("another worker has failed")

    with pytest.raises(JobFailed):
        semaphore.take(check, spins=0)
    semaphore.post()
    semaphore.take(check)
