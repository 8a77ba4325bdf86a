"""Bodies and events of `POST /v1/audio/speech`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.schemas import Seed, StageSamplings, Voice

MAX_CHARACTERS = 4096
"""Of `input` and of `instructions`; OpenAI's limits. These, and the formats, are checked in
`omni_server.api.parse_speech`."""
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")


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
    response_format: Annotated[str, Field(json_schema_extra={"enum": [*SPEECH_FORMATS, "pcm16"]})] | None = None
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
    """Tokens of the model's prompts, which hold the text and the request to read it."""
    output_tokens: int
    """Codec tokens of the speech."""
    total_tokens: int


class SpeechAudioDone(BaseModel):
    type: Literal["speech.audio.done"]
    usage: SpeechUsage
