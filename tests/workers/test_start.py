"""The start of real workers, as it was seen when the strategy of the pool was built."""

from __future__ import annotations

from typing import Any

from tests.pool import Pool, start


def calls_at_the_start(strategy: Any) -> tuple[list[str], list[str]]:
    return start.unwatched_calls, start.watched_calls


def test_no_call_into_the_service_is_made_before_the_job_is_watched(pool2: Pool) -> None:
    for unwatched, watched in pool2.run(calls_at_the_start):
        assert unwatched == []
        assert any("replicast/allreduce" in call for call in watched), "the calls were seen"


def sigterm_after_the_start(strategy: Any) -> list[bool]:
    return start.catches_sigterm


def test_sigterm_has_its_default_action_again_after_the_strategy_is_built(pool2: Pool) -> None:
    assert pool2.run(sigterm_after_the_start) == [[False], [False]]
