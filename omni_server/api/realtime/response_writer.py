"""One response as server events, in the order that clients rely on."""

import base64

import numpy as np
import numpy.typing as npt

from omni_server.api.realtime import server_events as events
from omni_server.api.realtime.audio_format import OutputEncoder
from omni_server.api.realtime.call_writer import CallWriter
from omni_server.api.realtime.conversation import Conversation
from omni_server.api.realtime.items import AssistantItem, SpokenAudio, WrittenText, wire_item
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.response_plan import ResponsePlan
from omni_server.api.realtime.wire import ResponseStatus, StatusDetails, WirePart, WireUsage
from omni_server.types import SAMPLE_RATE_HZ, ToolCallDelta

_SAMPLES_PER_DELTA = SAMPLE_RATE_HZ // 5


class ResponseWriter:
    """`created`, `open_message`, any number of `text`, `audio` and `call`, `close`; `close` may come at any time and
    ends it. Without `open_message`, the message is opened by the first text or sound: a response may be nothing but
    calls."""

    def __init__(self, plan: ResponsePlan, conversation: Conversation | None, outbox: Outbox) -> None:
        """`conversation` gets the answer as an item; None for a response outside of it."""
        self._plan = plan
        self._conversation = conversation
        self._outbox = outbox
        self._text: list[str] = []
        self._encoder = OutputEncoder(plan.config.audio.output.format) if plan.config.with_speech else None
        self._item: AssistantItem | None = None
        self._previous_item_id: str | None = None
        self._calls = CallWriter(plan.id, conversation, outbox)
        self._has_calls = False
        self.is_closed = False

    def created(self) -> None:
        self._outbox.put(events.ResponseCreated(response=self._plan.wire()))

    def open_message(self) -> None:
        if self._item is not None or self._has_calls:
            return
        self._calls.hold()
        item = AssistantItem(events.new_id("item"), [], "in_progress")
        self._item = item
        wire = wire_item(item)
        self._outbox.put(events.OutputItemAdded(response_id=self._plan.id, output_index=0, item=wire))
        if self._conversation is not None:
            self._previous_item_id = self._conversation.add(item)
            self._outbox.put(events.ItemAdded(previous_item_id=self._previous_item_id, item=wire))
        item.content.append(SpokenAudio("") if self._encoder is not None else WrittenText(""))
        self._outbox.put(events.PartAdded(response_id=self._plan.id, item_id=item.id, part=self._part("")))

    def text(self, text: str) -> None:
        if text:
            self.open_message()
        if not text or self._item is None:
            return
        self._text.append(text)
        part = self._item.content[0]
        response_id, item_id = self._plan.id, self._item.id
        if isinstance(part, SpokenAudio):
            if not part.is_truncated:
                part.transcript += text
            self._outbox.put(events.TranscriptDelta(response_id=response_id, item_id=item_id, delta=text))
        else:
            part.text += text
            self._outbox.put(events.TextDelta(response_id=response_id, item_id=item_id, delta=text))

    def audio(self, samples: npt.NDArray[np.float32]) -> None:
        """`samples` [num_samples] at 24 kHz; sent in deltas of at most 0.2 s, so that little is in flight when the
        user interrupts."""
        self.open_message()
        if self._item is None or self._encoder is None:
            return
        part = self._item.content[0]
        for begin in range(0, len(samples), _SAMPLES_PER_DELTA):
            piece = samples[begin : begin + _SAMPLES_PER_DELTA]
            if isinstance(part, SpokenAudio) and not part.is_truncated:
                part.num_samples += len(piece)
            self._put_audio(self._item, self._encoder.write(piece))

    def call(self, delta: ToolCallDelta) -> None:
        self._has_calls = True
        self._calls.write(delta)

    def close(self, status: ResponseStatus, details: StatusDetails | None, usage: WireUsage) -> None:
        """Everything that is open is closed; nothing of this response is sent afterwards.

        Raises `OmniError` if the last sound cannot be encoded; then nothing is closed yet.
        """
        if self.is_closed:
            return
        if status == "completed":
            self.open_message()
        if status in ("completed", "incomplete") and self._item is not None and self._encoder is not None:
            self._put_audio(self._item, self._encoder.close())
        self.is_closed = True
        if status == "cancelled":
            self._outbox.drop_audio(self._plan.id)
        response = self._plan.wire(status)
        response.status_details, response.usage = details, usage
        if self._item is not None:
            self._item.status = "completed" if status == "completed" else "incomplete"
            self._close_part(self._item)
            wire = wire_item(self._item)
            self._outbox.put(events.OutputItemDone(response_id=self._plan.id, output_index=0, item=wire))
            if self._conversation is not None:
                self._outbox.put(events.ItemDone(previous_item_id=self._previous_item_id, item=wire))
            response.output.append(wire)
        if status == "completed":
            self._calls.release()
        response.output += self._calls.close(is_complete=status == "completed")
        self._outbox.put(events.ResponseDone(response=response))

    def _close_part(self, item: AssistantItem) -> None:
        text, response_id, item_id = "".join(self._text), self._plan.id, item.id
        if self._encoder is not None:
            self._outbox.put(events.AudioDone(response_id=response_id, item_id=item_id))
            self._outbox.put(events.TranscriptDone(response_id=response_id, item_id=item_id, transcript=text))
        else:
            self._outbox.put(events.TextDone(response_id=response_id, item_id=item_id, text=text))
        self._outbox.put(events.PartDone(response_id=response_id, item_id=item_id, part=self._part(text)))

    def _part(self, text: str) -> WirePart:
        return WirePart(type="audio", transcript=text) if self._encoder else WirePart(type="text", text=text)

    def _put_audio(self, item: AssistantItem, data: bytes) -> None:
        if data:
            delta = base64.b64encode(data).decode("ascii")
            self._outbox.put(events.AudioDelta(response_id=self._plan.id, item_id=item.id, delta=delta))
