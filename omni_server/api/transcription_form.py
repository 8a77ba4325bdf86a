"""The form of a transcription request: reads it within bounds, in memory only, then checks each field."""

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser

from omni_server.api.parse import check_model
from omni_server.api.schemas import NonEmpty
from omni_server.api.validation import missing_parameter, unsupported, unsupported_choice, validate
from omni_server.errors import InvalidRequestError, RequestTooLargeError
from omni_server.types import ModelInfo

_MAX_FIELDS = 100
_MAX_FIELD_BYTES = 64 * 1024
_MAX_OTHER_BYTES = 1024 * 1024
"""For everything but the file."""
_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})
"""UTF-8 and the names that clients give ASCII-only forms."""

TEXT_FORMATS = ("json", "text", "verbose_json")
LANGUAGE_PATTERN = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$"
BOOLEAN_PATTERN = (
    "^([Tt]([Rr][Uu][Ee])?|[Ff]([Aa][Ll][Ss][Ee])?|[Yy]([Ee][Ss])?|[Nn][Oo]?|[Oo]([Nn]|[Ff][Ff])|[01])$"
)
"""Pydantic's booleans: true, t, yes, y, on and 1, or false, f, no, n, off and 0, in any case."""
LIST_FIELDS = ("timestamp_granularities", "include")
"""Forms may append `[]` to these names."""

_WHY_NOT = {
    "srt": "the model gives no timestamps",
    "vtt": "the model gives no timestamps",
    "diarized_json": "the model does not tell speakers apart",
}
_LANGUAGE = re.compile(LANGUAGE_PATTERN)


class TranscriptionForm(BaseModel):
    """The form's fields beside `file`. They come as strings, so that "true" is a boolean and "0.2" a number;
    those that are not listed are ignored, as clients send many."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    model: NonEmpty
    language: Annotated[str, Field(json_schema_extra={"pattern": LANGUAGE_PATTERN})] | None = None
    """ISO 639-1 code of the language that is spoken, if it is known. Transcriptions only."""
    prompt: Annotated[str, Field(max_length=4096)] | None = None
    """Words that may occur, or the text before."""
    response_format: Annotated[str, Field(json_schema_extra={"enum": [*TEXT_FORMATS]})] | None = None
    """`json` is the default."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 (default) takes the likeliest words."""
    stream: Annotated[bool, WithJsonSchema({"type": "string", "pattern": BOOLEAN_PATTERN})] | None = None
    """Transcriptions only; translations refuse `true`."""
    timestamp_granularities: Annotated[list[str], Field(json_schema_extra={"maxItems": 0})] | None = None
    """Not served: the model gives no timestamps."""
    include: Annotated[list[str], Field(json_schema_extra={"maxItems": 0})] | None = None
    """Not served."""


@dataclass(frozen=True)
class Form:
    fields: dict[str, list[str]]
    """All values of each name, in order."""
    file: bytes | None
    """The content of the part "file", if that part has a file name."""


