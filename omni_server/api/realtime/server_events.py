"""What the server sends. Clients break on types that they do not know, so that these are all there are."""

import uuid
from typing import Literal

from pydantic import BaseModel, Field

from omni_server.api.realtime.wire import (
    FailureDetails,
    TranscriptionUsage,
    WireError,
    WireItem,
    WirePart,
    WireResponse,
    WireSession,
)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


class ServerEvent(BaseModel):
    event_id: str = Field(default_factory=lambda: new_id("event"))


class ErrorEvent(ServerEvent):
    type: Literal["error"] = "error"
    error: WireError


class SessionCreated(ServerEvent):
    type: Literal["session.created"] = "session.created"
    session: WireSession


class SessionUpdated(ServerEvent):
    type: Literal["session.updated"] = "session.updated"
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
    item: WireItem


class ItemDone(ServerEvent):
    type: Literal["conversation.item.done"] = "conversation.item.done"
    previous_item_id: str | None
    item: WireItem


class ItemRetrieved(ServerEvent):
    type: Literal["conversation.item.retrieved"] = "conversation.item.retrieved"
    item: WireItem


class ItemDeleted(ServerEvent):
    type: Literal["conversation.item.deleted"] = "conversation.item.deleted"
    item_id: str


class ItemTruncated(ServerEvent):
    type: Literal["conversation.item.truncated"] = "conversation.item.truncated"
    item_id: str
    content_index: int
    audio_end_ms: int


class TranscriptionEvent(ServerEvent):
    """Of what the user said."""

    item_id: str
    content_index: int = 0


class TranscriptionDelta(TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.delta"] = (
        "conversation.item.input_audio_transcription.delta"
    )
    delta: str


class TranscriptionCompleted(TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.completed"] = (
        "conversation.item.input_audio_transcription.completed"
    )
    transcript: str
    usage: TranscriptionUsage


class TranscriptionFailed(TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.failed"] = (
        "conversation.item.input_audio_transcription.failed"
    )
    error: FailureDetails


class ResponseCreated(ServerEvent):
    type: Literal["response.created"] = "response.created"
    response: WireResponse


class ResponseDone(ServerEvent):
    type: Literal["response.done"] = "response.done"
    response: WireResponse


class OutputItemAdded(ServerEvent):
    type: Literal["response.output_item.added"] = "response.output_item.added"
    response_id: str
    output_index: int
    item: WireItem


class OutputItemDone(ServerEvent):
    type: Literal["response.output_item.done"] = "response.output_item.done"
    response_id: str
    output_index: int
    item: WireItem


class PartEvent(ServerEvent):
    """Of the only part of the only item of a response."""

    response_id: str
    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartAdded(PartEvent):
    type: Literal["response.content_part.added"] = "response.content_part.added"
    part: WirePart


class PartDone(PartEvent):
    type: Literal["response.content_part.done"] = "response.content_part.done"
    part: WirePart


class TextDelta(PartEvent):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str


class TextDone(PartEvent):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str


class TranscriptDelta(PartEvent):
    type: Literal["response.output_audio_transcript.delta"] = "response.output_audio_transcript.delta"
    delta: str


class TranscriptDone(PartEvent):
    type: Literal["response.output_audio_transcript.done"] = "response.output_audio_transcript.done"
    transcript: str


class AudioDelta(PartEvent):
    type: Literal["response.output_audio.delta"] = "response.output_audio.delta"
    delta: str
    """Base64 of whole samples in the output format."""


class AudioDone(PartEvent):
    type: Literal["response.output_audio.done"] = "response.output_audio.done"


class ArgumentsDelta(ServerEvent):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    response_id: str
    item_id: str
    output_index: int
    call_id: str
    delta: str


class ArgumentsDone(ServerEvent):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    response_id: str
    item_id: str
    output_index: int
    call_id: str
    name: str
    arguments: str
