"""Faults between hosts: every job ends within a bound or trains on, and loses nothing: docs/faults.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.faults import NOTHING, Case, cases, problems, run
from tests.hosts.job import need_machines

need_machines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The final state of a job without a fault on a number of hosts."""

    @functools.cache
    def final_state(hosts: int) -> str:
        result = run(Case(NOTHING, 0, hosts=hosts), tmp_path_factory.mktemp("undisturbed"))
        assert result.trained_on, result.logs
        return result.finals[0]

    return final_state


@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.name)
def test_a_job_ends_in_time_or_trains_on_and_applies_every_update_once(
    tmp_path: Path, case: Case, undisturbed: Callable[[int], str]
) -> None:
    result = run(case, tmp_path)
    assert problems(result, undisturbed(case.hosts)) == [], result.logs
