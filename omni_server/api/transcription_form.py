"""The form of a transcription request: checks each field."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.forms import Form, form_field
from omni_server.api.parse import check_model, check_transcribes
from omni_server.api.schemas import NonEmpty
from omni_server.api.validation import missing_parameter, unsupported, unsupported_choice, validate
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo

TEXT_FORMATS = ("json", "text", "verbose_json")
LANGUAGE_PATTERN = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$"
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
    stream: bool | None = None
    """Transcriptions only; translations refuse `true`."""
    timestamp_granularities: Annotated[list[str], Field(json_schema_extra={"maxItems": 0})] | None = None
    """Not served: the model gives no timestamps."""
    include: Annotated[list[str], Field(json_schema_extra={"maxItems": 0})] | None = None
    """Not served."""


def parse_transcription_form(
    form: Form, model: ModelInfo, *, to_english: bool
) -> tuple[TranscriptionForm, bytes]:
    """Returns the checked fields and the file. `to_english` means a translation. Raises
    `InvalidRequestError` or `ModelNotFoundError`."""
    body = validate(TranscriptionForm, _body(form))
    check_model(body.model, model)
    check_transcribes(model)
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
    if "file" not in form.files and "file" in form.fields:
        raise InvalidRequestError(
            "Invalid type for 'file': expected a file, but got a string instead.",
            param="file",
            code="invalid_type",
        )
    if "file" not in form.files:
        raise missing_parameter("file")
    if body.language is not None:
        if _LANGUAGE.fullmatch(body.language) is None:
            raise InvalidRequestError(
                f"Invalid language '{body.language[:64]}'. "
                "Language parameter must be specified in ISO-639-1 format.",
                param="language",
            )
        body.language = body.language.partition("-")[0].lower()
    return body, form.files["file"][-1]


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
        name + "[]" if name in LIST_FIELDS else name: form_field(field)
        for name, field in schema["properties"].items()
    }
    schema["properties"] = properties | {"file": {"type": "string", "format": "binary"}}
    schema["required"] = [*schema["required"], "file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
