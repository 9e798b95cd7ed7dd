"""The API under requests that nobody would make: no defect shows, and nothing changes without the token."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from replicast.page import security
from replicast.page.app import ROWS
from tests.page.conftest import BEARER, TOKEN
from tests.page.live import served
from tests.page.prompt_run import PromptRun

EXAMPLES = {"without": 4, "with": 12}
"""Without the token, most requests are refused before they are read."""
ENDLESS = "/api/runs/{run}/events"


def fuzz(address: str, headers: dict[str, str], examples: int) -> int:
    """Sends requests to every endpoint that the description names; returns how many endpoints."""
    import schemathesis  # here: the import takes a second, and all processes of `make test` read this file
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi import checks

    expected = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operations = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
    operations = [one for one in operations if one.path != ENDLESS]
    for operation in operations:

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            if "run" in case.path_parameters:
                case.path_parameters["run"] = "first"
            answer = case.call(headers={"Host": "127.0.0.1", **headers})
            assert answer.status_code != 500, answer.text
            case.validate_response(answer, checks=expected)

        check()
    return len(operations)


def test_nothing_changes_without_the_token_and_nothing_breaks(
    run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "ACTIONS_PER_MINUTE", 10**6)
    with served(run, token=TOKEN) as address:
        assert fuzz(address, {}, EXAMPLES["without"]) == len(ROWS) + 3  # The runs, Prometheus, health.
        assert run.done == []
        fuzz(address, BEARER, EXAMPLES["with"])
        assert "audit" in run.done
