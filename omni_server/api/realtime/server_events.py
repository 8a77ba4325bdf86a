"""The objects inside the events that the server sends.

Events are those of `openai.types.realtime`. Clients break on unknown event types, so there are no others.
Only fields that are set are sent, so a null that clients expect is set.
"""

import uuid
from typing import Literal

from openai.types.realtime import (
    ConversationItem,
    RealtimeError,
    RealtimeResponseUsage,
    RealtimeResponseUsageInputTokenDetails,
    RealtimeResponseUsageOutputTokenDetails,
)
from openai.types.realtime.conversation_item_input_audio_transcription_completed_event import (
    UsageTranscriptTextUsageTokens,
    UsageTranscriptTextUsageTokensInputTokenDetails,
)
from pydantic import JsonValue, TypeAdapter

from omni_server.api.realtime.items import Item
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import PromptTokens, Usage

FinalStatus = Literal["completed", "cancelled", "failed", "incomplete"]
Reason = Literal["turn_detected", "client_cancelled", "max_output_tokens"]

_KEPT: TypeAdapter[Item] = TypeAdapter(Item)
_SHOWN: TypeAdapter[ConversationItem] = TypeAdapter(ConversationItem)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def shown(item: Item) -> ConversationItem:
    return _SHOWN.validate_python(_KEPT.dump_python(item))


def response_usage(usage: Usage) -> RealtimeResponseUsage:
    prompt, output_tokens = usage.prompt, usage.text_tokens + usage.codec_tokens
    return RealtimeResponseUsage(
        total_tokens=prompt.total + output_tokens,
        input_tokens=prompt.total,
        output_tokens=output_tokens,
        input_token_details=RealtimeResponseUsageInputTokenDetails(
            text_tokens=prompt.text,
            audio_tokens=prompt.audio,
            image_tokens=prompt.image,
            cached_tokens=prompt.cached,
        ),
        output_token_details=RealtimeResponseUsageOutputTokenDetails(
            text_tokens=usage.text_tokens, audio_tokens=usage.codec_tokens
        ),
    )


NO_USAGE = response_usage(Usage(PromptTokens(total=0, text=0, audio=0, image=0, video=0), 0, 0))
"""Used for responses that did not complete: their usage is unknown."""


def transcription_usage(usage: Usage) -> UsageTranscriptTextUsageTokens:
    prompt = usage.prompt
    return UsageTranscriptTextUsageTokens(
        type="tokens",
        total_tokens=prompt.total + usage.text_tokens,
        input_tokens=prompt.total,
        output_tokens=usage.text_tokens,
        input_token_details=UsageTranscriptTextUsageTokensInputTokenDetails(
            text_tokens=prompt.text, audio_tokens=prompt.audio
        ),
    )


def failure(error: OmniError) -> dict[str, str | None]:
    return {"type": error.type, "code": error.code, "message": error.message[:1000]}


def wire_error(error: OmniError, event_id: JsonValue = None) -> RealtimeError:
    """`event_id` is that of the client event that caused the error."""
    return RealtimeError(
        type="invalid_request_error" if isinstance(error, InvalidRequestError) else "server_error",
        code=error.code,
        message=error.message[:1000],
        param=error.param,
        event_id=event_id[:512] if isinstance(event_id, str) else None,
    )
