"""What `/openapi.json` says beyond what FastAPI finds out by itself."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from omni_server.api.responses import ChatCompletion, ChatCompletionChunk, ErrorEnvelope
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.speech_schemas import SpeechAudioDelta, SpeechAudioDone, SpeechRequest
from omni_server.api.transcription_schemas import (
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
)
from omni_server.audio.formats import MEDIA_TYPES

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    ChatCompletionChunk,
    SpeechRequest,
    SpeechAudioDelta,
    SpeechAudioDone,
    Transcription,
    VerboseTranscription,
    TranscriptDelta,
    TranscriptDone,
)

OpenApi = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "No such model, or no such URL.",
    405: "The URL does not take this method.",
    413: "The request is too large.",
    500: "The request failed inside the server.",
    503: "Still starting, overloaded or shutting down; `Retry-After` says when to try again.",
    504: "The request took longer than the server allows.",
}


def error_responses(*statuses: int) -> OpenApi:
    """The given statuses, and any other failure, with the error envelope as their body."""
    declared: OpenApi = {status: {"model": ErrorEnvelope, "description": _ERRORS[status]} for status in statuses}
    return declared | {"default": {"model": ErrorEnvelope, "description": "Any other failure."}}


CHAT_RESPONSES: OpenApi = {
    200: {
        "model": ChatCompletion,
        "description": "The answer; with `stream: true` as server-sent events, the last of which is `[DONE]`.",
        "content": {"text/event-stream": {"schema": {"$ref": _REF.format(model=ChatCompletionChunk.__name__)}}},
    },
    **error_responses(400, 404, 405, 413, 500, 503, 504),
}


def _any_of(*schemas: type[BaseModel]) -> dict[str, Any]:
    return {"anyOf": [{"$ref": _REF.format(model=schema.__name__)} for schema in schemas]}


SPEECH_RESPONSES: OpenApi = {
    200: {
        "description": "The file, sent while it is made where its format allows; or, with `stream_format: sse`, its "
        "bytes as server-sent events, the last of which is `speech.audio.done`.",
        "content": {
            media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in MEDIA_TYPES.values()
        }
        | {"text/event-stream": {"schema": _any_of(SpeechAudioDelta, SpeechAudioDone)}},
    },
    **error_responses(400, 404, 405, 413, 500, 503, 504),
}

_TRANSCRIPTION_BODIES: dict[str, dict[str, Any]] = {
    "application/json": {"schema": _any_of(Transcription, VerboseTranscription)},
    "text/plain": {"schema": {"type": "string"}},
}
_TRANSCRIPTION_ERRORS = error_responses(400, 404, 405, 413, 500, 503, 504)

TRANSLATION_RESPONSES: OpenApi = {
    200: {"description": "The text.", "content": _TRANSCRIPTION_BODIES},
    **_TRANSCRIPTION_ERRORS,
}
TRANSCRIPTION_RESPONSES: OpenApi = {
    200: {
        "description": "The text; with `stream=true` as server-sent events, the last of which is "
        "`transcript.text.done`.",
        "content": _TRANSCRIPTION_BODIES | {"text/event-stream": {"schema": _any_of(TranscriptDelta, TranscriptDone)}},
    },
    **_TRANSCRIPTION_ERRORS,
}


def form_body(fields: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a form with a file itself."""
    schema = fields.model_json_schema()
    schema["properties"]["file"] = {"type": "string", "format": "binary"}
    schema["required"] = [*schema["required"], "file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def request_body(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself. `schema` must be one of `_BODIES`."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def install_openapi(app: FastAPI) -> None:
    """Adds the schemas that only `$ref`s mention to the document that FastAPI makes."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas = generate().setdefault("components", {}).setdefault("schemas", {})
            for body in _BODIES:
                schema = body.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.__name__] = schema
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
