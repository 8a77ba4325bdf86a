"""The events that the server sends, and the objects inside them.

Clients break on unknown event types, so there are no others. The models are our own; the tests check what is
sent against `openai.types.realtime` (3.54). There, `type` and `event_id` have no default, so every sender
would have to set both; a session has neither `id` nor `expires_at`; and nearly every field of a response is
optional.
"""

import uuid
from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from omni_server.api.realtime.items import Item
from omni_server.api.realtime.session_config import MaxOutputTokens, SessionConfig, WireFormat
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import PromptTokens, Usage

ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
Reason = Literal["turn_detected", "client_cancelled", "max_output_tokens"]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


class WirePart(BaseModel):
    """A part in `response.content_part.*`, where the types have other names than in items."""

    type: Literal["audio", "text"]
    text: str | None = None
    transcript: str | None = None


# -- usage and errors


class WireUsage(BaseModel):
    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: dict[str, int]
    output_token_details: dict[str, int]

    @classmethod
    def of(cls, usage: Usage) -> "WireUsage":
        prompt, output_tokens = usage.prompt, usage.text_tokens + usage.codec_tokens
        return cls(
            total_tokens=prompt.total + output_tokens,
            input_tokens=prompt.total,
            output_tokens=output_tokens,
            input_token_details={
                "text_tokens": prompt.text,
                "audio_tokens": prompt.audio,
                "image_tokens": prompt.image,
                "cached_tokens": prompt.cached,
            },
            output_token_details={"text_tokens": usage.text_tokens, "audio_tokens": usage.codec_tokens},
        )


NO_USAGE = WireUsage.of(Usage(PromptTokens(total=0, text=0, audio=0, image=0, video=0), 0, 0))
"""Used for responses that did not complete: their usage is unknown."""


class TranscriptionUsage(BaseModel):
    type: Literal["tokens"] = "tokens"
    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: dict[str, int]

    @classmethod
    def of(cls, usage: Usage) -> "TranscriptionUsage":
        prompt = usage.prompt
        return cls(
            total_tokens=prompt.total + usage.text_tokens,
            input_tokens=prompt.total,
            output_tokens=usage.text_tokens,
            input_token_details={"text_tokens": prompt.text, "audio_tokens": prompt.audio},
        )


class FailureDetails(BaseModel):
    type: str
    code: str | None
    message: str

    @classmethod
    def of(cls, error: OmniError) -> "FailureDetails":
        return cls(type=error.type, code=error.code, message=error.message[:1000])


class StatusDetails(BaseModel):
    """Explains why a response did not complete."""

    type: ResponseStatus
    reason: Reason | None = None
    error: FailureDetails | None = None


class WireError(BaseModel):
    type: Literal["invalid_request_error", "server_error"]
    code: str | None
    message: str
    param: str | None
    event_id: str | None
    """The client event that caused the error."""

    @classmethod
    def of(cls, error: OmniError, event_id: JsonValue = None) -> "WireError":
        return cls(
            type="invalid_request_error" if isinstance(error, InvalidRequestError) else "server_error",
            code=error.code,
            message=error.message[:1000],
            param=error.param,
            event_id=event_id[:512] if isinstance(event_id, str) else None,
        )


# -- responses and sessions


class ResponseOutput(BaseModel):
    format: WireFormat
    voice: str | None


class WireResponse(BaseModel):
    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: ResponseStatus
    status_details: StatusDetails | None = None
    output: list[Item] = []
    conversation_id: str | None
    """Null for a response outside of the conversation."""
    output_modalities: list[Literal["text", "audio"]]
    max_output_tokens: MaxOutputTokens
    audio: dict[Literal["output"], ResponseOutput]
    usage: WireUsage | None = None
    metadata: dict[str, str] | None


class WireSession(SessionConfig):
    object: Literal["realtime.session"] = "realtime.session"
    id: str
    expires_at: int
    """Unix time in s."""


# -- events


class ServerEvent(BaseModel):
    event_id: str = Field(default_factory=lambda: new_id("event"))


class ErrorEvent(ServerEvent):
    type: Literal["error"] = "error"
    error: WireError


