"""The form of a transcription request: the rules between fields, and those of the model."""

import re
from dataclasses import dataclass

from omni_server.api.form import Form
from omni_server.api.parse import check_model
from omni_server.api.transcription_schemas import (
    LANGUAGE_PATTERN,
    LIST_FIELDS,
    TEXT_FORMATS,
    TextFormat,
    TranscriptionForm,
)
from omni_server.api.validation import validate
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo

_WHY_NOT = {
    "srt": "the model gives no timestamps",
    "vtt": "the model gives no timestamps",
    "diarized_json": "the model does not tell speakers apart",
}
_LANGUAGE = re.compile(LANGUAGE_PATTERN)


@dataclass(frozen=True)
class TranscriptionJob:
    """What to listen to, and how to answer."""

    file: bytes
    to_english: bool
    language: str | None
    hint: str | None
    temperature: float
    text_format: TextFormat
    stream: bool


def parse_transcription_form(form: Form, model: ModelInfo, *, to_english: bool) -> TranscriptionJob:
    """`to_english` is what makes a translation. Raises `InvalidRequestError` or `ModelNotFoundError`."""
    body = validate(TranscriptionForm, _body(form))
    check_model(body.model, model)
    if "audio" not in model.input_modalities:
        raise InvalidRequestError("This model does not take audio input.", param="model", code="unsupported_value")
    text_format = _text_format(body.response_format)
    stream = body.stream is True
    if stream and to_english:
        raise InvalidRequestError(
            "'stream' is not supported for translations.", param="stream", code="unsupported_value"
        )
    if stream and text_format == "verbose_json":
        raise InvalidRequestError(
            "'stream' is allowed only with the response formats 'json' and 'text'.", param="stream"
        )
    _check_timestamps(body.timestamp_granularities, text_format)
    if body.include:
        raise InvalidRequestError("'include' is not supported.", param="include[]", code="unsupported_value")
    return TranscriptionJob(
        file=_file(form),
        to_english=to_english,
        language=None if body.language is None else _language(body.language),
        hint=body.prompt,
        temperature=body.temperature if body.temperature is not None else 0.0,
        text_format=text_format,
        stream=stream,
    )


def _body(form: Form) -> dict[str, str | list[str]]:
    """The last value of each field, all of a list. Empty optional fields, as forms have them, count as absent."""
    body: dict[str, str | list[str]] = {}
    for given, values in form.fields.items():
        name = given.removesuffix("[]")
        if name in LIST_FIELDS:
            body[name] = [value for value in values if value]
        elif values[-1] or name == "model":
            body[name] = values[-1]
    return body


def _file(form: Form) -> bytes:
    if form.file is None and "file" in form.fields:
        raise InvalidRequestError(
            "Invalid type for 'file': expected a file, but got a string instead.", param="file", code="invalid_type"
        )
    if form.file is None:
        raise InvalidRequestError(
            "Missing required parameter: 'file'.", param="file", code="missing_required_parameter"
        )
    return form.file


def _text_format(name: str | None) -> TextFormat:
    if name is None:
        return "json"
    for text_format in TEXT_FORMATS:
        if text_format == name:
            return text_format
    reason = f" ({_WHY_NOT[name]})" if name in _WHY_NOT else ""
    values = ", ".join(f"'{value}'" for value in TEXT_FORMATS)
    raise InvalidRequestError(
        f"Unsupported value: 'response_format' does not support '{name[:64]}'{reason}. Supported values are: {values}.",
        param="response_format",
        code="unsupported_value",
    )


def _check_timestamps(granularities: list[str] | None, text_format: TextFormat) -> None:
    if not granularities:
        return
    if text_format != "verbose_json":
        raise InvalidRequestError(
            "'timestamp_granularities' is allowed only with the response format 'verbose_json'.",
            param="timestamp_granularities[]",
        )
    raise InvalidRequestError(
        "'timestamp_granularities' is not supported: the model gives no timestamps.",
        param="timestamp_granularities[]",
        code="unsupported_value",
    )


def _language(code: str) -> str:
    if _LANGUAGE.fullmatch(code) is None:
        raise InvalidRequestError(
            f"Invalid language '{code[:64]}'. Language parameter must be specified in ISO-639-1 format.",
            param="language",
        )
    return code.partition("-")[0].lower()
