"""What one response is to be: the session's settings with the overrides of `response.create`."""

from collections.abc import Mapping
from dataclasses import dataclass

from omni_server.api.realtime.prompt import without_oldest
from omni_server.api.realtime.session import SessionConfig
from omni_server.api.realtime.tools import tool_use
from omni_server.api.realtime.wire import ResponseAudio, ResponseOutput, ResponseStatus, WireResponse
from omni_server.api.sampling import text_sampling
from omni_server.types import ChatMessage, ModelInfo, OmniRequest, SamplingConfig, SpeechOutput


@dataclass(frozen=True)
class ResponsePlan:
    id: str
    config: SessionConfig
    """In force for this response."""
    messages: tuple[ChatMessage, ...]
    conversation_id: str | None
    """None for a response outside of the conversation."""
    metadata: Mapping[str, str] | None

    @property
    def may_call(self) -> bool:
        """The answer may be a function call."""
        return tool_use(self.config) is not None

    def request(self, messages: tuple[ChatMessage, ...], model: ModelInfo) -> OmniRequest:
        """To `model`, for `messages`, which are those of the plan, or what `shorter` has left of them."""
        limit = self.config.max_output_tokens
        sampling = SamplingConfig(max_tokens=None if limit == "inf" else limit)
        speech = SpeechOutput(voice=self.config.audio.output.voice) if self.config.with_speech else None
        return OmniRequest(
            request_id=self.id,
            messages=messages,
            speech=speech,
            sampling=text_sampling(sampling, model),
            tools=tool_use(self.config),
            can_be_shortened=self.shorter(messages) is not None,
        )

    def shorter(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...] | None:
        """Without the oldest turns; None if only the last is left, or if `truncation` is "disabled"."""
        return None if self.config.truncation == "disabled" else without_oldest(messages)

    def wire(self, status: ResponseStatus = "in_progress") -> WireResponse:
        output = self.config.audio.output
        return WireResponse(
            id=self.id,
            status=status,
            conversation_id=self.conversation_id,
            output_modalities=self.config.output_modalities,
            max_output_tokens=self.config.max_output_tokens,
            audio=ResponseAudio(output=ResponseOutput(format=output.format, voice=output.voice)),
            metadata=dict(self.metadata) if self.metadata is not None else None,
        )
