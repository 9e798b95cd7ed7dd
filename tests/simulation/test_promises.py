"""Promises that a small scenario demonstrates, one each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicast.core.entries import Committed, Proposal, Stage
from replicast.update.trial import Trial
from tests.simulator import Plan, World

ADD = Proposal("add", "digest-of-add", (("add", "d", 5),))
SCALE = Proposal("scale", "digest-of-scale", (("scale", "d", 2),))


def played(plan: Plan) -> World:
    plan.quick = True
    world = World(plan, recording=True)
    world.run()
    return world


def at_step(update: Proposal, step: int) -> Proposal:
    return Proposal(update.id, update.digest, update.content, step)


def records(world: World) -> list[tuple[int, str, int]]:
    committed = world.story.disk.history().committed.values()
    return [(record.sequence, record.id, record.step) for record in committed]


def line(world: World, words: str) -> int:
    return next(place for place, one in enumerate(world.notes.lines) if words in one)


def test_an_update_for_a_far_step_delays_no_other_update_no_sync_no_audit_and_no_close() -> None:
    script = {
        0: [("propose", 1, at_step(ADD, 99))],
        1: [("propose", 0, SCALE), ("wait", 0, 0.05)],
        2: [("sync", 0), ("audit", "heal"), ("save",)],
    }
    world = played(Plan(steps=3, script=script))
    assert records(world) == [(1, "scale", 2)]
    assert line(world, "Tell      scale is verified") < line(world, "Do        Digest")
    assert "add" in world.story.disk.history().scheduled
    assert world.clock.now < 3.0


def test_a_scheduled_update_is_durable_and_a_restart_applies_it_at_its_step() -> None:
    incidents = [(0.2, "thread", 1, at_step(ADD, 4)), (1.0, "kill", 1)]  # no attempt proposes it again
    world = played(Plan(steps=5, incidents=incidents))
    assert len(world.groups) == 2
    assert records(world) == [(1, "add", 4)]


def test_a_proposal_that_is_not_committed_is_in_the_checkpoint_of_its_step() -> None:
    incidents = [(0.35, "slow", 1, 0.3), (0.85, "kill", 1)]
    world = played(Plan(steps=3, save_every=2, script={1: [("propose", 1, ADD)]}, incidents=incidents))
    assert line(world, "with the proposals ['add']") < line(world, "attempt 1 starts at step 2")
    assert records(world) == [(1, "add", 2)]


def test_a_worker_that_never_reports_its_part_of_saves_is_named_after_a_bounded_time() -> None:
    world = played(Plan(steps=120, save_every=1, forgets=(1, 1, 200)))
    assert world.story.disk.history().checkpoints == {}
    refused = [one for one in world.notes.lines if "did not report its save" in one]
    assert len(refused) == 120
    assert "save-step-1 is refused: Worker 1 did not report its save of step 1 within 20 s" in refused[0]
    assert float(refused[0].split()[0]) < 21.0


def test_a_save_that_one_worker_leaves_out_costs_that_one_checkpoint_only() -> None:
    world = played(Plan(steps=6, save_every=1, audit_every=2, forgets=(1, 2, 3)))
    assert sorted(world.story.disk.history().checkpoints) == [1, 3, 4, 5, 6]
    assert line(world, "Worker 1 did not report its save of step 2") < line(world, "checkpoint of step 4")
    assert line(world, "Worker 1 did not report its audit of step 2") < line(world, "[audit of step 6]")


def test_what_waits_what_is_scheduled_and_what_is_behind_a_trial_can_be_withdrawn() -> None:
    trial = Proposal("trial", "digest-of-trial", (("add", "a", 1),), trial=Trial(4, "loss", 9.0))
    script = {1: [("propose", 0, trial)], 2: [("propose", 1, SCALE), ("propose", 1, at_step(ADD, 5))]}
    incidents = [(1.3, "withdraw", "w-1", "scale"), (1.3, "withdraw", "w-2", "add")]
    world = played(Plan(steps=8, script=script, incidents=incidents))
    assert "waits for the trial of trial, until step 6" in "\n".join(world.notes.lines)
    assert world.story.disk.history().withdrawn == {"scale", "add"}
    assert [id_ for _, id_, _ in records(world)] == ["trial"]


def test_what_is_committed_cannot_be_withdrawn_and_the_author_is_told_so() -> None:
    world = played(
        Plan(steps=4, script={0: [("propose", 0, ADD)]}, incidents=[(1.2, "withdraw", "w-1", "add")])
    )
    assert "add is unknown, or committed already" in "\n".join(world.notes.lines)
    assert records(world) == [(1, "add", 1)]


def test_a_reverted_trial_is_not_called_verified() -> None:
    trial = Proposal("trial", "digest-of-trial", (("add", "a", 1),), trial=Trial(2, "loss", -0.9))
    world = played(Plan(steps=5, script={1: [("propose", 0, trial)]}))
    (receipt,) = world.story.disk.history().receipts.values()
    assert receipt.stage is Stage.REVERTED
    assert "trial is verified" not in "\n".join(world.notes.lines)


def test_a_kill_in_a_trial_decides_it_once() -> None:
    trial = Proposal("trial", "digest-of-trial", (("add", "a", 1),), trial=Trial(2, "loss", -0.9))
    for when in (1.2, 1.5, 1.8):
        world = played(Plan(steps=6, script={1: [("propose", 0, trial)]}, incidents=[(when, "kill", 1)]))
        assert [decided.kept for decided in world.story.disk.history().decided.values()] == [False]


def test_a_stale_groups_record_is_void_forevery_reader() -> None:
    incidents = [(0.1, "push", "push-1", ADD), (0.36, "zombie", 3.0)]
    world = played(Plan(steps=3, incidents=incidents))
    written = [entry for group in world.story.disk.groups for entry in group if isinstance(entry, Committed)]
    assert len(written) == 2
    assert [entry.attempt for entry in world.story.disk.entries() if isinstance(entry, Committed)] == [1]


@pytest.mark.parametrize("late", [0.0015, 0.003, 0.0045])
def test_no_audit_is_raised_before_a_worker_that_was_stopped_has_its_report(late: float) -> None:
    plan = Plan(steps=3, audit_every=2, audit_policy="raise", incidents=[(0.5, "drift", 1, 99)])
    lines = played(plan).notes.lines
    reported_at = float(next(one for one in lines if "Do        Report" in one).split()[0])
    world = played(replace(plan, incidents=[*plan.incidents, (reported_at + late, "freeze", 1, 3.0)]))
    reported = line(world, "worker 1        Report")
    assert reported < line(world, "raises: d differed")
    assert float(world.notes.lines[reported].split()[0]) > reported_at + 3.0


def test_a_checkpoint_waits_until_the_payload_of_what_was_proposed_before_is_durable() -> None:
    incidents = [(0.35, "slow", 1, 1.2)]
    world = played(Plan(steps=3, save_every=2, script={1: [("propose", 1, ADD)]}, incidents=incidents))
    assert line(world, "payload of add") < line(world, "checkpoint of step 2")


def test_a_restart_reads_what_it_applies_from_the_journal() -> None:
    world = played(Plan(steps=4, script={0: [("propose", 1, ADD)]}, incidents=[(1.2, "kill", 0)]))
    assert len(world.groups) == 2
    assert line(world, "Do        Load add from the journal (worker 0)") < line(world, "attempt 1 has ended")


def test_a_function_that_raises_is_refused_and_changes_nothing() -> None:
    world = played(Plan(steps=2, script={0: [("function", 0, "f", None, None, None, None)]}))
    assert "f is refused: The function raised ValueError" in "\n".join(world.notes.lines)
    assert records(world) == []


def test_a_function_that_its_source_does_not_propose_is_refused_when_the_training_ends() -> None:
    world = played(Plan(steps=1, script={0: [("function", 1, "f", 3, None, None, 0)]}))
    assert "Worker 1, on which the function was to run, did not propose it" in "\n".join(world.notes.lines)


def test_fifty_updates_of_three_workers_share_few_boundaries() -> None:
    proposals = [Proposal(f"u{n}", f"digest-{n}", (("add", "d", n),)) for n in range(50)]
    script = {1: [("propose", n % 3, proposal) for n, proposal in enumerate(proposals)]}
    world = played(Plan(size=3, steps=12, script=script))
    assert sorted(id_ for _, id_, _ in records(world)) == sorted(proposal.id for proposal in proposals)
    assert len({step for _, _, step in records(world)}) < 8
