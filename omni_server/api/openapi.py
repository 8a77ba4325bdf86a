"""Extends the `/openapi.json` that FastAPI generates."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from omni_server.api.errors import ErrorEnvelope

_REF = "#/components/schemas/{model}"
_mentioned: dict[str, type[BaseModel]] = {}
"""Schemas that only `$ref`s mention, by name."""

OpenApi = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The request has no API key, or one that the server does not know.",
    403: "Another web site asks, or the `Host` is not a name of the server.",
    404: "No such model, or no such URL.",
    405: "The URL does not take this method.",
    408: "The body took too long to arrive.",
    413: "The request is too large.",
    429: "The API key is at its limit of requests at a time.",
    500: "The request failed inside the server.",
    503: "Still starting, overloaded or shutting down; `Retry-After` says when to try again.",
    504: "The request took longer than the server allows.",
}
_OF_EVERY_OPERATION = (405, 413, 500)

_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The request's own `X-Request-Id` if it was well-formed, else a new one.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    "Allow": {
        "description": "The methods that the URL takes.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"required": True, "schema": {"type": "string"}},
    "X-Should-Retry": {
        "description": "OpenAI's clients would send the request again by themselves.",
        "required": True,
        "schema": {"const": "false"},
    },
    "X-Audio-Sample-Rate": {"description": "Hz, of the audio in the file.", "schema": {"type": "integer"}},
    "X-Audio-Channels": {"schema": {"type": "integer"}},
}
_HEADERS_OF_STATUS: dict[str, tuple[str, ...]] = {
    "401": ("WWW-Authenticate",),
    "405": ("Allow",),
    "429": ("Retry-After",),
    "500": ("X-Should-Retry",),
    "503": ("Retry-After",),
    "504": ("X-Should-Retry",),
}

_API_KEY = "ApiKey"


def error_responses(*statuses: int) -> OpenApi:
    """The given statuses with the error envelope as their body; `install_openapi` adds the
    common ones."""
    return {status: {"model": ErrorEnvelope, "description": _ERRORS[status]} for status in statuses}


GENERATION_ERRORS = error_responses(400, 404, 408, 429, 503, 504)


def _ref(schema: type[BaseModel]) -> dict[str, Any]:
    _mentioned[schema.__name__] = schema
    return {"$ref": _REF.format(model=schema.__name__)}


def any_of(*schemas: type[BaseModel]) -> dict[str, Any]:
    return {"anyOf": [_ref(schema) for schema in schemas]}


def event_stream(*schemas: type[BaseModel], last: str | None = None) -> dict[str, Any]:
    """Describes a stream of server-sent events, each with one of `schemas`. A failed stream ends with
    an error."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": any_of(*schemas, ErrorEnvelope),
    }
    if last is not None:
        data = {"anyOf": [{"const": last}, data]}
    return {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}


EXAMPLE_MODEL = "Qwen/Qwen2.5-Omni-7B"


def request_body(schema: type[BaseModel], examples: dict[str, dict[str, object]]) -> dict[str, Any]:
    """`openapi_extra` for a route that parses its own body."""
    shown = {name: {"value": value} for name, value in examples.items()}
    content = {"schema": _ref(schema), "examples": shown}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def install_openapi(app: FastAPI, *, needs_key: Callable[[str, str], bool] | None) -> None:
    """Adds the schemas that only `$ref`s mention and the middlewares' responses to FastAPI's document.

    `needs_key` reports whether a path and method need a key; None if the server has no keys and thus
    refuses requests from other web sites."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for of_422 in ("HTTPValidationError", "ValidationError"):
                schemas.pop(of_422, None)
            for name, body in _mentioned.items():
                schema = body.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[name] = schema
            components["headers"] = _HEADERS
            if needs_key is not None:
                components["securitySchemes"] = {_API_KEY: {"type": "http", "scheme": "bearer"}}
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    statuses = [*_OF_EVERY_OPERATION, *([403] if needs_key is None else [])]
                    if needs_key is not None and needs_key(path, method.upper()):
                        operation["security"] = [{_API_KEY: []}]
                        statuses.append(401)
                    _complete(operation["responses"], statuses)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(responses: dict[str, Any], statuses: list[int]) -> None:
    """Adds the error `statuses` and each response's headers."""
    responses.pop("422", None)  # FastAPI's, for parameters: ours are strings, which are always valid
    envelope = {"application/json": {"schema": _ref(ErrorEnvelope)}}
    for status in statuses:
        responses.setdefault(str(status), {"description": _ERRORS[status], "content": envelope})
    for status_text, response in responses.items():
        headers = response.setdefault("headers", {})
        for name in ("X-Request-Id", *_HEADERS_OF_STATUS.get(status_text, ())):
            headers[name] = {"$ref": f"#/components/headers/{name}"}
