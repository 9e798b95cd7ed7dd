"""Act three without its workers: a life that is killed, the next one, and what it claims of both."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replicast.audit import AuditReport
from replicast.demo import act_three
from replicast.demo.act_three import HALFWAY, RECOVERED, RESTORED, UNDISTURBED, NothingIsLost
from replicast.update import Update
from tests.unit.demo.played import AS_CLAIMED, FIRST_PROCESS, Screen, replicas


class Killed(BaseException):
    """The end of a process that is played."""


@dataclass
class PlayedReplicas:
    """Replicas with checkpoints, as act three knows them."""

    checkpoint: int | None
    settled: int = 0
    proposed: list[tuple[Update, int]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.recovery = self

    def restore(self) -> object | None:
        self.step = self.checkpoint or 0
        return None if self.checkpoint is None else object()

    def settle(self) -> None:
        self.settled += 1

    def propose(self, update: Update, *, at_step: int) -> None:
        self.proposed.append((update, at_step))


class LivingPlayer:
    """A worker that has lives: one that is killed, and the next, which knows what the first has noted."""

    model = None

    def __init__(self, rank: int, noted: Mapping[str, int], checkpoint: int | None) -> None:
        self.rank = rank
        self.noted = dict(noted)
        self.replicas: dict[str, PlayedReplicas] = {}
        self._checkpoint = checkpoint
        self._now = PlayedReplicas(None)

    def begin_again(self, run: str, *, save_every: int) -> Any:
        self._now = self.replicas[run] = PlayedReplicas(self._checkpoint if run == "killed" else None)
        return self._now

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        assert after_step is not None
        while self._now.step < steps:
            self._now.step += 1
            after_step(self._now.step)

    def open_replicas(self) -> Any:
        raise NotImplementedError

    def note_moment(self, name: str, audit: AuditReport | None = None) -> None:
        self.noted[name] = self._now.step

    def has_noted(self, name: str) -> bool:
        return name in self.noted

    def wait_for_the_end(self, sender: str) -> None:
        raise Killed(sender)


def test_act_three_waits_to_be_killed_and_goes_on_from_the_checkpoint_in_its_next_life() -> None:
    first = LivingPlayer(1, {}, None)
    with pytest.raises(Killed, match=f"kill -9 {os.getpid()}"):
        NothingIsLost().play(first)
    assert first.noted == {UNDISTURBED: 200, HALFWAY: 150}
    assert list(first.replicas) == ["undisturbed", "killed"]
    assert first.replicas["killed"].settled == 1

    second = LivingPlayer(1, first.noted, 100)
    NothingIsLost().play(second)
    assert second.noted == act_three.EXPECTED_STEPS
    assert list(second.replicas) == ["killed"]
    assert second.replicas["killed"].settled == 0


def test_act_three_proposes_the_same_change_in_every_run_on_one_worker() -> None:
    first, second = LivingPlayer(1, {}, None), LivingPlayer(1, {UNDISTURBED: 200}, 100)
    with pytest.raises(Killed):
        NothingIsLost().play(first)
    NothingIsLost().play(second)
    proposed = [run.proposed for run in (*first.replicas.values(), *second.replicas.values())]
    assert [[step for _, step in each] for each in proposed] == [[140], [140], [140]]
    other = LivingPlayer(0, {}, None)
    NothingIsLost().play(other)
    assert [run.proposed for run in other.replicas.values()] == [[], []]


def test_act_three_kills_a_process_of_the_first_life(tmp_path: Path) -> None:
    act = NothingIsLost()
    errand = act.errand(HALFWAY, replicas(AS_CLAIMED), tmp_path)
    assert errand is not None
    assert errand.command == f"kill -9 {FIRST_PROCESS + 1}"
    assert [act.errand(name, {}, tmp_path) for name in act.moments if name != HALFWAY] == [None] * 3


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({HALFWAY: "bc"}, ["equal at 'before the kill, 150'"]),
        ({RESTORED: "ab"}, ["equal at 'restored, step 100'"]),
        ({RECOVERED: "dd"}, ["worker 0 should end as in the undisturbed run", "worker 1 should end as in"]),
        ({RECOVERED: "cd"}, ["equal at 'recovered, step 200'", "worker 1 should end as in"]),
    ],
)
def test_act_three_says_what_did_not_happen(changed: dict[str, str], expected: list[str]) -> None:
    problems = act_three.differences_from_the_claim(replicas({**AS_CLAIMED, **changed}))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_three_notices_a_worker_that_was_never_killed_and_a_checkpoint_of_another_step() -> None:
    found = replicas(AS_CLAIMED)
    process = found[HALFWAY][1].process
    found[RESTORED][1] = dataclasses.replace(found[RESTORED][1], process=process, step=0)
    wrong_step, same_process = act_three.differences_from_the_claim(found)
    assert "worker 1 should be at step 100 at 'restored, step 100', and is at step 0" in wrong_step
    assert "worker 1 should be a new process" in same_process


def test_act_three_ends_with_both_digests_and_draws_its_conclusion_only_when_it_is_true() -> None:
    true, false = Screen(), Screen()
    assert NothingIsLost().show(replicas(AS_CLAIMED), true.console) == []
    last = " ".join(true.text.split())[-120:]
    assert "Undisturbed: cccccccc. Killed and recovered: cccccccc. Equal, bit for bit" in last
    assert NothingIsLost().show(replicas({**AS_CLAIMED, RECOVERED: "dd"}), false.console) != []
    assert "Equal, bit for bit" not in " ".join(false.text.split())
