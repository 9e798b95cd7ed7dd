"""The words between workers, on TensorFlow's service and on one that is played: nothing piles up in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from replicast.coordination import _NOTHING, GIVEN_UP_AT_MOST, ServiceCoordination
from tests.pool import Pool

QUESTIONS = 4000


class PlayedService:
    """What TensorFlow's offers; keeps a question that was given up until its key is there."""

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
    """Another worker has just written that there is nothing, and removes it after the second look."""

    def __init__(self, then: str | None) -> None:
        super().__init__()
        self.values["word"] = _NOTHING
        self.then = then
        self.looks = 0

    def get_config_key_value(self, key: str, timeout_in_ms: int) -> str:
        self.looks += 1
        if self.looks == 2:
            del self.values["word"]
            if self.then is not None:
                self.values["word"] = self.then
        return super().get_config_key_value(key, timeout_in_ms)


def test_questions_that_were_given_up_do_not_pile_up() -> None:
    service = PlayedService()
    coordination = ServiceCoordination(service)
    for _ in range(QUESTIONS):
        assert coordination.get("word", 0.0) is None
    assert service.most_kept == GIVEN_UP_AT_MOST + 1
    assert not service.values
    assert coordination.put("word", "here")
    assert coordination.get("word", 0.0) == "here"


def test_keys_that_nobody_asks_for_any_more_are_not_counted_for_ever() -> None:
    coordination = ServiceCoordination(PlayedService())
    for number in range(1000):
        assert coordination.get(f"word/{number}", 0.0) is None
    assert len(coordination._given_up) <= 100


@pytest.mark.parametrize(("then", "written", "heard"), [(None, True, "mine"), ("theirs", False, "theirs")])
def test_who_writes_waits_until_it_is_known_whether_there_is_something(
    then: str | None, written: bool, heard: str
) -> None:
    coordination = ServiceCoordination(RemovedLater(then))
    assert coordination.put("word", "mine") == written
    assert coordination.get("word", 1.0) == heard


def test_who_asks_is_not_told_that_nothing_is_something() -> None:
    assert ServiceCoordination(RemovedLater("theirs")).get("word", 60.0) == "theirs"
    stuck = PlayedService()
    stuck.values["word"] = _NOTHING
    assert ServiceCoordination(stuck).get("word", 0.02) is None


def test_what_a_dead_worker_should_have_removed_is_removed() -> None:
    stuck = PlayedService()
    stuck.values["word"] = _NOTHING
    assert ServiceCoordination(stuck, tidy_secs=0.0).put("word", "mine")
    assert stuck.values["word"] == "mine"


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
    assert grown < 30_000, "kB; all of the questions, at 15 each, take four times as much"
