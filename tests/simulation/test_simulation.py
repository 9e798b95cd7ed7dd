"""Whole jobs in one thread, in virtual time, from a seed: no schedule violates an invariant."""

from __future__ import annotations

import os
import re

import pytest

from tests.simulation.mutations import CAUGHT_BY, MUTATIONS, is_caught
from tests.simulation.stories import STORIES, TRANSCRIPTS, transcript
from tests.simulator import World, random_plan
from tests.simulator.world import worlds

SEEDS = int(os.environ.get("REPLICAST_TEST_SEEDS", "10000"))


def test_whatever_happens_all_workers_end_where_the_sequential_model_does() -> None:
    for seed, world in enumerate(worlds(range(SEEDS))):
        try:
            world.run()
        except Exception as error:
            pytest.fail(f"python -m tests.simulator --seed {seed} shows how: {error!r}")


@pytest.mark.parametrize("seed", [77052])
def test_schedules_that_have_found_a_defect_break_nothing(seed: int) -> None:
    World(random_plan(seed)).run()


def test_a_seed_replays_exactly() -> None:
    stories = [World(random_plan(7), recording=True) for _ in range(2)]
    for story in stories:
        story.run()
    assert stories[0].notes.lines == stories[1].notes.lines
    assert len(stories[0].notes.lines) > 20


def test_the_random_stories_have_every_fault_and_every_operation() -> None:
    faults: set[str] = set()
    said = ""
    for seed in range(400):
        story = World(random_plan(seed), recording=seed % 2 == 0)
        story.run()
        faults |= set(story.notes.faults)
        said += "\n".join(story.notes.lines)
    assert faults >= {
        *("crash", "kill", "freeze", "late message", "hung transfer", "refused by a worker", "drift"),
        *("full disk", "unknown write", "stale write", "restart beside a living group", "damaged checkpoint"),
        "forgotten report",
    }
    for telling in (
        "Apply",
        "Compute",
        "Publish",
        "Snapshot",
        "Digest",
        "Begin: copy",
        "End: go back",
        "Exit",
    ):
        assert f"Do        {telling}" in said, telling


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_break_of_the_core_is_noticed(name: str) -> None:
    assert is_caught(name, CAUGHT_BY[name])


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_story_that_notices_a_break_passes_without_it(name: str) -> None:
    World(random_plan(CAUGHT_BY[name])).run()


@pytest.mark.parametrize("name", STORIES)
def test_a_transcript_is_the_golden_one(name: str) -> None:
    """`python -m tests.simulation.stories` writes them again: read the difference before you commit it."""
    assert transcript(name) == (TRANSCRIPTS / f"{name}.txt").read_text()


def test_every_golden_transcript_has_its_story() -> None:
    assert {path.stem for path in TRANSCRIPTS.glob("*.txt")} == set(STORIES)


def test_what_the_documentation_quotes_is_in_the_golden_transcripts() -> None:
    golden = {line for path in TRANSCRIPTS.glob("*.txt") for line in path.read_text().splitlines()}
    page = (TRANSCRIPTS.parents[2] / "docs" / "architecture.md").read_text()
    quoted = re.findall(r"^ +\d+\.\d{3} .*$", page, re.MULTILINE)
    assert len(quoted) > 20
    assert not [line for line in quoted if line not in golden]


def test_the_documentation_lists_when_each_break_is_noticed() -> None:
    page = (TRANSCRIPTS.parents[2] / "docs" / "faults.md").read_text()
    assert not [name for name, seed in CAUGHT_BY.items() if f"| {name} | {seed + 1:,} |" not in page]
