"""Fields, bodies and events of `POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

TextFormat = Literal["json", "text", "verbose_json"]
TEXT_FORMATS: tuple[TextFormat, ...] = ("json", "text", "verbose_json")
LANGUAGE_PATTERN = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$"
BOOLEAN_PATTERN = "^([Tt]([Rr][Uu][Ee])?|[Ff]([Aa][Ll][Ss][Ee])?|[Yy]([Ee][Ss])?|[Nn][Oo]?|[Oo]([Nn]|[Ff][Ff])|[01])$"
"""What pydantic takes for a boolean: true, t, yes, y, on and 1, or false, f, no, n, off and 0, in any case."""
LIST_FIELDS = ("timestamp_granularities", "include")
"""Forms have `[]` behind these names, or not. They and the formats are checked in
`omni_server.api.parse_transcription`."""

NonEmpty = Annotated[str, Field(min_length=1)]


class TranscriptionForm(BaseModel):
    """The form's fields beside `file`. They come as strings, so that "true" is a boolean and "0.2" a number; those
    that are not listed are ignored, as clients send many."""

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


class InputTokenDetails(BaseModel):
    text_tokens: int
    audio_tokens: int


class TokenUsage(BaseModel):
    type: Literal["tokens"]
    input_tokens: int
    input_token_details: InputTokenDetails
    output_tokens: int
    total_tokens: int


class DurationUsage(BaseModel):
    type: Literal["duration"]
    seconds: float


class Transcription(BaseModel):
    text: str
    usage: TokenUsage


class VerboseTranscription(BaseModel):
    """Without `segments` and `words`: the model gives no timestamps, and none are made up."""

    task: Literal["transcribe", "translate"]
    language: str
    """Of `text`. "und", undetermined, where the request does not say: the model does not tell."""
    duration: float
    """Seconds."""
    text: str
    usage: DurationUsage


class TranscriptDelta(BaseModel):
    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptDone(BaseModel):
    type: Literal["transcript.text.done"]
    text: str
    usage: TokenUsage
