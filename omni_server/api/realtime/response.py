"""One response: its settings, its task from submission to release, and its events."""

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from openai.types import realtime as wire
from openai.types.realtime.realtime_response import Audio, RealtimeResponse
from pydantic import BaseModel

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.errors import logged, unexpected_error
from omni_server.api.realtime.audio_format import OutputEncoder
from omni_server.api.realtime.conversation import Conversation
from omni_server.api.realtime.items import AnswerText, AssistantItem, CallItem, Item, ItemStatus, SpokenAudio
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.server_events import (
    NO_USAGE,
    FinalStatus,
    Reason,
    failure,
    new_id,
    response_usage,
    shown,
)
from omni_server.api.realtime.session_config import SessionConfig, tool_use
from omni_server.api.sampling import text_sampling
from omni_server.api.state import ServerState
from omni_server.api.usage import total_usage
from omni_server.errors import OmniError
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    ChatMessage,
    ModelInfo,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextDelta,
    ToolCallDelta,
    Usage,
)

logger = logging.getLogger(__name__)

_SAMPLES_PER_DELTA = SAMPLE_RATE_HZ // 5


@dataclass(frozen=True)
class ResponsePlan:
    """The session's settings with the overrides of `response.create`."""

    id: str
    config: SessionConfig
    """In effect for this response."""
    speech: SpeechOutput | None
    messages: tuple[ChatMessage, ...]
    text: str | None
    """What a model that only reads aloud is to speak; None for others."""
    passages: Sequence[OmniRequest]
    """Of `text`."""
    last_read_id: str | None
    """The item of the conversation where `text` ends; None if it is of others."""
    conversation: Conversation | None
    """Receives the answer as items; None for an out-of-band response."""
    metadata: Mapping[str, str] | None

    def request(self, model: ModelInfo) -> OmniRequest:
        limit = self.config.max_output_tokens
        sampling = SamplingConfig(max_tokens=None if limit == "inf" else limit)
        return OmniRequest(
            request_id=self.id,
            messages=self.messages,
            speech=self.speech,
            sampling=text_sampling(sampling, model),
            tools=tool_use(self.config),
            max_tokens_param="response.max_output_tokens",
        )

    def resource(self, status: FinalStatus | Literal["in_progress"] = "in_progress") -> RealtimeResponse:
        output = self.config.audio.output.model_dump(include={"format", "voice"})
        return RealtimeResponse(
            id=self.id,
            object="realtime.response",
            status=status,
            status_details=None,
            output=[],
            conversation_id=self.conversation.id if self.conversation is not None else None,
            output_modalities=self.config.output_modalities,
            max_output_tokens=self.config.max_output_tokens,
            audio=Audio.model_validate({"output": output}),
            usage=None,
            metadata=dict(self.metadata) if self.metadata is not None else None,
        )


class ResponseRun:
    def __init__(
        self,
        plan: ResponsePlan,
        outbox: Outbox,
        state: ServerState,
        on_end: Callable[["ResponseRun"], None],
    ) -> None:
        """Starts the task. Calls `on_end` once, when the last event is written and everything is released."""
        self.id = plan.id
        self.is_out_of_band = plan.conversation is None
        self._plan = plan
        self._writer = _Writer(plan, outbox)
        self._state = state
        self.task = asyncio.create_task(self._run(), name=f"realtime response {self.id}")
        """Ends when everything is released. Cancelling it stops the response without an event."""
        # A task cancelled before its first step never reaches a `finally` of its own.
        self.task.add_done_callback(lambda _: on_end(self))

    @property
    def is_over(self) -> bool:
        """Whether `response.done` has been written."""
        return self._writer.is_closed

    def cancel(self, reason: Reason) -> None:
        """Writes the last events immediately, without waiting for the stages to release the request."""
        self._writer.close("cancelled", reason=reason)
        self.task.cancel()

    async def _run(self) -> None:
        # An idle session does not delay shutdown, but a response does: the server waits for it.
        with self._state.request_in_flight():
            try:
                await self._answer()
            except OmniError as error:
                logger.info("%s failed: %s", self.id, logged(error))
                self._writer.close("failed", error=error)
            except Exception:
                logger.exception("%s failed", self.id)
                self._writer.close("failed", error=unexpected_error())

    async def _answer(self) -> None:
        generator = self._state.require_generator()
        first, *others = self._plan.passages or [self._plan.request(generator.model_info)]
        async with aclosing(AnswerStream(generator, self._state, self.id, one_by_one=others)) as answer:
            await answer.submit(first, truncates=self._plan.config.truncation != "disabled")
            if first.tools is None:
                self._writer.open_message()
            self._writer.text(self._plan.text or "")
            async with aclosing(answer.events(pace=self._state.audio_pace())) as stream:
                async for item in stream:
                    match item:
                        case (_, TextDelta(text=text)):
                            self._writer.text(text)
                        case (_, ToolCallDelta() as call):
                            self._writer.call(call)
                        case (_, AudioDelta(samples=samples)):
                            self._writer.audio(samples)
            usage = total_usage(answer.usages, num_choices=1)
            if answer.num_cut_short:
                self._writer.close("incomplete", usage, reason="max_output_tokens")
            else:
                self._writer.close("completed", usage)