async def read_form(request: Request, max_file_bytes: int) -> Form:
    """Raises `InvalidRequestError` for an invalid form,
    `RequestTooLargeError`, or `ClientDisconnect`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidRequestError(
            "Unsupported media type: only 'Content-Type: multipart/form-data' is accepted.",
            code="invalid_content_type",
        )
    _check_charset(request)
    stream = _bounded(request, max_file_bytes)
    parser = MultiPartParser(
        request.headers, stream, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    parser.spool_max_size = max_file_bytes + _MAX_OTHER_BYTES  # never write speech to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"The form cannot be read: {error.message}", code="invalid_form") from None
    try:
        fields: dict[str, list[str]] = {}
        file: bytes | None = None
        for name, value in form.multi_items():
            if isinstance(value, str):
                fields.setdefault(name, []).append(value)
            elif name == "file":
                file = await value.read()
        if file is not None and len(file) > max_file_bytes:
            raise _too_large(max_file_bytes)
        return Form(fields, file)
    finally:
        await form.close()


def _check_charset(request: Request) -> None:
    """Accepts only UTF-8 and names for ASCII. Starlette decodes with any Python codec that the client
    names: some raise unexpected errors, others take quadratic time. RFC 7578 has no such parameter, and
    forms are UTF-8."""
    _, parameters = parse_options_header(request.headers["content-type"])
    if parameters.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise InvalidRequestError("The form cannot be read: its charset must be UTF-8.", code="invalid_form")


async def _bounded(request: Request, max_file_bytes: int) -> AsyncGenerator[bytes, None]:
    limit = max_file_bytes + _MAX_OTHER_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(max_file_bytes)
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _too_large(max_file_bytes)
        yield chunk


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"Maximum file size exceeded: this server accepts {max_bytes} bytes.",
        param="file",
        code="file_too_large",
    )


def parse_transcription_form(
    form: Form, model: ModelInfo, *, to_english: bool
) -> tuple[TranscriptionForm, bytes]:
    """Returns the checked fields and the file. `to_english` means a translation. Raises
    `InvalidRequestError` or `ModelNotFoundError`."""
    body = validate(TranscriptionForm, _body(form))
    check_model(body.model, model)
    if "audio" not in model.input_modalities:
        raise unsupported("This model does not take audio input.", "model")
    text_format = body.response_format
    if text_format is not None and text_format not in TEXT_FORMATS:
        reason = f" ({_WHY_NOT[text_format]})" if text_format in _WHY_NOT else ""
        raise unsupported_choice("response_format", text_format, TEXT_FORMATS, reason)
    if body.stream and to_english:
        raise unsupported("'stream' is not supported for translations.", "stream")
    if body.stream and text_format == "verbose_json":
        raise InvalidRequestError(
            "'stream' is allowed only with the response formats 'json' and 'text'.", param="stream"
        )
    if body.timestamp_granularities and text_format != "verbose_json":
        raise InvalidRequestError(
            "'timestamp_granularities' is allowed only with the response format 'verbose_json'.",
            param="timestamp_granularities[]",
        )
    if body.timestamp_granularities:
        raise unsupported(
            "'timestamp_granularities' is not supported: the model gives no timestamps.",
            "timestamp_granularities[]",
        )
    if body.include:
        raise unsupported("'include' is not supported.", "include[]")
    if form.file is None and "file" in form.fields:
        raise InvalidRequestError(
            "Invalid type for 'file': expected a file, but got a string instead.",
            param="file",
            code="invalid_type",
        )
    if form.file is None:
        raise missing_parameter("file")
    if body.language is not None:
        if _LANGUAGE.fullmatch(body.language) is None:
            raise InvalidRequestError(
                f"Invalid language '{body.language[:64]}'. "
                "Language parameter must be specified in ISO-639-1 format.",
                param="language",
            )
        body.language = body.language.partition("-")[0].lower()
    return body, form.file


def _body(form: Form) -> dict[str, str | list[str]]:
    """The last value of each field, or all values of a list. Empty optional fields count as
    absent."""
    body: dict[str, str | list[str]] = {}
    for given, values in form.fields.items():
        name = given.removesuffix("[]")
        if name in LIST_FIELDS:
            body[name] = [value for value in values if value]
        elif values[-1] or name == "model":
            body[name] = values[-1]
    return body


def form_body() -> dict[str, Any]:
    """`openapi_extra` of a route that reads the form."""
    schema = TranscriptionForm.model_json_schema()
    properties = {
        name + "[]" if name in LIST_FIELDS else name: _form_field(field)
        for name, field in schema["properties"].items()
    }
    schema["properties"] = properties | {"file": {"type": "string", "format": "binary"}}
    schema["required"] = [*schema["required"], "file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _form_field(field: dict[str, Any]) -> dict[str, Any]:
    """Replaces null: unset form fields are empty or absent."""
    described = {key: value for key, value in field.items() if key != "default"}
    if "anyOf" in field:
        described["anyOf"] = [
            {"const": ""} if branch == {"type": "null"} else branch for branch in field["anyOf"]
        ]
    return described
