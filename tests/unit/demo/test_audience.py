"""The audience reads the workers' notes, tells every moment, and knows which never came."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from replicast.demo import act_two
from replicast.demo.act_one import ASSIGNED, CONTINUED, TRAINED, OneWorkerAssigns
from replicast.demo.act_two import PUSHED, SYNCED
from replicast.demo.acts import WORKERS, programme
from replicast.demo.audience import Audience
from replicast.demo.notes import NoteWriter, Progress, notes_path
from tests.unit.demo.played import ACT_THREE_AS_CLAIMED, AS_CLAIMED, Screen, moment, play


def test_an_audience_tells_every_moment_and_shows_the_act(tmp_path: Path) -> None:
    screen = Screen()
    audience = play(tmp_path, AS_CLAIMED, screen)
    assert audience.problems == []
    assert audience.missing == []
    act = OneWorkerAssigns()
    positions = [screen.text.index(part) for part in ("starting", act.title, "1. ", "2. ", "3. ", "equal?")]
    assert positions == sorted(positions)


def test_an_audience_knows_which_moments_never_came(tmp_path: Path) -> None:
    screen = Screen()
    audience = play(tmp_path, {TRAINED: "aa"}, screen)
    assert audience.missing == [
        ASSIGNED,
        CONTINUED,
        SYNCED,
        PUSHED,
        act_two.CONTINUED,
        *ACT_THREE_AS_CLAIMED,
    ]
    assert "equal?" not in screen.text


def test_an_audience_that_fails_is_heard_when_the_workers_have_ended(tmp_path: Path) -> None:
    notes_path(tmp_path, 0).write_text("no note\n")
    with pytest.raises(json.JSONDecodeError):
        play(tmp_path, {}, Screen())


def test_the_bar_says_what_goes_on_after_the_kill(tmp_path: Path) -> None:
    shown: list[Progress] = []
    bar = SimpleNamespace(show=shown.append)
    NoteWriter(notes_path(tmp_path, 0)).write(Progress(doing="training", done=7, loss=0.5))
    with Audience(programme(), tmp_path, bar, Screen().console):
        for worker in range(WORKERS):
            for name, both in AS_CLAIMED.items():
                NoteWriter(notes_path(tmp_path, worker)).write(moment(name, worker, both[worker]))
    assert Progress(doing="starting both again", done=7, loss=None) in shown
