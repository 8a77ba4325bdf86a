"""The objects inside of server events: conversation items, responses, usage."""

from typing import Literal

from pydantic import BaseModel, JsonValue

from omni_server.api.realtime.session import MaxOutputTokens, SessionConfig, WireFormat
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
CancelReason = Literal["turn_detected", "client_cancelled"]


class WireContent(BaseModel):
    """One part of a message. Sound that was sent is not sent back."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: str | None = None
    transcript: str | None = None


class WireMessage(BaseModel):
    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["system", "user", "assistant"]
    content: list[WireContent]


class WireCall(BaseModel):
    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class WireCallOutput(BaseModel):
    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["function_call_output"] = "function_call_output"
    status: ItemStatus
    call_id: str
    output: str


WireItem = WireMessage | WireCall | WireCallOutput


class WirePart(BaseModel):
    """What `response.content_part.*` call a part; the types have other names there than in items."""

    type: Literal["audio", "text"]
    text: str | None = None
    transcript: str | None = None


class InputTokenDetails(BaseModel):
    text_tokens: int = 0
    audio_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


class OutputTokenDetails(BaseModel):
    text_tokens: int = 0
    audio_tokens: int = 0


class WireUsage(BaseModel):
    """All zero for a response that did not come to its end: what it took is not known then."""

    total_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    input_token_details: InputTokenDetails = InputTokenDetails()
    output_token_details: OutputTokenDetails = OutputTokenDetails()

    @classmethod
    def of(cls, usage: Usage) -> "WireUsage":
        output_tokens = usage.text_tokens + usage.codec_tokens
        return cls(
            total_tokens=usage.prompt.total + output_tokens,
            input_tokens=usage.prompt.total,
            output_tokens=output_tokens,
            input_token_details=InputTokenDetails(
                text_tokens=usage.prompt.text,
                audio_tokens=usage.prompt.audio,
                image_tokens=usage.prompt.image,
                cached_tokens=usage.prompt.cached,
            ),
            output_token_details=OutputTokenDetails(text_tokens=usage.text_tokens, audio_tokens=usage.codec_tokens),
        )


class TranscriptionTokenDetails(BaseModel):
    text_tokens: int
    audio_tokens: int


class TranscriptionUsage(BaseModel):
    type: Literal["tokens"] = "tokens"
    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: TranscriptionTokenDetails

    @classmethod
    def of(cls, usage: Usage) -> "TranscriptionUsage":
        return cls(
            total_tokens=usage.prompt.total + usage.text_tokens,
            input_tokens=usage.prompt.total,
            output_tokens=usage.text_tokens,
            input_token_details=TranscriptionTokenDetails(
                text_tokens=usage.prompt.text, audio_tokens=usage.prompt.audio
            ),
        )


class FailureDetails(BaseModel):
    type: str
    code: str | None
    message: str

    @classmethod
    def of(cls, error: OmniError) -> "FailureDetails":
        return cls(type=error.type, code=error.code, message=error.message[:1000])


class StatusDetails(BaseModel):
    type: Literal["cancelled", "incomplete", "failed"]
    reason: Literal["turn_detected", "client_cancelled", "max_output_tokens"] | None = None
    error: FailureDetails | None = None

    @classmethod
    def failed(cls, error: OmniError) -> "StatusDetails":
        return cls(type="failed", error=FailureDetails.of(error))


class ResponseOutput(BaseModel):
    format: WireFormat
    voice: str | None


class ResponseAudio(BaseModel):
    output: ResponseOutput


class WireResponse(BaseModel):
    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: ResponseStatus
    status_details: StatusDetails | None = None
    output: list[WireItem] = []
    conversation_id: str | None
    """Null for a response that is no part of the conversation."""
    output_modalities: list[Literal["text", "audio"]]
    max_output_tokens: MaxOutputTokens
    audio: ResponseAudio
    usage: WireUsage | None = None
    metadata: dict[str, str] | None


class WireSession(SessionConfig):
    object: Literal["realtime.session"] = "realtime.session"
    id: str
    expires_at: int


class WireError(BaseModel):
    type: Literal["invalid_request_error", "server_error"]
    code: str | None
    message: str
    param: str | None
    event_id: str | None
    """Of the client's event that is to blame."""

    @classmethod
    def of(cls, error: OmniError, event_id: JsonValue = None) -> "WireError":
        return cls(
            type="invalid_request_error" if isinstance(error, InvalidRequestError) else "server_error",
            code=error.code,
            message=error.message[:1000],
            param=error.param,
            event_id=event_id[:512] if isinstance(event_id, str) else None,
        )
