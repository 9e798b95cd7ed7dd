"""The description of the API, made from the table of operations (client/run.py)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec

from replicast import __version__
from replicast.client.run import MAX_RANK, Operation

_ERRORS = {
    400: "A parameter or the body is not valid",
    401: "The token is missing or wrong",
    403: "Actions are off, or the request comes from a page of another site",
    404: "There is no such run, update, variable or log",
    408: "The body did not arrive in time",
    409: "The run is not in a state in which this can be done, or another update has this id",
    413: "The body is too large",
    421: "The server is not known under this name",
    422: "The update is refused: the error says why",
    429: "Too many actions, or too many wrong tokens",
    500: "A defect of the server",
    503: "The run directory cannot be read or written, or there are too many streams",
    504: "The job is not running, or did not answer in time",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["problem"],
            "properties": {
                "type": {"type": "string", "description": "The class of the error in Python, if it has one"},
                "problem": {"type": "string", "description": "What is wrong, in one sentence"},
                "variable": {"type": "string"},
                "worker": {"type": "integer"},
                "expected": {"type": "string", "description": "What would have been accepted"},
                "received": {"type": "string", "description": "What was found instead"},
                "remedy": {"type": "string", "description": "What to do about it"},
            },
        }
    },
}
_RUN = {
    "name": "run",
    "in": "path",
    "required": True,
    "description": "The name of a run, as /api/runs lists it",
    "schema": {"type": "string"},
}
_NOT_IN_JSON = ("array", "details", "path")
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def description(rows: Iterable[Operation]) -> dict[str, Any]:
    """The document at /openapi.json."""
    paths = _others()
    for row in rows:
        paths.setdefault(f"/api/runs/{{run}}{row.path}", {})[row.method.lower()] = _operation(row)
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
            "schemas": {"Error": _ERROR},
            "responses": {str(code): _error_response(text) for code, text in _ERRORS.items()},
        },
    }


def _operation(row: Operation) -> dict[str, Any]:
    if row.proposes:
        responses = {
            "201": _json({"type": "object", "required": ["id"]}, "It was handed to the job"),
            "200": _json(
                {"type": "object", "required": ["edits", "problems"]},
                "With dry_run: what it would do, and all that is wrong with it",
            ),
        }
    else:
        responses = {"200": _json({"type": "object", "required": _required(row)}, "The answer")}
    if row.name == "pull":
        responses["200"]["content"] |= _FILE
    fields = _inlined(row.fields)
    query = fields if row.method == "GET" or row.takes_file else {}
    described: dict[str, Any] = {
        "operationId": row.name,
        "summary": row.summary,
        "parameters": [_RUN, *_path_parameters(row), *_query_parameters(row, query)],
        "responses": responses | {str(code): {"$ref": f"#/components/responses/{code}"} for code in _ERRORS},
        "security": [{"token": []}] if row.method == "POST" or row.stops_workers else [{}, {"token": []}],
    }
    if row.takes_file:
        described["requestBody"] = {"required": True, "content": _FILE}
    elif row.method == "POST" and fields["properties"]:
        described["requestBody"] = {"content": {"application/json": {"schema": fields}}}
    return described


def _required(row: Operation) -> list[str]:
    """The names that every answer has."""
    if row.key:
        return [row.key]
    is_struct = issubclass(row.returns, msgspec.Struct)
    fields = msgspec.structs.fields(row.returns) if is_struct else dataclasses.fields(row.returns)
    return [one.name for one in fields if one.name not in _NOT_IN_JSON]


def _path_parameters(row: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": row.parameters[name].help,
            "schema": {"type": "integer", "minimum": 0, "maximum": MAX_RANK}
            if name == "worker"
            else {"type": "string"},
        }
        for name in row.in_path
    ]


def _query_parameters(row: Operation, fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": name in fields.get("required", ()),
            "schema": _without_null(schema),
            "description": row.parameters[name].help if name in row.parameters else "",
        }
        for name, schema in fields.get("properties", {}).items()
    ]


def _inlined(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a structure that refers to no other."""
    _, components = msgspec.json.schema_components([kind])
    (schema,) = components.values()
    return copy.deepcopy(schema)


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if not kinds:
        return schema
    found: dict[str, Any] = kinds[0]
    if None in found.get("enum", ()):
        found["enum"] = [one for one in found["enum"] if one is not None]
    return found


def _json(schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _error_response(text: str) -> dict[str, Any]:
    return _json({"$ref": "#/components/schemas/Error"}, text)


def _others() -> dict[str, Any]:
    """What answers in something else than JSON, or is not about one run."""
    errors = {
        str(code): {"$ref": f"#/components/responses/{code}"} for code in (401, 404, 421, 429, 500, 503)
    }

    def get(name: str, summary: str, media: str, **more: Any) -> dict[str, Any]:
        answer = {"description": "The answer", "content": {media: {"schema": {"type": "string"}}}}
        described = {"operationId": name, "summary": summary, "responses": {"200": answer, **errors}}
        return {"get": described | {"security": [{}, {"token": []}]} | more}

    listed = get("list_runs", "All runs, each in a few words", "application/json")
    answer = {"type": "array", "items": {"type": "object"}}
    listed["get"]["responses"]["200"]["content"]["application/json"]["schema"] = answer
    listed["get"]["responses"]["400"] = {"$ref": "#/components/responses/400"}
    summary = "Server-sent events: `status` with the changed parts of the status, `metrics` with new points"
    return {
        "/api/runs": listed,
        "/api/runs/{run}/events": get("events", summary, "text/event-stream", parameters=[_RUN]),
        "/metrics": get("prometheus", "All runs, in the text format of Prometheus", "text/plain"),
        "/healthz": get("health", "Whether the server answers", "text/plain"),
    }
