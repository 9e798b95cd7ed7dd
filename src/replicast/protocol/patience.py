"""How long the protocol waits for whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for whom.

    Attributes:
        stage_secs: For every worker to have fetched and checked an update's bytes.
        answer_secs: For every worker's follower thread to answer.
        decide_secs: For the coordinator, by a training thread that stands at a boundary.
        compute_secs: For a function that runs at a boundary, once all have come there.
        begin_secs: For the other workers to make their `Replicas`.
        park_secs: For the other workers to wait as well, by a training thread that waits for a result.
    """

    stage_secs: float = 120.0
    answer_secs: float = 30.0
    decide_secs: float = 900.0
    compute_secs: float = 600.0
    begin_secs: float = 600.0
    park_secs: float = 5.0
