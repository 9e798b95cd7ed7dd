"""The description of the API, made from the table of operations (client/run.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import msgspec

from replicast import __version__
from replicast.client.run import Rank, RunOperation
from replicast.update.schema import Schema

_ERRORS = {
    400: "A parameter or the body is not valid",
    401: "The token is missing or wrong",
    403: "Actions are off, or the request comes from a page of another site",
    404: "There is no such run, update, variable or log",
    408: "The body did not arrive in time",
    409: "The run is not in a state in which this can be done, or another update has this id",
    413: "The body is too large",
    421: "The server does not accept this host name",
    422: "The update is refused: the error says why",
    429: "Too many actions, or too many wrong tokens",
    500: "A defect of the server",
    503: "The run directory cannot be read or written, or there are too many streams",
    504: "The job is not running, or did not answer in time",
}
_FIELDS = {
    "type": "The class of the error in Python, if it has one",
    "problem": "What is wrong, in one sentence",
    "expected": "What would have been accepted",
    "received": "What was found instead",
    "remedy": "What to do about it",
}
_NOT_IN_JSON = ("array", "path")
_JSON = "application/json"
_STRING = {"type": "string"}
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TOKEN: list[Any] = [{"token": []}]
_FREE = [{}, *_TOKEN]
_REFUSED = {str(code): {"$ref": f"#/components/responses/{code}"} for code in _ERRORS}
_RUN = "/api/runs/{run}"


def description(rows: Iterable[RunOperation]) -> dict[str, Any]:
    fields = {name: {"type": "string", "description": text} for name, text in _FIELDS.items()}
    error = _object(["error"], error=_object(["problem"], **fields))
    events = "Server-sent events: `status` with the changed parts of the status, `metrics` with new points"
    runs = {"type": "array", "items": {"type": "object"}}
    paths = {
        "/api/runs": _get("list_runs", "All runs, each in a few words", _JSON, runs),
        f"{_RUN}/events": _get("events", events, "text/event-stream"),
        "/metrics": _get("prometheus", "All runs, in the text format of Prometheus", "text/plain"),
        "/healthz": _get("health", "Whether the server answers", "text/plain"),
    }
    paths[f"{_RUN}/events"]["get"]["parameters"] = [_parameter("run", "path", "The name of a run")]
    for row in rows:
        paths.setdefault(_RUN + row.path, {})[row.method.lower()] = _operation(row)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "replicast",
            "version": __version__,
            "description": "See a job and steer it. Reading from this machine is free; every action, and "
            "reading from elsewhere, needs the token of `replicast serve`.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": error},
            "responses": {
                str(code): _answer({"$ref": "#/components/schemas/Error"}, text)
                for code, text in _ERRORS.items()
            },
        },
    }


def _operation(row: RunOperation) -> dict[str, Any]:
    if row.proposes:
        told = "With dry_run: what it would do, and all that is wrong with it"
        answers = {"200": _answer(_object(["edits", "problems"]), told)}
        answers["201"] = _answer(_object(["id"]), "It was handed to the job")
    else:
        answers = {"200": _answer(_object(_required(row)))}
    if row.name == "pull":
        answers["200"]["content"] |= _FILE
    # It refers to no other.
    (fields,) = copy.deepcopy(msgspec.json.schema_components([row.fields])[1]).values()
    parameters = [_parameter("run", "path", "The name of a run, as /api/runs lists it")]
    for name in row.in_path:
        schema = msgspec.json.schema(Rank) if name == "worker" else _STRING
        parameters.append(_parameter(name, "path", row.parameters[name].help, schema))
    if row.method == "GET" or row.takes_file:
        for name, schema in fields["properties"].items():
            told = row.parameters[name].help if name in row.parameters else ""
            parameters.append(_parameter(name, "query", told, _without_null(schema)))
    described = {
        "operationId": row.name,
        "summary": row.summary,
        "parameters": parameters,
        "responses": answers | _REFUSED,
        "security": _TOKEN if row.method == "POST" or row.stops_workers else _FREE,
    }
    if row.takes_file:
        described["requestBody"] = {"required": True, "content": _FILE}
    elif row.method == "POST" and fields["properties"]:
        described["requestBody"] = {"content": {_JSON: {"schema": fields}}}
    return described


def _required(row: RunOperation) -> list[str]:
    if row.key:
        return [row.key]
    if row.returns is Schema:
        return ["variables", "hints"]
    names = getattr(row.returns, "__struct_fields__", None) or row.returns.__dataclass_fields__
    return [name for name in names if name not in _NOT_IN_JSON]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    found: dict[str, Any] = kinds[0] if kinds else schema
    if None in found.get("enum", ()):
        found["enum"] = [one for one in found["enum"] if one is not None]
    return found


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required} | ({"properties": properties} if properties else {})


def _answer(schema: dict[str, Any], text: str = "The answer", media: str = _JSON) -> dict[str, Any]:
    return {"description": text, "content": {media: {"schema": schema}}}


def _parameter(name: str, place: str, text: str, schema: dict[str, Any] = _STRING) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": schema}


def _get(name: str, summary: str, media: str, schema: dict[str, Any] = _STRING) -> dict[str, Any]:
    """What answers in something else than JSON, or is not about one run."""
    answers = {"200": _answer(schema, media=media), **_REFUSED}
    return {"get": {"operationId": name, "summary": summary, "responses": answers, "security": _FREE}}
