"""The questions about hosts: an update between machines, which network namespaces of this one play."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.update_task import Task

MODULE = "benchmarks.hosts_replicast"
SHARED = "All hosts share the cores of this machine."


def contestant(name: str, factory: str, rate: str, **options: Any) -> Contestant:
    return replace(Contestant(name, f"hosts:{rate}", factory), **options)


def socket(rate: str) -> Contestant:
    return contestant("floor: one plain TCP socket", f"{MODULE}:PlainSocket", rate, role="floor")


def chain(rate: str, hosts: int = 2) -> Contestant:
    name = f"replicast, the transport alone, {hosts} hosts"
    return contestant(name, f"{MODULE}:Transfer", rate, workers=hosts)


def propose(rate: str) -> Contestant:
    return contestant("replicast propose, until applied", "benchmarks.update_replicast:Propose", rate)


def broadcast(rate: str) -> Contestant:
    factory = "benchmarks.peers.mirrored:BroadcastFused"
    return contestant("TF broadcast fused + add", factory, rate, role="peer")


def shaped(rate: str, megabits: int, megabytes: int, *, four_hosts: bool) -> Question:
    """An update over links of a given rate, as `tc` has it and in Mbit/s."""
    task = Task(megabytes=megabytes)
    line_ms = megabytes * 8 / megabits * 1e3
    two, four = chain(rate), chain(rate, 4)
    ratios = [Ratio(f"transport / {line_ms:.0f} ms of the line", two, line_ms, "at most", 1 / 0.9)]
    ratios += [Ratio("4 hosts / 2 hosts", four, two, "at most", 1.25)] if four_hosts else []
    ratios += [Ratio("TF broadcast / replicast propose", broadcast(rate), propose(rate))]
    return Question(
        name=f"hosts-{rate}",
        title=f"An update of {task} between hosts with links of {megabits:,} Mbit/s",
        unit="ms until the last host has it",
        contestants=(two, *([four] if four_hosts else []), socket(rate), propose(rate), broadcast(rate)),
        task=task,
        ratios=tuple(ratios),
        notes=(TURNS, "Each host's link is shaped by tc tbf, where it sends."),
        budget_secs=150.0,
    )


UNSHAPED = Question(
    name="hosts",
    title=f"An update of {Task()} between hosts, links without a limit",
    unit="ms until the last host has it",
    contestants=(chain("full"), socket("full"), propose("full"), broadcast("full")),
    task=Task(),
    ratios=(
        Ratio("plain socket's time / transport's", socket("full"), chain("full"), "at least", 0.7),
        Ratio("replicast propose / TF broadcast fused", propose("full"), broadcast("full"), "at most", 1.0),
    ),
    notes=(TURNS, SHARED),
    budget_secs=150.0,
)
STALL = Question(
    name="hosts-stall",
    title=f"How long an update of {Task()} from another host stops training",
    unit="ms on the slowest worker",
    contestants=(contestant("update by the chain", "benchmarks.stall_replicast:InMemory", "full"),),
    task=Task(),
    notes=(TURNS, "The bytes arrive before, in the background; the stall is `assign_add` and the meeting."),
    turns=2,
    budget_secs=120.0,
)
QUESTIONS = (
    UNSHAPED,
    shaped("1gbit", 1000, 100, four_hosts=True),
    shaped("200mbit", 200, 25, four_hosts=False),
    STALL,
)
