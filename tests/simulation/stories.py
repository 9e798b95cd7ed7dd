"""The scenarios of the golden transcripts: one per operation, and one per typical fault.

`python -m tests.simulation.stories` regenerates the transcripts.
"""

from __future__ import annotations

from pathlib import Path

from replicast.core.entries import Proposal
from replicast.update.trial import Trial
from tests.simulator import Plan, World

TRANSCRIPTS = Path(__file__).parent.parent / "golden" / "transcripts"
ADD = (("add", "d", 5),)
SCALE = (("scale", "d", 2),)
UPDATE = Proposal("add-5", "digest-of-add-5", ADD)
OTHER = Proposal("times-2", "digest-of-times-2", SCALE)


def later(update: Proposal, step: int) -> Proposal:
    return Proposal(update.id, update.digest, update.content, step)


def on_trial(update: Proposal, max_increase: float) -> Proposal:
    return Proposal(update.id, update.digest, update.content, trial=Trial(2, "loss", max_increase))


STORIES: dict[str, tuple[str, Plan]] = {
    "update": (
        "Worker 1 proposes an update in its training thread.",
        Plan(steps=4, script={1: [("propose", 1, UPDATE)]}, seed=1),
    ),
    "update-at-step": (
        "An update for step 4 waits; another one, proposed later, does not wait for it.",
        Plan(steps=4, script={0: [("propose", 1, later(UPDATE, 4))], 1: [("propose", 0, OTHER)]}),
    ),
    "update-from-outside": (
        "A process outside the job pushes an update, and pushes the same again when it is applied.",
        Plan(steps=3, incidents=[(0.2, "push", "push-1", UPDATE), (1.0, "push", "push-2", UPDATE)]),
    ),
    "refused": (
        "Worker 1 cannot prepare the update: it is refused, and training continues.",
        Plan(
            steps=2,
            script={0: [("propose", 0, Proposal("bad", "digest-of-bad", (("add", "no/such", 1),)))]},
        ),
    ),
    "withdrawn": (
        "An update for step 3 is withdrawn at step 1.",
        Plan(
            steps=3,
            incidents=[(0.1, "push", "push-1", later(UPDATE, 3)), (0.5, "withdraw", "withdraw-1", "add-5")],
        ),
    ),
    "function": (
        "All workers propose a function, which runs on worker 1 with the live values.",
        Plan(steps=3, script={1: [("function", 1, "f", 7, None, None, None)]}),
    ),
    "sync": (
        "Worker 1 has changed only its own replica; then all workers call sync(source=0).",
        Plan(steps=2, script={1: [("sync", 0)]}, incidents=[(0.1, "drift", 1, 99)]),
    ),
    "save": (
        "All workers save at step 1. An update that was proposed before is not committed yet.",
        Plan(steps=2, save_every=1, incidents=[(0.35, "thread", 1, UPDATE)]),
    ),
    "save-left-out": (
        "Worker 1 leaves out its part of the save of step 1: it is named when it reports that of step 2.",
        Plan(steps=2, save_every=1, forgets=(1, 1, 2)),
    ),
    "audit-heal": (
        "A planned audit at step 2 finds that worker 1 differs; all stop, and it is healed.",
        Plan(size=3, steps=3, audit_every=2, incidents=[(0.1, "drift", 1, 99)]),
    ),
    "audit-raise": (
        "An audit raises: once every worker has the report, all raise it; the job restarts.",
        Plan(steps=3, save_every=1, audit_every=2, audit_policy="raise", incidents=[(0.5, "drift", 1, 99)]),
    ),
    "audit-raise-in-a-rest": (
        "An audit raises while all workers rest in save: the rest ends, and all raise the report.",
        Plan(
            steps=3,
            script={2: [("save",)]},
            audit_every=2,
            audit_policy="raise",
            incidents=[(0.1, "drift", 1, 99)],
        ),
    ),
    "trial-kept": (
        "An update on trial is kept; a second one waits for its end.",
        Plan(steps=6, script={1: [("propose", 0, on_trial(UPDATE, 9.0))], 2: [("propose", 1, OTHER)]}),
    ),
    "trial-reverted": (
        "An update on trial is reverted by every replica.",
        Plan(steps=5, script={1: [("propose", 0, on_trial(UPDATE, -0.9))]}),
    ),
    "pull": (
        "A process outside asks for the value of d; worker 1 has another one, and the answer says so.",
        Plan(
            steps=3,
            script={3: [("audit", "heal")]},
            incidents=[(0.1, "drift", 1, 99), (0.2, "ask", "ask-1", "pull", ("d",))],
        ),
    ),
    "revert": (
        "An update assigns d; a later one, pushed from outside, reverts it: d is what it was before.",
        Plan(
            steps=4,
            save_every=4,
            script={0: [("propose", 1, Proposal("assign-9", "digest-of-assign-9", (("assign", "d", 9),)))]},
            incidents=[(1.0, "push", "push-1", Proposal("undo", "", reverts=1))],
        ),
    ),
    "stopped-from-outside": (
        "A process outside stops the job: all save at one boundary, worker 0 answers, and they leave.",
        Plan(steps=3, incidents=[(0.3, "ask", "ask-1", "leave", ())]),
    ),
    "leave": (
        "Worker 1 is told to exit: all save at one boundary and exit; the next start continues from there.",
        Plan(steps=3, incidents=[(0.3, "request", 1, "leave")]),
    ),
    "crash-before-the-commit": (
        "Worker 0 dies before the record is written: the script proposes the update again.",
        Plan(steps=3, script={0: [("propose", 0, UPDATE)]}, crash=(0, 0, 15)),
    ),
    "crash-after-the-commit": (
        "Worker 0 dies after the record is written, before a worker applies it: the next attempt replays it.",
        Plan(steps=3, script={0: [("propose", 0, UPDATE)]}, crash=(0, 0, 16)),
    ),
    "crash-with-a-proposal-in-a-checkpoint": (
        "A proposal is not committed when its step is saved; worker 1 dies: the checkpoint brings it back.",
        Plan(
            steps=3,
            save_every=2,
            script={1: [("propose", 1, UPDATE)]},
            incidents=[(0.35, "slow", 1, 0.3), (0.85, "kill", 1)],
        ),
    ),
    "stale-group": (
        "A superseded group writes a record after the next group has made its claim: the record is void.",
        Plan(
            steps=3,
            incidents=[(0.1, "push", "push-1", UPDATE), (0.36, "zombie", 3.0)],
        ),
    ),
    "stopped-worker": (
        "Worker 1 is stopped for eight seconds: the update is refused, and the refusal names the worker.",
        Plan(steps=2, incidents=[(0.1, "freeze", 1, 8.0), (0.2, "push", "push-1", UPDATE)]),
    ),
    "full-disk": (
        "The disk is full when the record is written: the update is refused, and the next one is applied.",
        Plan(
            steps=4,
            incidents=[(0.25, "full", 0.5)],
            script={0: [("propose", 0, UPDATE)], 2: [("propose", 1, OTHER)]},
        ),
    ),
}


def transcript(name: str) -> str:
    """The transcript of a scenario."""
    title, plan = STORIES[name]
    plan.quick = True
    world = World(plan, recording=True)
    world.run()
    faults = ", ".join(f"{what} {count}" for what, count in sorted(world.notes.faults.items()))
    lines = [title, f"workers: {plan.size}, steps: {plan.steps}, faults: {faults or 'none'}", ""]
    return "\n".join([*lines, *world.notes.lines, ""])


def main() -> None:
    TRANSCRIPTS.mkdir(parents=True, exist_ok=True)
    for name in STORIES:
        (TRANSCRIPTS / f"{name}.txt").write_text(transcript(name))


if __name__ == "__main__":
    main()
