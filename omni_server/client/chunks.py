"""The chunks of a streamed answer as JSON: the fields that are read here, with their types; others are skipped."""

from pydantic import BaseModel, ValidationError


class ErrorObject(BaseModel):
    message: str


class AudioDelta(BaseModel):
    id: str | None = None
    """By which later requests may refer to this answer; sent once."""
    expires_at: int | None = None
    """Unix time until which they may; sent once."""
    transcript: str | None = None
    data: str | None = None
    """Base64."""


class MessageDelta(BaseModel):
    content: str | None = None
    audio: AudioDelta | None = None


class Choice(BaseModel):
    delta: MessageDelta
    finish_reason: str | None = None


class CompletionTokensDetails(BaseModel):
    text_tokens: int | None = None
    audio_tokens: int | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Chunk(BaseModel):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorObject | str | None = None
    modality: str | None = None
    """vLLM-Omni's: "text" or "audio", of `delta.content`."""


class ErrorBody(BaseModel):
    """Of an answer whose status is not 200."""

    error: ErrorObject


def error_message(body: bytes) -> str:
    """Of an answer whose status is not 200: its message, or its first 200 bytes where it has none."""
    try:
        return ErrorBody.model_validate_json(body).error.message
    except ValidationError:
        return body[:200].decode(errors="replace")
