"""Every address of the API, once: the routes and their description in OpenAPI are made from this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from replicast.page import actions, reading
from replicast.page.context import Context
from replicast.page.requests import (
    LastQuery,
    LogsQuery,
    LookQuery,
    MetricsQuery,
    Nothing,
    PushQuery,
    RateBody,
    RevertBody,
    ValuesQuery,
    WaitBody,
)

RUN = "/api/runs/{run}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address."""

    method: Literal["GET", "POST"]
    path: str
    answer: Callable[[Context], Awaitable[Any]]
    returns: tuple[str, ...] | None = ()
    query: type[Struct] = Nothing
    body: type[Struct] | Literal["file"] = Nothing
    status: int = 200
    sends_files: bool = False
    asks_the_job: bool = False

    @property
    def name(self) -> str:
        """Its name in OpenAPI."""
        return self.answer.__name__

    @property
    def summary(self) -> str:
        """What it does, in a sentence."""
        return (self.answer.__doc__ or "").strip().partition("\n")[0]


ENDPOINTS = (
    Endpoint("GET", "/api/runs", reading.list_runs, None),
    Endpoint("GET", RUN, reading.brief, ("name", "state", "sentence", "running")),
    Endpoint("GET", f"{RUN}/status", reading.status, ("state", "sentence", "running", "workers", "updates")),
    Endpoint("GET", f"{RUN}/schema", reading.schema, ("variables",)),
    Endpoint("GET", f"{RUN}/metrics", reading.metrics, ("series", "position"), MetricsQuery),
    Endpoint("GET", f"{RUN}/updates", reading.updates, ("updates",), LastQuery),
    Endpoint("GET", f"{RUN}/updates/{{update}}", reading.update, ("id", "stage"), LookQuery),
    Endpoint("GET", f"{RUN}/audits", reading.audits, ("audits",), LastQuery),
    Endpoint("GET", f"{RUN}/checkpoints", reading.checkpoints, ("checkpoints",)),
    Endpoint("GET", f"{RUN}/logs/{{worker}}", reading.logs, ("worker", "lines"), LogsQuery),
    Endpoint(
        "GET",
        f"{RUN}/variables/{{variable}}",
        reading.variable,
        ("name", "step", "values"),
        ValuesQuery,
        sends_files=True,
        asks_the_job=True,
    ),
    Endpoint("POST", f"{RUN}/updates", actions.push, (), PushQuery, "file", 201),
    Endpoint("POST", f"{RUN}/learning-rate", actions.set_learning_rate, (), body=RateBody, status=201),
    Endpoint("POST", f"{RUN}/updates/{{update}}/withdraw", actions.withdraw, ("id", "stage")),
    Endpoint("POST", f"{RUN}/updates/{{update}}/revert", actions.revert, (), body=RevertBody, status=201),
    Endpoint("POST", f"{RUN}/audit", actions.audit, ("number", "equal"), body=WaitBody),
    Endpoint("POST", f"{RUN}/checkpoint", actions.checkpoint, ("step",), body=WaitBody),
    Endpoint("POST", f"{RUN}/stop", actions.stop, ("step",), body=WaitBody),
)
CONVERTORS = {"variable": "path"}
"""How a part of an address is read, where it is not a plain name."""
