"""What may be asked for, and how it is checked. The description of the parameters is made from these."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from replicast.client.metrics import MAX_POINTS
from replicast.page.problems import HttpError
from replicast.strictjson import parse_integer
from replicast.update.trial import MAX_INCREASE, MAX_METRIC_NAME, MAX_STEPS, Trial
from replicast.update.update import MAX_STEP, MAX_TEXT

_T = TypeVar("_T", bound=Struct)

Step = Annotated[int, Meta(ge=0, le=MAX_STEP - 1)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Secs = Annotated[float, Meta(ge=0, le=300)]
MAX_ROWS = 10_000
MAX_RANK = 10**6


class Nothing(Struct, forbid_unknown_fields=True):
    """No parameters."""


class MetricsQuery(Struct, forbid_unknown_fields=True):
    """Which metrics: only what was written after a `position`; at most so many points of each series."""

    since: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    points: Annotated[int, Meta(ge=1, le=MAX_POINTS)] = 2000


class LastQuery(Struct, forbid_unknown_fields=True):
    """How many of the last ones."""

    last: Annotated[int, Meta(ge=1, le=1000)] = 100


class LookQuery(Struct, forbid_unknown_fields=True):
    """Whether only the update with exactly this id is meant, which is cheap; or the journal is read too."""

    exact: bool = False
    thoroughly: bool = False


class LogsQuery(Struct, forbid_unknown_fields=True):
    """How many of the last lines, and of which attempt."""

    lines: Annotated[int, Meta(ge=1, le=5000)] = 200
    attempt: Annotated[int, Meta(ge=0, le=10**9)] | None = None


class ValuesQuery(Struct, forbid_unknown_fields=True):
    """Which rows, as 0,5,7 or 10-19; how long to wait for the job; larger values as a safetensors file."""

    rows: (
        Annotated[str, Meta(pattern=r"^\d{1,15}(-\d{1,15})?(,\d{1,15}(-\d{1,15})?)*$", max_length=4000)]
        | None
    ) = None
    timeout: Secs = 60.0
    format: Literal["json", "safetensors"] = "json"


class _Proposal(Struct, forbid_unknown_fields=True):
    """When and how an update is applied, and who wants it."""

    dry_run: bool = False
    id: Id | None = None
    note: Text | None = None
    author: Text | None = None
    at_step: Step | None = None
    next_start: bool = False
    trial_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    trial_metric: Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_NAME)] = "loss"
    trial_max_increase: Annotated[float, Meta(ge=-MAX_INCREASE, le=MAX_INCREASE)] = 0.0
    trial_mode: Literal["min", "max"] = "min"

    def trial(self) -> Trial | None:
        """The condition of its trial, if any."""
        if self.trial_steps is None:
            return None
        try:
            return Trial(self.trial_steps, self.trial_metric, self.trial_max_increase, self.trial_mode)
        except ValueError as error:
            raise HttpError(400, str(error)) from error


class PushQuery(_Proposal, forbid_unknown_fields=True):
    """What to do with the tensors of a plain file; without an operation the file is a saved update."""

    operation: (
        Literal["add", "assign", "scale", "blend", "add_rows", "assign_rows", "add_low_rank"] | None
    ) = None
    weight: Annotated[float, Meta(ge=0, le=1)] | None = None
    reset_slots: bool = False
    allow_nonfinite: bool = False


class RateBody(_Proposal, forbid_unknown_fields=True, kw_only=True):
    """A new learning rate. Where there are several, name the variable."""

    value: Annotated[float, Meta(gt=0)]
    variable: Annotated[str, Meta(min_length=1, max_length=1000)] = "learning_rate"


class RevertBody(Struct, forbid_unknown_fields=True):
    """Why an update is undone; `force` also when it is undone already, or overwritten since."""

    note: Text = ""
    dry_run: bool = False
    force: bool = False
    next_start: bool = False
    author: Text | None = None


class WaitBody(Struct, forbid_unknown_fields=True):
    """How long to wait for the job, and who asks it."""

    timeout_secs: Secs = 60.0
    author: Text | None = None


def converted(given: Any, kind: type[_T]) -> _T:
    """Checks parameters of an address."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"A parameter is not valid: {error}", received=str(given)[:500]) from error


def parsed(content: bytes, kind: type[_T]) -> _T:
    """Checks the JSON body of a request; an empty one is an empty object."""
    try:
        return msgspec.json.decode(content if content.strip() else b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HttpError(400, f"The body is not valid: {error}") from error


def rank_of(text: str) -> int:
    """The rank of a worker in an address."""
    try:
        rank = parse_integer(text)
    except ValueError:
        rank = -1
    if not 0 <= rank <= MAX_RANK:
        raise HttpError(404, "There is no such worker", expected=f"0 to {MAX_RANK}", received=text[:200])
    return rank


def row_numbers(text: str | None) -> list[int] | None:
    """The rows that `0,5,7` or `10-19` names; None for all."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if end - begin + 1 + len(found) > MAX_ROWS:
            raise HttpError(
                400, "These are too many rows", expected=f"at most {MAX_ROWS}", received=text[:200]
            )
        found += range(begin, end + 1)
    return found
