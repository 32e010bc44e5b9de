"""The control API as an OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any

from dynamo_local.control.errors import KINDS
from dynamo_local.control.operations import OPERATIONS, Operation

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "integer"},
                "cause": {"type": "string"},
                "remedy": {"type": ["string", "null"]},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(version: str) -> dict[str, Any]:
    """Return the document. `version`: of the server."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynamo-local control API", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }


def _described(operation: Operation) -> dict[str, Any]:
    named = [_parameter(name, "path", "", required=True) for name in operation.names]
    queried = [_parameter(name, "query", what, required=False) for name, what in operation.query.items()]
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.does,
        "parameters": [*named, *queried],
        "responses": {
            str(operation.status): {"description": "It is so.", "content": {"application/json": {}}},
            **{str(status): _error(kind) for status, kind in KINDS.items()},
        },
    }
    if operation.takes:
        fields = {name: {"description": what} for name, what in operation.takes.items()}
        schema = {"type": "object", "properties": fields}
        found["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return found


def _parameter(name: str, place: str, what: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "description": what, "schema": {"type": "string"}}


def _error(kind: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": kind, "content": {"application/json": {"schema": schema}}}
