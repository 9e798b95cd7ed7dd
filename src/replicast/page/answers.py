"""Answers in JSON, and errors as answers.

An error of this package is `{"error": {"type", "problem", …its other fields, "message"}}`: `errors.py` makes
the same error from it in the client. Its status follows from its type. What the server itself refuses (a
token, a limit, a wrong parameter) has no type: `{"error": {"problem", "expected", "received", "remedy"}}`.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from replicast.errors import (
    CheckpointError,
    FileDamaged,
    NoAnswer,
    NotFound,
    ReplicastError,
    RequestFailed,
    RequestRefused,
    UpdateIdInUse,
    UpdateRefused,
)
from replicast.strictjson import json_value

STATUS: dict[type[Exception], int] = {
    UpdateIdInUse: 409,
    UpdateRefused: 422,
    RequestRefused: 422,
    CheckpointError: 422,
    NotFound: 404,
    NoAnswer: 504,
    FileDamaged: 503,
    RequestFailed: 503,
    ReplicastError: 409,
}
_MAX_TEXT = 2000


def dumped(value: Any) -> str:
    """JSON that every browser reads: in one line, without NaN and infinity, which become text."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json_value(value), allow_nan=False, separators=(",", ":"))


class HttpError(Exception):
    """Answers a request with an error."""

    def __init__(
        self,
        status: int,
        problem: str,
        *,
        expected: str | None = None,
        received: str | None = None,
        remedy: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(problem)
        self.status = status
        self.headers = headers
        self.fields: dict[str, Any] = {"problem": problem, "expected": expected}
        self.fields |= {"received": received, "remedy": remedy}

    def body(self) -> dict[str, Any]:
        """The fields as JSON values, each of bounded length."""
        told = {name: value for name, value in self.fields.items() if value is not None}
        return {"error": {name: _bounded(value) for name, value in told.items()}}

    def response(self) -> Response:
        return Response(dumped(self.body()), self.status, self.headers, "application/json")


def http_error(error: Exception) -> HttpError | None:
    """The answer to an error; None for one that is a defect."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TimeoutError):
        error = NoAnswer(str(error) or "The job did not answer in time")
    elif isinstance(error, OSError):
        error = RequestFailed(f"The run directory cannot be used ({error.strerror or error})", status=503)
    if not isinstance(error, ReplicastError):
        return None
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    answer = HttpError(status, error.problem)
    answer.fields = error.to_json() | {"message": str(error)}
    if isinstance(error, FileDamaged) and error.remedy is None:
        answer.fields["remedy"] = "replicast status shows what is wrong with the run"
    return answer


def _bounded(value: object) -> object:
    return value if isinstance(value, int | dict) else str(value)[:_MAX_TEXT]
