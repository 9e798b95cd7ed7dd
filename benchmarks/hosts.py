"""The question about hosts: the update of 100 MB between two hosts, both simulated by this machine."""

from __future__ import annotations

from benchmarks.question import TURNS, Contestant, Question, Ratio
from benchmarks.update import BROADCAST_EACH, BROADCAST_FUSED
from benchmarks.update_task import Task

REPLICAST = Contestant("replicast propose, a host id each", "hosts", "benchmarks.update_replicast:Propose")
HOSTS = Question(
    name="hosts",
    title=f"An update of {Task()} between 2 hosts",
    unit="ms until the last has applied",
    contestants=(REPLICAST, BROADCAST_FUSED, BROADCAST_EACH),
    task=Task(),
    ratios=(
        Ratio("replicast / TF broadcast fused", REPLICAST, BROADCAST_FUSED, "at most", 1.0),
        Ratio("replicast / TF broadcast per variable", REPLICAST, BROADCAST_EACH),
    ),
    notes=(
        TURNS,
        "One machine simulates both hosts: no bytes are shared in memory, and none cross a network.",
    ),
    budget_secs=45.0,
)
