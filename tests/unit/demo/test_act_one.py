"""Act one without its workers: what it claims, of the audit too, and when it draws its conclusion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from replicast.audit import AuditReport
from replicast.demo.act_one import ASSIGNED, CONTINUED, TRAINED, OneWorkerAssigns, differences_from_the_claim
from tests.unit.demo.played import AS_CLAIMED, AUDITS, Screen, audited, difference, replicas


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({TRAINED: "ab"}, ["equal after training"]),
        ({ASSIGNED: "aa"}, ["differ after worker 1"]),
        ({CONTINUED: "cc"}, ["still differ"]),
        ({TRAINED: "ab", ASSIGNED: "aa", CONTINUED: "cc"}, ["equal after", "differ after", "still differ"]),
    ],
)
def test_act_one_says_what_did_not_happen(changed: dict[str, str], expected: list[str]) -> None:
    problems = differences_from_the_claim(replicas({**AS_CLAIMED, **changed}))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_one_draws_its_conclusion_only_when_it_is_true() -> None:
    conclusion = "different for ever"
    true, false = Screen(), Screen()
    assert OneWorkerAssigns().show(replicas(AS_CLAIMED), true.console) == []
    assert conclusion in " ".join(true.text.split())
    assert OneWorkerAssigns().show(replicas({**AS_CLAIMED, CONTINUED: "cc"}), false.console) != []
    assert conclusion not in " ".join(false.text.split())


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (audited(250, [difference("hidden/kernel")]), []),
        (
            audited(250, [difference("classifier/also_hidden/kernel")]),
            ["find that hidden/kernel", "found cl"],
        ),
        (audited(250), ["since never", "should find that hidden/kernel differs, and does not"]),
        (audited(0, [difference()]), ["at step 0, since step 0 or before"]),
        (dataclasses.replace(AUDITS[CONTINUED], last_equal=200), ["since some step from 201 to 250"]),
        (audited(250, [difference(), difference("optimizer/m")]), ["and found optimizer/m too"]),
        (audited(250, [difference(by=0.06)]), ["2048 elements that differ by 0.05, and found: 2048 of 2048"]),
        (audited(250, [difference(count=2047)]), ["2048 elements that differ by 0.05, and found: 2047 of"]),
        (audited(250, [dataclasses.replace(difference(), differing={})]), ["by 0.05, and found: none"]),
        (audited(250, [dataclasses.replace(difference(), rule="majority")]), ["without a majority; it says"]),
        (None, ["both workers should have the same report"]),
    ],
)
def test_act_one_says_what_the_audit_did_not_find(report: AuditReport | None, expected: list[str]) -> None:
    found = replicas(AS_CLAIMED)
    found[CONTINUED] = [dataclasses.replace(replica, audit=report) for replica in found[CONTINUED]]
    problems = differences_from_the_claim(found)
    assert len(problems) == len(expected), problems
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_one_notices_that_the_workers_were_told_different_things() -> None:
    found = replicas(AS_CLAIMED)
    found[CONTINUED][1] = dataclasses.replace(found[CONTINUED][1], audit=audited(250))
    (problem,) = differences_from_the_claim(found)
    assert "both workers should have the same report" in problem


def test_act_one_shows_what_the_audit_found_between_the_table_and_the_conclusion() -> None:
    screen = Screen()
    OneWorkerAssigns().show(replicas(AS_CLAIMED), screen.console)
    shown = " ".join(screen.text.split())
    parts = (
        "equal?",
        "It does not",
        'replicas.audit(on_divergence="warn")',
        "1 of 14 variables differs on 2 workers since step 250 or before",
        "worker 1: 2048 of 2048 elements, first at [0, 0], by at most 0.05",
        "different for ever",
    )
    positions = [shown.index(part) for part in parts]
    assert positions == sorted(positions)


def test_act_one_shows_what_the_audit_found_when_that_is_wrong_too() -> None:
    found = replicas(AS_CLAIMED)
    other = audited(250, [difference("classifier/other")])
    found[CONTINUED] = [dataclasses.replace(replica, audit=other) for replica in found[CONTINUED]]
    screen = Screen()
    assert OneWorkerAssigns().show(found, screen.console) != []
    assert "classifier/other: worker 1 differs" in screen.text
    assert "different for ever" not in " ".join(screen.text.split())


class Assigned:
    """A worker's model with one kernel, which remembers what was added to it; the layer and the model too."""

    shape = (64, 32)

    def __init__(self) -> None:
        self.kernel = self
        self.added: list[float] = []

    def get_layer(self, name: str) -> Any:
        return self

    def assign_add(self, value: Any) -> None:
        self.added.append(float(value.max()))


class AuditedPlayer:
    """A worker that notes what it does, and whose replicas can be audited."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = Assigned()
        self.done: list[Any] = []

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        self.done.append(steps)

    def open_replicas(self) -> Any:
        self.done.append("open")
        return self

    def audit(self, on_divergence: str) -> AuditReport:
        self.done.append(on_divergence)
        return AUDITS[CONTINUED]

    def begin_again(self, run: str, *, save_every: int) -> Any:
        raise NotImplementedError

    def note_moment(self, name: str, audit: AuditReport | None = None) -> None:
        self.done.append(name if audit is None else (name, audit))

    def has_noted(self, name: str) -> bool:
        return name in self.done

    def wait_for_the_end(self, sender: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("rank", [0, 1])
def test_act_one_opens_replicas_only_when_it_is_done_and_has_them_audited(rank: int) -> None:
    player = AuditedPlayer(rank)
    OneWorkerAssigns().play(player)
    noted = (CONTINUED, AUDITS[CONTINUED])
    assert player.done == [200, TRAINED, ASSIGNED, 50, "open", "warn", noted]
    assert player.model.added == ([pytest.approx(0.05)] if rank == 1 else [])
