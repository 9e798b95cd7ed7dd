"""Act two without its workers: what it claims, how long it waits for the push, and what it pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replicast.audit import AuditReport
from replicast.demo import act_two
from replicast.demo.act_two import CONTINUED, PUSHED, SYNCED, EveryReplicaFollows
from replicast.update import Update
from tests.unit.demo.played import AS_CLAIMED, Screen, audited, difference, replicas


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({SYNCED: "01"}, ["equal after replicas.sync"]),
        ({PUSHED: "fe"}, ["equal after the push"]),
        ({CONTINUED: "ef"}, ["equal 50 more steps later"]),
        ({PUSHED: "11"}, ["worker 0 should sum to about 102 more", "worker 1 should sum to about 102 more"]),
        ({PUSHED: "f0"}, ["equal after the push", "worker 1 should sum to about 102 more"]),
    ],
)
def test_act_two_says_what_did_not_happen(changed: dict[str, str], expected: list[str]) -> None:
    problems = act_two.differences_from_the_claim(replicas({**AS_CLAIMED, **changed}))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_two_draws_its_conclusion_only_when_it_is_true() -> None:
    conclusion = "every replica follows"
    true, false = Screen(), Screen()
    assert EveryReplicaFollows().show(replicas(AS_CLAIMED), true.console) == []
    assert conclusion in " ".join(true.text.split())
    assert EveryReplicaFollows().show(replicas({**AS_CLAIMED, PUSHED: "fe"}), false.console) != []
    assert conclusion not in " ".join(false.text.split())


def test_act_two_shows_the_different_replicas_of_act_one_above_its_equal_ones() -> None:
    screen = Screen()
    EveryReplicaFollows().show(replicas(AS_CLAIMED), screen.console)
    answers = [line.split()[-1] for line in screen.text.splitlines() if line.rstrip().endswith(("NO", "yes"))]
    assert answers == ["NO", "yes", "yes", "yes"]


@dataclass
class FakeReplicas:
    """The replicas of a worker whose updates come when it says so."""

    history: list[SimpleNamespace] = field(default_factory=list)
    step: int = 0
    synced: list[int] = field(default_factory=list)
    audited: list[str] = field(default_factory=list)

    def sync(self, source: int) -> None:
        self.synced.append(source)
        self.history.append(SimpleNamespace(id="sync", step=0))

    def audit(self, on_divergence: str) -> AuditReport:
        self.audited.append(on_divergence)
        return audited(self.step)


class FakePlayer:
    """A worker that notes what it does, and gets an update at a step."""

    rank = 0
    model = None

    def __init__(self, update_at: int | None) -> None:
        self.done: list[str | int] = []
        self.audit: AuditReport | None = None
        self.replicas = FakeReplicas()
        self._update_at = update_at

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        self.done.append(steps)
        self.replicas.step += steps
        if self._update_at is not None and self._update_at <= self.replicas.step:
            self.replicas.history.append(SimpleNamespace(id="pushed", step=self._update_at))

    def open_replicas(self) -> Any:
        return self.replicas

    def begin_again(self, run: str, *, save_every: int) -> Any:
        raise NotImplementedError

    def note_moment(self, name: str, audit: AuditReport | None = None) -> None:
        self.done.append(name)
        self.audit = audit

    def has_noted(self, name: str) -> bool:
        return name in self.done

    def wait_for_the_end(self, sender: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(("update_at", "pieces"), [(1, 1), (99, 1), (100, 2), (101, 2), (250, 3)])
def test_act_two_trains_until_an_update_of_an_earlier_step_is_there(update_at: int, pieces: int) -> None:
    player = FakePlayer(update_at)
    EveryReplicaFollows().play(player)
    assert player.done == [SYNCED, *[100] * pieces, PUSHED, 50, CONTINUED]
    assert player.replicas.audited == ["warn"]
    assert player.audit == audited(100 * pieces + 50)


def test_act_two_gives_up_when_no_update_comes() -> None:
    player = FakePlayer(None)
    EveryReplicaFollows().play(player)
    assert player.done == [SYNCED, *[100] * act_two.MOST_PIECES]


def test_act_two_pushes_a_plain_file_of_the_change_of_act_one(tmp_path: Path) -> None:
    act = EveryReplicaFollows()
    errand = act.errand(SYNCED, {}, tmp_path)
    assert errand is not None
    assert errand.command == "replicast push run --add delta.safetensors --wait"
    (edit,) = Update.from_tensors(tmp_path / "delta.safetensors", "add").edits
    assert edit.variable == "hidden/kernel"
    np.testing.assert_array_equal(edit.arrays["value"], np.full((64, 32), 0.05, np.float32))
    assert act.errand(PUSHED, {}, tmp_path) is None


@pytest.mark.parametrize(
    ("report", "told"), [(audited(800, [difference()]), "1 of 14 variables differs"), (None, "nothing")]
)
def test_act_two_says_when_the_audit_did_not_find_all_equal(report: AuditReport | None, told: str) -> None:
    found = replicas(AS_CLAIMED)
    found[CONTINUED][1] = dataclasses.replace(found[CONTINUED][1], audit=report)
    (problem,) = act_two.differences_from_the_claim(found)
    assert "should find all variables equal 50 more steps later; worker 1 was told" in problem
    assert told in problem


def test_act_two_says_in_its_conclusion_that_the_audit_found_all_equal() -> None:
    screen = Screen()
    EveryReplicaFollows().show(replicas(AS_CLAIMED), screen.console)
    assert "replicas.audit() finds all 14 variables equal" in " ".join(screen.text.split())
