"""Bodies and events of `POST /v1/audio/speech`, `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from omni_server.api.schemas import NonEmpty, Seed, StageSamplings, Voice

MAX_CHARACTERS = 4096
"""Of `input` and of `instructions`; OpenAI's limits. These, and the formats, are
checked in `omni_server.api.speech`."""
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")

TEXT_FORMATS = ("json", "text", "verbose_json")
LANGUAGE_PATTERN = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$"
BOOLEAN_PATTERN = (
    "^([Tt]([Rr][Uu][Ee])?|[Ff]([Aa][Ll][Ss][Ee])?|[Yy]([Ee][Ss])?|[Nn][Oo]?|[Oo]([Nn]|[Ff][Ff])|[01])$"
)
"""What pydantic takes as a boolean: true, t, yes, y, on and 1, or false, f, no, n, off and 0, in any case."""
LIST_FIELDS = ("timestamp_granularities", "include")
"""Forms have `[]` behind these names, or not. They and the formats are checked in
`omni_server.api.transcription_form`."""


class SpeechRequest(BaseModel):
    """Fields that are not listed are accepted and ignored, as clients send many."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    model: str
    input: Annotated[str, Field(json_schema_extra={"maxLength": MAX_CHARACTERS, "pattern": r"\S"})]
    """The text to read; not only white space."""
    voice: Voice | None = None
    """A voice of the model or one of OpenAI's names; without one, the model's default voice."""
    instructions: Annotated[str, Field(json_schema_extra={"maxLength": MAX_CHARACTERS})] | None = None
    """How to read it. "None" and the empty string count as absent: Home Assistant sends the former."""
    response_format: Annotated[str, Field(json_schema_extra={"enum": [*SPEECH_FORMATS, "pcm16"]})] | None = (
        None
    )
    """`mp3` is the default; `pcm`, also called `pcm16`, is 24 kHz, mono, 16 bit, little-endian."""
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    """How many times as fast as the model speaks, at the same pitch; 1 is the default."""
    stream_format: Literal["audio", "sse"] | None = None
    seed: Seed | None = None
    """Extension: makes the speech repeatable."""
    stage_sampling: StageSamplings | None = None
    """Extension: sampling of the stage that samples codec tokens, by its name, as `{"talker": {...}}`."""


class SpeechAudioDelta(BaseModel):
    type: Literal["speech.audio.delta"]
    audio: str
    """Base64 of the next bytes of the file."""


class SpeechUsage(BaseModel):
    input_tokens: int
    """Tokens of the model's prompts, which contain the text and the request to read it."""
    output_tokens: int
    """Codec tokens of the speech."""
    total_tokens: int


class SpeechAudioDone(BaseModel):
    type: Literal["speech.audio.done"]
    usage: SpeechUsage


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
    """Without `segments` and `words`: the model gives no timestamps, and the server does not invent any."""

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
