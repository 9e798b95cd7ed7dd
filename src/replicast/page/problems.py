"""What goes wrong, as HTTP answers: `{"error": {"problem", "expected", "received", "remedy"}}`."""

from __future__ import annotations

from typing import Any

from replicast.errors import (
    CheckpointError,
    FileDamaged,
    NoAnswer,
    NotFound,
    ReplicastError,
    RequestFailed,
    UpdatePending,
    UpdateRefused,
)
from replicast.page.jsontext import Json

_FIELDS = ("problem", "variable", "worker", "expected", "received", "remedy")
_MAX_TEXT = 2000


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
        self.problem = problem
        self.expected = expected
        self.received = received
        self.remedy = remedy
        self.headers = headers

    def response(self) -> Json:
        """The answer."""
        return Json(error_body(self), self.status, self.headers)


def http_error(error: Exception) -> HttpError | None:
    """The answer to an error of this package; None for one that is a defect."""
    match error:
        case HttpError():
            return error
        case UpdateRefused():
            return _of(409 if "Another update with this id" in error.problem else 422, error)
        case CheckpointError():
            return _of(422, error)
        case UpdatePending():
            return HttpError(409, str(error))
        case NotFound():
            return HttpError(404, str(error))
        case NoAnswer():
            return HttpError(504, str(error))
        case TimeoutError():
            return HttpError(504, str(error) or "The job did not answer in time")
        case FileDamaged():
            return HttpError(503, str(error), remedy="replicast status shows what is wrong with the run")
        case RequestFailed():
            return HttpError(503, str(error))
        case ReplicastError():
            return HttpError(409, str(error))
        case OSError():
            return HttpError(503, f"The run directory cannot be used ({error.strerror or error})")
        case _:
            return None


def error_body(error: object) -> dict[str, Any]:
    """The fields of an error as JSON values, each of bounded length."""
    found = {name: getattr(error, name, None) for name in _FIELDS}
    return {"error": {name: _bounded(value) for name, value in found.items() if value is not None}}


def _of(status: int, error: UpdateRefused | CheckpointError) -> HttpError:
    answer = HttpError(status, error.problem)
    for name in _FIELDS[1:]:
        setattr(answer, name, getattr(error, name, None))
    return answer


def _bounded(value: object) -> object:
    return value if isinstance(value, int) else str(value)[:_MAX_TEXT]
