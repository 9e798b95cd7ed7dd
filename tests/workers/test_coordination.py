"""The key-value store of the job, on TensorFlow's service and on a fake one: waits do not leak memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from replicast.coordination import _NO_VALUE, MAX_TIMED_OUT_WAITS, ServiceCoordination
from tests.pool import Pool

QUESTIONS = 2000


class PlayedService:
    """Offers what TensorFlow's does; keeps a timed-out wait until its key exists."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.kept: Counter[str] = Counter()
        self.most_kept = 0

    def set_config_key_value(self, key: str, value: str) -> None:
        if key in self.values:
            raise tf.errors.AlreadyExistsError(None, None, key)
        self.values[key] = value
        del self.kept[key]

    def get_config_key_value(self, key: str, timeout_in_ms: int) -> str:
        if key in self.values:
            return self.values[key]
        self.kept[key] += 1
        self.most_kept = max(self.most_kept, self.kept[key])
        raise tf.errors.DeadlineExceededError(None, None, key)

    def delete_config_key_value(self, key: str) -> None:
        self.values.pop(key, None)


class RemovedLater(PlayedService):
    """Another worker has just written the placeholder, and deletes it before the second wait."""

    def __init__(self, then: str | None) -> None:
        super().__init__()
        self.values["key"] = _NO_VALUE
        self.then = then
        self.looks = 0

    def get_config_key_value(self, key: str, timeout_in_ms: int) -> str:
        self.looks += 1
        if self.looks == 2:
            del self.values["key"]
            if self.then is not None:
                self.values["key"] = self.then
        return super().get_config_key_value(key, timeout_in_ms)


def test_timed_out_waits_do_not_leak_memory_in_the_service() -> None:
    service = PlayedService()
    coordination = ServiceCoordination(service)
    for _ in range(QUESTIONS):
        assert coordination.get("key", 0.0) is None
    assert service.most_kept == MAX_TIMED_OUT_WAITS + 1
    assert not service.values
    assert coordination.put("key", "here")
    assert coordination.get("key", 0.0) == "here"


def test_timed_out_waits_for_many_keys_in_turn_do_not_leak_memory_in_the_service() -> None:
    service = PlayedService()
    coordination = ServiceCoordination(service)
    for _ in range(3 * MAX_TIMED_OUT_WAITS):
        for worker in range(200):
            assert coordination.get(f"left/{worker}", 0.0) is None
    assert service.most_kept == MAX_TIMED_OUT_WAITS + 1


def test_keys_of_finished_waits_are_not_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.coordination.FORGET_SECS", 0.0)
    coordination = ServiceCoordination(PlayedService())
    for number in range(1000):
        assert coordination.get(f"word/{number}", 0.0) is None
    assert len(coordination._timed_out) <= 1


@pytest.mark.parametrize(("then", "written", "heard"), [(None, True, "mine"), ("theirs", False, "theirs")])
def test_a_writer_waits_until_the_placeholder_is_gone(then: str | None, written: bool, heard: str) -> None:
    coordination = ServiceCoordination(RemovedLater(then))
    assert coordination.put("key", "mine") == written
    assert coordination.get("key", 1.0) == heard


def test_the_placeholder_is_never_returned_as_a_value() -> None:
    assert ServiceCoordination(RemovedLater("theirs")).get("key", 60.0) == "theirs"
    stuck = PlayedService()
    stuck.values["key"] = _NO_VALUE
    assert ServiceCoordination(stuck).get("key", 0.02) is None


def test_the_placeholder_of_a_worker_that_died_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = PlayedService()
    stuck.values["key"] = _NO_VALUE
    monkeypatch.setattr("replicast.coordination.CLEANUP_SECS", 0.0)
    assert ServiceCoordination(stuck).put("key", "mine")
    assert stuck.values["key"] == "mine"


class SlowToAnswer(PlayedService):
    """Needs 20 ms for an answer: a shorter wait finds nothing, though the key exists."""

    def get_config_key_value(self, key: str, timeout_in_ms: int) -> str:
        self.looks = getattr(self, "looks", 0) + 1
        assert self.looks < 10, "the key exists"
        if timeout_in_ms < 20:
            raise tf.errors.DeadlineExceededError(None, None, key)
        return super().get_config_key_value(key, timeout_in_ms)


def test_a_writer_learns_that_the_key_exists_though_the_service_is_slow() -> None:
    coordination = ServiceCoordination(SlowToAnswer())
    assert coordination.put("key", "mine")
    assert not coordination.put("key", "another")
    assert coordination.peek("key") == "mine"


def kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def ask_in_vain(strategy: Any) -> int:
    """All workers ask for what never comes; gives by how much this process has grown meanwhile."""
    coordination = strategy.coordination
    for _ in range(200):
        assert coordination.get("in vain", 0.001) is None
    before = kilobytes()
    for _ in range(QUESTIONS):
        assert coordination.get("in vain", 0.001) is None
    grown = kilobytes() - before
    coordination.put(f"asked in vain/{strategy.rank}", "")
    for worker in range(strategy.size):
        assert coordination.get(f"asked in vain/{worker}", 60.0) is not None
    return grown


def test_the_memory_of_worker_0_does_not_grow_with_what_is_asked_in_vain(pool2: Pool) -> None:
    grown = pool2.run(ask_in_vain)[0]
    assert grown < 15_000, "kB; all of the questions, at 15 each, take four times as much"