class _Writer:
    """Writes the events of one response in the order that clients rely on.

    Call `open_message`, then `text`, `audio` and `call` in any order, then `close`, which is allowed at any
    time. Without `open_message`, the first text or audio opens the message: a response may consist of calls
    only. Calls are streamed, but after a message they wait until it is complete: clients answer a call as
    soon as it is written, and a new response would be refused while the audio of this one is still being
    generated.
    """

    def __init__(self, plan: ResponsePlan, outbox: Outbox) -> None:
        self._plan = plan
        self._conversation = plan.conversation
        self._outbox = outbox
        self._encoder = OutputEncoder(plan.config.audio.output.format) if plan.config.with_speech else None
        self._text: list[str] = []
        self._message: AssistantItem | None = None
        self._output: list[AssistantItem | CallItem] = []
        self._previous_ids: list[str | None] = []
        """Per output item, the id of the item before it in the conversation."""
        self._held_calls: list[ToolCallDelta] = []
        self.is_closed = False
        outbox.put(wire.ResponseCreatedEvent, response=plan.resource())

    def open_message(self) -> None:
        if self._output:
            return
        self._message = item = AssistantItem(new_id("item"), [], status="in_progress")
        self._begin(item)
        item.content.append(SpokenAudio("") if self._encoder is not None else AnswerText(""))
        self._put(wire.ResponseContentPartAddedEvent, part=self._part(""))

    def text(self, text: str) -> None:
        if text:
            self.open_message()
        if not text or self._message is None:
            return
        self._text.append(text)
        part = self._message.content[0]
        if isinstance(part, SpokenAudio):
            if not part.is_truncated:
                part.transcript += text
            self._put(wire.ResponseAudioTranscriptDeltaEvent, delta=text)
        else:
            part.text += text
            self._put(wire.ResponseTextDeltaEvent, delta=text)

    def audio(self, samples: npt.NDArray[np.float32]) -> None:
        """Sends `samples` [num_samples] at 24 kHz in deltas of at most 0.2 s, so that little is in flight
        when the user interrupts."""
        self.open_message()
        if self._message is None or self._encoder is None:
            return
        part = self._message.content[0]
        for begin in range(0, len(samples), _SAMPLES_PER_DELTA):
            piece = samples[begin : begin + _SAMPLES_PER_DELTA]
            if isinstance(part, SpokenAudio) and not part.is_truncated:
                part.num_samples += len(piece)
            self._put_audio(self._encoder.write(piece))

    def call(self, delta: ToolCallDelta) -> None:
        if self._message is not None:
            self._held_calls.append(delta)
        else:
            self._write_call(delta)

    def close(
        self,
        status: FinalStatus,
        usage: Usage | None = None,
        *,
        reason: Reason | None = None,
        error: OmniError | None = None,
    ) -> None:
        """Closes everything that is open; nothing of this response is sent afterwards.

        An incomplete call gets no `arguments.done`: clients would run it. Raises `OmniError`, with nothing
        closed yet, if the last audio cannot be encoded.
        """
        if self.is_closed:
            return
        is_complete = status == "completed"
        if is_complete:
            self.open_message()
        if usage is not None and self._message is not None and self._encoder is not None:
            self._put_audio(self._encoder.close())
        self.is_closed = True
        if status == "cancelled":
            self._outbox.drop_audio(self._plan.id)
        if self._message is not None:
            self._message.status = "completed" if is_complete else "incomplete"
            self._close_part()
            self._end(0)
        for delta in self._held_calls if is_complete else []:
            self._write_call(delta)
        self._end_call("completed" if is_complete else "incomplete")
        response = self._plan.resource(status)
        if not is_complete:
            response.status_details = wire.RealtimeResponseStatus.model_validate(
                {"type": status, "reason": reason, "error": failure(error) if error is not None else None}
            )
        response.usage = response_usage(usage) if usage is not None else NO_USAGE
        response.output = [shown(item) for item in self._output]
        self._outbox.put(wire.ResponseDoneEvent, response=response)

    def _write_call(self, delta: ToolCallDelta) -> None:
        if delta.call_id is not None and delta.name is not None:
            self._end_call("completed")
            self._begin(CallItem(new_id("item"), delta.call_id, delta.name, "", status="in_progress"))
        item, index = self._output[-1], len(self._output) - 1
        if isinstance(item, CallItem) and delta.arguments:
            item.arguments += delta.arguments
            self._put_call(wire.ResponseFunctionCallArgumentsDeltaEvent, index, item, delta=delta.arguments)

    def _end_call(self, status: ItemStatus) -> None:
        """Ends the call that is being written, if any."""
        item = self._output[-1] if self._output else None
        if not isinstance(item, CallItem) or item.status != "in_progress":
            return
        index = len(self._output) - 1
        item.status = status
        if status == "completed":
            kind = wire.ResponseFunctionCallArgumentsDoneEvent
            self._put_call(kind, index, item, name=item.name, arguments=item.arguments)
        self._end(index)

    def _begin(self, item: AssistantItem | CallItem) -> None:
        """Appends `item` to the output and to the conversation."""
        index = len(self._output)
        self._put_item(wire.ResponseOutputItemAddedEvent, index, item)
        previous_id = None
        if self._conversation is not None:
            # Behind what was read: what is written before the answer begins is still to be read.
            after = self._plan.last_read_id
            is_there = after is not None and self._conversation.find(after) is not None
            previous_id = self._conversation.add(item, after if is_there else None)
            self._outbox.put(wire.ConversationItemAdded, previous_item_id=previous_id, item=shown(item))
        self._output.append(item)
        self._previous_ids.append(previous_id)

    def _end(self, index: int) -> None:
        item = self._output[index]
        self._put_item(wire.ResponseOutputItemDoneEvent, index, item)
        if self._conversation is not None:
            previous_id = self._previous_ids[index]
            self._outbox.put(wire.ConversationItemDone, previous_item_id=previous_id, item=shown(item))

    def _close_part(self) -> None:
        text = "".join(self._text)
        if self._encoder is not None:
            self._put(wire.ResponseAudioDoneEvent)
            self._put(wire.ResponseAudioTranscriptDoneEvent, transcript=text)
        else:
            self._put(wire.ResponseTextDoneEvent, text=text)
        self._put(wire.ResponseContentPartDoneEvent, part=self._part(text))

    def _part(self, text: str) -> dict[str, str | None]:
        """Its types have other names than in items."""
        if self._encoder is not None:
            return {"type": "audio", "text": None, "transcript": text}
        return {"type": "text", "text": text, "transcript": None}

    def _put_audio(self, data: bytes) -> None:
        if data:
            self._put(wire.ResponseAudioDeltaEvent, delta=base64.b64encode(data).decode("ascii"))

    def _put(self, kind: type[BaseModel], **fields: object) -> None:
        """Sends an event about the only part of the message, the first item."""
        assert self._message is not None
        self._outbox.put(
            kind,
            response_id=self._plan.id,
            item_id=self._message.id,
            output_index=0,
            content_index=0,
            **fields,
        )

    def _put_call(self, kind: type[BaseModel], index: int, item: CallItem, **fields: object) -> None:
        response_id, call_id = self._plan.id, item.call_id
        self._outbox.put(
            kind, response_id=response_id, item_id=item.id, output_index=index, call_id=call_id, **fields
        )

    def _put_item(self, kind: type[BaseModel], index: int, item: Item) -> None:
        self._outbox.put(kind, response_id=self._plan.id, output_index=index, item=shown(item))
