"""Builds a response and the events that describe how it grows, in OpenAI's order."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from openai.types.responses import (
    FunctionTool,
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
    ToolChoiceAllowed,
    ToolChoiceFunction,
    ToolChoiceOptions,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_error import ResponseError
from openai.types.responses.response_status import ResponseStatus
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel, ConfigDict

from omni_server.api.render import choice_logprobs
from omni_server.api.responses.schemas import ResponsesRequest
from omni_server.audio.base64_stream import Base64Stream
from omni_server.audio.formats import AudioFormat
from omni_server.errors import OmniError
from omni_server.types import Finished, OmniEvent, SampledToken, TextDelta, ToolCallDelta, Usage

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "temperature",
    "top_logprobs",
    "top_p",
)

JsonObject = dict[str, Any]


class SpokenAudio(BaseModel):
    """Extension: the speech of an answer that is not streamed; its transcript is the text."""

    data: str
    """Base64."""
    format: AudioFormat


class ResponseObject(Response):
    """OpenAI's `Response` with the types that this server sends. Times are whole seconds, as from OpenAI."""

    created_at: int  # type: ignore[assignment]
    completed_at: int | None = None  # type: ignore[assignment]
    output: list[ResponseOutputMessage | ResponseFunctionToolCall]  # type: ignore[assignment]
    tools: list[FunctionTool]  # type: ignore[assignment]
    tool_choice: ToolChoiceOptions | ToolChoiceFunction | ToolChoiceAllowed
    instructions: str | None
    store: bool
    audio: SpokenAudio | None = None


class StreamEvent(BaseModel):
    """One of `openai.types.responses.ResponseStreamEvent`."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


def new_response(id: str, model: str, request: ResponsesRequest) -> ResponseObject:
    asked = request.model_dump(by_alias=True, exclude={"input"})
    return ResponseObject.model_validate(
        {
            **{name: asked[name] for name in _ECHOED},
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "metadata": asked["metadata"] or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": None,
            "text": {"format": (asked["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": asked["tool_choice"] or "auto",
            "tools": asked["tools"] or [],
            "truncation": request.truncation or "disabled",
            "usage": None,
            "background": False,
            "store": request.store is True,
        }
    )


class ResponseWriter:
    """Changes `response` with each event of the answer. Events refer to it: render each before the next."""

    def __init__(self, response: ResponseObject, *, with_logprobs: bool) -> None:
        self.response = response
        self._with_logprobs = with_logprobs
        self._sequence_number = -1
        self._item: ResponseOutputMessage | ResponseFunctionToolCall | None = None
        """The last item of the output, while it is written."""
        self._pieces: list[str] = []
        """Text or arguments of the open item."""
        self._logprobs: list[JsonObject] = []
        self._base64 = Base64Stream()

    def opening(self) -> Iterator[StreamEvent]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def take(self, event: OmniEvent) -> Iterator[StreamEvent]:
        match event:
            case TextDelta(text=text, logprobs=tokens):
                # Inside a call, there are log-probabilities without text.
                if text or (tokens and isinstance(self._item, ResponseOutputMessage)):
                    yield from self._open_message()
                    yield self._text_delta(text, tokens)
            case ToolCallDelta(call_id=call_id, name=name):
                if call_id is not None and name is not None:
                    yield from self._close("completed")
                    yield from self._open(
                        ResponseFunctionToolCall(
                            id=_new_id("fc"),
                            type="function_call",
                            status="in_progress",
                            call_id=call_id,
                            name=name,
                            arguments="",
                        )
                    )
                self._pieces.append(event.arguments)
                yield self._item_event("response.function_call_arguments.delta", delta=event.arguments)
            case Finished(finish_reason=reason, usage=usage):
                yield from self._finish(usage, is_cut=reason == "length")

    def audio(self, data: bytes, *, is_last: bool = False) -> Iterator[StreamEvent]:
        encoded = self._base64.push(data) + (self._base64.flush() if is_last else "")
        if encoded:
            yield self._event("response.audio.delta", delta=encoded)
        if is_last:
            yield self._event("response.audio.done")

    def failed(self, error: OmniError) -> Iterator[StreamEvent]:
        yield from self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError(
            code="server_error" if error.status >= 500 else "invalid_prompt", message=error.message
        )
        yield self._event("response.failed", response=self.response)

    def _finish(self, usage: Usage, *, is_cut: bool) -> Iterator[StreamEvent]:
        status: ResponseStatus = "incomplete" if is_cut else "completed"
        if not self.response.output:
            yield from self._open_message()
        yield from self._close(status)
        self.response.status = status
        self.response.completed_at = None if is_cut else int(time.time())
        self.response.usage = _usage(usage)
        if is_cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            yield self._event("response.incomplete", response=self.response)
        else:
            yield self._event("response.completed", response=self.response)

    def _open_message(self) -> Iterator[StreamEvent]:
        if isinstance(self._item, ResponseOutputMessage):
            return
        yield from self._close("completed")
        message = ResponseOutputMessage(
            id=_new_id("msg"), type="message", role="assistant", status="in_progress", content=[]
        )
        yield from self._open(message)
        yield self._part_event("response.content_part.added", part=_text_part("", []))

    def _open(self, item: ResponseOutputMessage | ResponseFunctionToolCall) -> Iterator[StreamEvent]:
        self._item, self._pieces, self._logprobs = item, [], []
        self.response.output.append(item)
        yield self._event("response.output_item.added", item=item, **self._position())

    def _text_delta(self, text: str, tokens: Sequence[SampledToken]) -> StreamEvent:
        self._pieces.append(text)
        logprobs = _logprobs(tokens) if self._with_logprobs else []
        self._logprobs += logprobs
        return self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _close(self, status: ResponseStatus) -> Iterator[StreamEvent]:
        item, text = self._item, "".join(self._pieces)
        match item:
            case ResponseFunctionToolCall():
                item.arguments = text
                yield self._item_event(
                    "response.function_call_arguments.done", arguments=text, name=item.name
                )
            case ResponseOutputMessage():
                part = _text_part(text, self._logprobs)
                item.content = [part]
                yield self._part_event("response.output_text.done", text=text, logprobs=self._logprobs)
                yield self._part_event("response.content_part.done", part=part)
            case None:
                return
        self._item = None
        item.status = "incomplete" if status == "incomplete" else "completed"
        yield self._event("response.output_item.done", item=item, **self._position())

    def _position(self) -> dict[str, object]:
        return {"output_index": len(self.response.output) - 1}

    def _item_event(self, type: str, **fields: object) -> StreamEvent:
        assert self._item is not None
        return self._event(type, item_id=self._item.id, **self._position(), **fields)

    def _part_event(self, type: str, **fields: object) -> StreamEvent:
        return self._item_event(type, content_index=0, **fields)

    def _event(self, type: str, **fields: object) -> StreamEvent:
        self._sequence_number += 1
        return StreamEvent.model_validate({"type": type, "sequence_number": self._sequence_number, **fields})


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _logprobs(tokens: Sequence[SampledToken]) -> list[JsonObject]:
    shown: list[JsonObject] = choice_logprobs(tokens).model_dump()["content"]
    for token in shown:
        for each in (token, *token["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    return shown


def _text_part(text: str, logprobs: list[JsonObject]) -> ResponseOutputText:
    return ResponseOutputText.model_validate(
        {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    )


def _usage(usage: Usage) -> ResponseUsage:
    output_tokens = usage.text_tokens + usage.codec_tokens
    return ResponseUsage(
        input_tokens=usage.prompt.total,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt.cached, cache_write_tokens=0),
        output_tokens=output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=usage.prompt.total + output_tokens,
    )