class SessionEvent(ServerEvent):
    type: Literal["session.created", "session.updated"]
    session: WireSession


class BufferCommitted(ServerEvent):
    type: Literal["input_audio_buffer.committed"] = "input_audio_buffer.committed"
    previous_item_id: str | None
    item_id: str


class BufferCleared(ServerEvent):
    type: Literal["input_audio_buffer.cleared"] = "input_audio_buffer.cleared"


class SpeechStarted(ServerEvent):
    type: Literal["input_audio_buffer.speech_started"] = "input_audio_buffer.speech_started"
    audio_start_ms: int
    item_id: str


class SpeechStopped(ServerEvent):
    type: Literal["input_audio_buffer.speech_stopped"] = "input_audio_buffer.speech_stopped"
    audio_end_ms: int
    item_id: str


class ItemAdded(ServerEvent):
    type: Literal["conversation.item.added"] = "conversation.item.added"
    previous_item_id: str | None
    item: Item


class ItemDone(ServerEvent):
    type: Literal["conversation.item.done"] = "conversation.item.done"
    previous_item_id: str | None
    item: Item


class ItemRetrieved(ServerEvent):
    type: Literal["conversation.item.retrieved"] = "conversation.item.retrieved"
    item: Item


class ItemDeleted(ServerEvent):
    type: Literal["conversation.item.deleted"] = "conversation.item.deleted"
    item_id: str


class ItemTruncated(ServerEvent):
    type: Literal["conversation.item.truncated"] = "conversation.item.truncated"
    item_id: str
    content_index: int
    audio_end_ms: int


class _TranscriptionEvent(ServerEvent):
    """Concerns the user's audio."""

    item_id: str
    content_index: int = 0


class TranscriptionDelta(_TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.delta"] = (
        "conversation.item.input_audio_transcription.delta"
    )
    delta: str


class TranscriptionCompleted(_TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.completed"] = (
        "conversation.item.input_audio_transcription.completed"
    )
    transcript: str
    usage: TranscriptionUsage


class TranscriptionFailed(_TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.failed"] = (
        "conversation.item.input_audio_transcription.failed"
    )
    error: FailureDetails

    @classmethod
    def of(cls, item_id: str, error: OmniError) -> "TranscriptionFailed":
        return cls(item_id=item_id, error=FailureDetails.of(error))


class ResponseEvent(ServerEvent):
    type: Literal["response.created", "response.done"]
    response: WireResponse


class OutputItemAdded(ServerEvent):
    type: Literal["response.output_item.added"] = "response.output_item.added"
    response_id: str
    output_index: int
    item: Item


class OutputItemDone(ServerEvent):
    type: Literal["response.output_item.done"] = "response.output_item.done"
    response_id: str
    output_index: int
    item: Item


class _PartEvent(ServerEvent):
    """Concerns the only part of a response's message, its first item."""

    response_id: str
    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartAdded(_PartEvent):
    type: Literal["response.content_part.added"] = "response.content_part.added"
    part: WirePart


class PartDone(_PartEvent):
    type: Literal["response.content_part.done"] = "response.content_part.done"
    part: WirePart


class OutputTextDelta(_PartEvent):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str


class OutputTextDone(_PartEvent):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str


class TranscriptDelta(_PartEvent):
    type: Literal["response.output_audio_transcript.delta"] = "response.output_audio_transcript.delta"
    delta: str


class TranscriptDone(_PartEvent):
    type: Literal["response.output_audio_transcript.done"] = "response.output_audio_transcript.done"
    transcript: str


class OutputAudioDelta(_PartEvent):
    type: Literal["response.output_audio.delta"] = "response.output_audio.delta"
    delta: str
    """Base64 of whole samples in the output format."""


class OutputAudioDone(_PartEvent):
    type: Literal["response.output_audio.done"] = "response.output_audio.done"


class _CallEvent(ServerEvent):
    response_id: str
    item_id: str
    output_index: int
    call_id: str


class ArgumentsDelta(_CallEvent):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDone(_CallEvent):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str
