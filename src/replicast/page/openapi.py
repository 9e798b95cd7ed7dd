"""The description of the API, made from the table of endpoints."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from replicast import __version__
from replicast.page.endpoints import ENDPOINTS, Endpoint
from replicast.page.requests import MAX_RANK, Nothing

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
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_PARTS = {
    "run": ("The name of a run, as /api/runs lists it", {"type": "string"}),
    "update": ("The number of an update, its id, or the beginning of its id", {"type": "string"}),
    "worker": ("The rank of a worker", {"type": "integer", "minimum": 0, "maximum": MAX_RANK}),
    "variable": ("The name of a variable; any unique suffix works", {"type": "string"}),
}


def description() -> dict[str, Any]:
    """The document at /openapi.json."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    paths |= _others()
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


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    answer = (
        {"type": "array", "items": {"type": "object"}}
        if endpoint.returns is None
        else {"type": "object", "required": list(endpoint.returns)}
    )
    responses: dict[str, Any] = {str(endpoint.status): _json(answer, "The answer")}
    if endpoint.sends_files:
        responses["200"]["content"] |= _FILE
    if endpoint.status == 201:
        responses["201"] = _json({"type": "object", "required": ["id"]}, "It was handed to the job")
        examined = {"type": "object", "required": ["edits", "problems"]}
        responses["200"] = _json(examined, "With dry_run: what it would do, and all that is wrong with it")
    responses |= {str(code): {"$ref": f"#/components/responses/{code}"} for code in _ERRORS}
    described: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint)],
        "responses": responses,
        "security": [{"token": []}]
        if endpoint.method == "POST" or endpoint.asks_the_job
        else [{}, {"token": []}],
    }
    if endpoint.body == "file":
        described["requestBody"] = {"required": True, "content": _FILE}
    elif endpoint.body is not Nothing:
        content = {"application/json": {"schema": _inlined(endpoint.body)}}
        described["requestBody"] = {"content": content}
    return described


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "description": text, "schema": schema}
        for name, (text, schema) in _PARTS.items()
        if f"{{{name}}}" in endpoint.path
    ]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    described = _inlined(endpoint.query)
    return [
        {
            "name": name,
            "in": "query",
            "required": name in described.get("required", ()),
            "schema": _without_null(schema),
        }
        for name, schema in described.get("properties", {}).items()
    ]


def _inlined(kind: type[msgspec.Struct] | str) -> dict[str, Any]:
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
    run = {"name": "run", "in": "path", "required": True, "schema": {"type": "string"}}
    errors = {
        str(code): {"$ref": f"#/components/responses/{code}"} for code in (401, 404, 421, 429, 500, 503)
    }

    def get(name: str, summary: str, media: str, **more: Any) -> dict[str, Any]:
        answer = {"description": "The answer", "content": {media: {"schema": {"type": "string"}}}}
        described = {"operationId": name, "summary": summary, "responses": {"200": answer, **errors}}
        return {"get": described | {"security": [{}, {"token": []}]} | more}

    summary = "Server-sent events: `status` with the changed parts of the status, `metrics` with new points"
    return {
        "/api/runs/{run}/events": get("events", summary, "text/event-stream", parameters=[run]),
        "/metrics": get("prometheus", "All runs, in the text format of Prometheus", "text/plain"),
        "/healthz": get("health", "Whether the server answers", "text/plain"),
    }
