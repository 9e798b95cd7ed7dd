"""The plan of one simulated schedule, chosen from a seed before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from replicast.core.entries import Proposal
from replicast.update.trial import Trial
from tests.simulator.replica import Edit

Action = tuple[Any, ...]
"""An action of the scripts behind a boundary; some on one worker only:
("propose", rank, proposal), ("function", source, id, number, at_step, trial, by), ("wait", rank, secs);
or all together: ("sync", source), ("save",), ("audit", policy), ("meet",)."""
TOGETHER = ("sync", "save", "audit", "meet")
Incident = tuple[Any, ...]
"""An event from outside: (time, kind, …)."""


@dataclass(slots=True)
class Plan:
    """The plan of one schedule."""

    seed: int = 0
    size: int = 2
    steps: int = 4
    stride: int = 1  # steps per boundary
    together: bool = True  # a step is a transfer between all workers, as in synchronous training
    script: dict[int, list[Action]] = field(default_factory=dict)  # behind each boundary, by step
    incidents: list[Incident] = field(default_factory=list)  # events from outside, and faults, by time
    quick: bool = False  # updates are prepared without long delays; for transcripts
    save_every: int = 0  # 0 for none
    audit_every: int = 0
    # Planned saves and audits: "before" the boundary; "behind" it, where a worker may still wait for others;
    # or "late", just before the next step.
    planned_at: str = "before"
    audit_policy: str = "heal"
    go_back: int = 0  # the attempt that finds the last checkpoint damaged and uses the one before
    crash: tuple[int, int, int] | None = None  # between two commands: attempt, rank, number of commands
    unknown: int | None = None  # the write of which it is unknown whether it was durable
    forgets: tuple[int, int, int] | None = None  # leaves out planned reports: rank, from step, until step


def random_plan(seed: int) -> Plan:
    """The plan of a seed."""
    return _Chooser(seed).plan()


class _Chooser:
    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.result = Plan(
            seed=seed,
            size=1 + int(random.random() * 2.99) if random.random() < 0.9 else 4,
            steps=random.randrange(3, 9),
            stride=1 if random.random() < 0.8 else 2,
            together=random.random() < 0.8,
            save_every=int(random.random() * 4),
            audit_every=(0, 0, 2, 4)[int(random.random() * 4)],
            planned_at=("before", "before", "behind", "late")[int(random.random() * 4)],
            audit_policy=("heal", "heal", "raise", "warn")[random.randrange(4)],
            go_back=int(random.random() < 0.15),
        )
        self.result.steps -= self.result.steps % self.result.stride
        self.secs = self.result.steps * 0.4
        self.proposed: list[Proposal] = []

    def plan(self) -> Plan:
        random = self.random
        for _ in range(random.randrange(1, 5)):
            self.something()
        if random.random() < 0.7:
            self.fault()
            if random.random() < 0.3:
                self.fault()
        if self.result.go_back:  # a second restart sees the checkpoints that the first one invalidated
            self.result.save_every = 1 + random.randrange(2)
            for after in (1.0, 2.5):
                rank = random.randrange(self.result.size)
                self.result.incidents.append((after + self.when(), "kill", rank))
        self.result.incidents.sort(key=lambda one: one[0])
        if random.random() < 0.1:
            first = random.randrange(self.result.steps)
            until = first + random.choice([1, 2, self.result.steps])
            self.result.forgets = random.randrange(self.result.size), first, until
        return self.result

    def something(self) -> None:
        random, plan = self.random, self.result
        choice = random.random()
        rank = random.randrange(plan.size)
        if choice < 0.27:
            self.act(("propose", rank, self.proposal("w")))
            if random.random() < 0.25:
                self.wait(rank)
        elif choice < 0.37:
            number = None if random.random() < 0.15 else random.randrange(100)
            id_ = f"f{len(plan.script)}{random.randrange(99)}"
            by = None if random.random() < 0.8 else random.randrange(plan.size)
            self.act(("function", rank, id_, number, self.at_step(), self.trial(), by))
            if by is None and random.random() < 0.25:
                self.wait(random.randrange(plan.size))
        elif choice < 0.47:
            plan.incidents.append((self.when(), "thread", rank, self.proposal("t")))
        elif choice < 0.67:
            plan.incidents.append((self.when(), "push", f"push-{len(plan.incidents)}", self.proposal("p")))
        elif choice < 0.75:
            self.act(("sync", rank))
        elif choice < 0.82:
            self.act(("save",))
        elif choice < 0.89:
            self.act(("audit", ("heal", "heal", "raise", "warn")[random.randrange(4)]))
        elif choice < 0.92:
            self.act(("meet",))
        elif choice < 0.96:
            plan.incidents.append(
                (self.when(), "request", rank, ("save", "audit", "leave")[random.randrange(3)])
            )
        else:
            self.ask()
        if self.proposed and random.random() < 0.15:
            self.revert(rank)
        if self.proposed and random.random() < 0.15:
            id_ = random.choice(self.proposed).id
            plan.incidents.append((self.when(), "withdraw", f"w-{len(plan.incidents)}", id_))

    def ask(self) -> None:
        """Somebody outside asks for something."""
        kind = ("pull", "pull", "save", "audit", "leave")[self.random.randrange(5)]
        arguments = ("abd"[self.random.randrange(3)],) if kind == "pull" else ()
        id_ = f"ask-{len(self.result.incidents)}"
        self.result.incidents.append((self.when(), "ask", id_, kind, arguments))

    def revert(self, rank: int) -> None:
        """Somebody reverts an update: a training thread, another thread, or a process outside."""
        random, plan = self.random, self.result
        sequence, forced = random.randrange(1, 4), random.random() < 0.2
        proposal = Proposal(f"r{len(plan.incidents)}-{rank}", "", reverts=sequence, forced=forced)
        choice = random.randrange(3)
        if choice == 0:
            self.act(("propose", rank, proposal))
        elif choice == 1:
            plan.incidents.append((self.when(), "thread", rank, proposal))
        else:
            plan.incidents.append((self.when(), "push", f"push-r{len(plan.incidents)}", proposal))

    def trial(self) -> Trial | None:
        if self.random.random() < 0.8:
            return None
        return Trial(self.random.randrange(1, 4), "a", self.random.choice([-1.0, 0.0, 10.0]))

    def wait(self, rank: int) -> None:
        """The training thread waits for its last proposal."""
        self.act(("wait", rank, self.random.choice([0.05, 1.0, None])), same=True)

    def act(self, action: Action, *, same: bool = False) -> None:
        if not same:
            self.step = self.random.randrange(0, self.result.steps + 1, self.result.stride)
        self.result.script.setdefault(self.step, []).append(action)

    def proposal(self, prefix: str) -> Proposal:
        """A new proposal, or an earlier one again, possibly with other content."""
        random = self.random
        if self.proposed and random.random() < 0.15:
            known = random.choice(self.proposed)
            if random.random() < 0.6:
                return known
            edits = self.edits()
            return Proposal(known.id, str(edits), edits, known.at_step, known.trial)
        edits = self.edits()
        proposal = Proposal(f"{prefix}{len(self.proposed)}", str(edits), edits, self.at_step(), self.trial())
        self.proposed.append(proposal)
        return proposal

    def edits(self) -> tuple[Edit, ...]:
        random = self.random
        name = "abd"[random.randrange(3)] if random.random() < 0.93 else "nothing"
        return ((("add", "scale", "assign")[random.randrange(3)], name, random.randrange(2, 50)),)

    def at_step(self) -> int | None:
        if self.random.random() < 0.7:
            return None
        return self.random.randrange(1, self.result.steps + 2)

    def when(self) -> float:
        return self.random.random() * self.secs

    def fault(self) -> None:
        random, plan = self.random, self.result
        rank = random.randrange(plan.size)
        choice = random.random()
        if choice < 0.08 and plan.size > 1 and not any(one[1] == "drift" for one in plan.incidents):
            plan.incidents.append((self.when(), "drift", rank, random.randrange(100)))
            plan.script.setdefault(plan.steps, []).append(("audit", "heal"))
        elif choice < 0.35:
            plan.crash = (int(random.random() * 1.3), rank, random.randrange(1, 70))
        elif choice < 0.45:
            plan.incidents.append((self.when(), "kill", rank))
        elif choice < 0.55:
            secs = random.random() * 3 if random.random() < 0.7 else random.random() * 40
            plan.incidents.append((self.when(), "freeze", rank, secs))
        elif choice < 0.65:
            plan.incidents.append((self.when(), "slow", rank, random.random() * 5))
        elif choice < 0.75:
            plan.incidents.append((self.when(), "full", random.random() * 1.0))
        elif choice < 0.85:
            plan.incidents.append((self.when(), "zombie", random.random() * 6))
        elif choice < 0.92:
            plan.incidents.append((self.when(), "no_room", rank))
        elif choice < 0.96:
            plan.incidents.append((self.when(), "hang", rank))
        else:
            plan.unknown = random.randrange(1, 12)
