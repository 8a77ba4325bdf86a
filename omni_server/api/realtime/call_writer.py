"""The function calls of one response as server events."""

from typing import Literal

from omni_server.api.realtime import server_events as events
from omni_server.api.realtime.conversation import Conversation
from omni_server.api.realtime.items import CallItem, wire_item
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.wire import WireItem
from omni_server.types import ToolCallDelta


class CallWriter:
    """Writes calls while the model does, or keeps them until `release`.

    They are kept where the response also says something: clients answer a call as soon as it is written, and a new
    response would be refused while the sound of this one is still being made.
    """

    def __init__(self, response_id: str, conversation: Conversation | None, outbox: Outbox) -> None:
        self._response_id = response_id
        self._conversation = conversation
        self._outbox = outbox
        self._first_index = 0
        self._held: list[ToolCallDelta] | None = None
        self._items: list[CallItem] = []
        self._previous_ids: list[str | None] = []

    def hold(self) -> None:
        """A message is the first item of the output; calls come behind it."""
        self._first_index = 1
        self._held = []

    def release(self) -> None:
        """The message is done."""
        held, self._held = self._held, None
        for delta in held or []:
            self.write(delta)

    def write(self, delta: ToolCallDelta) -> None:
        if self._held is not None:
            self._held.append(delta)
            return
        if delta.call_id is not None and delta.name is not None:
            self._end_call("completed")
            self._begin_call(delta.call_id, delta.name)
        item = self._items[-1]
        if delta.arguments:
            item.arguments += delta.arguments
            self._outbox.put(
                events.ArgumentsDelta(
                    response_id=self._response_id,
                    item_id=item.id,
                    output_index=self._index,
                    call_id=item.call_id,
                    delta=delta.arguments,
                )
            )

    def close(self, *, is_complete: bool) -> list[WireItem]:
        """The items. A call that is not complete gets no `arguments.done`: clients would run it. Calls that are kept
        still are forgotten."""
        self._end_call("completed" if is_complete else "incomplete")
        return [wire_item(item) for item in self._items]

    @property
    def _index(self) -> int:
        return self._first_index + len(self._items) - 1

    def _begin_call(self, call_id: str, name: str) -> None:
        item = CallItem(events.new_id("item"), call_id, name, "", "in_progress")
        self._items.append(item)
        wire = wire_item(item)
        self._outbox.put(events.OutputItemAdded(response_id=self._response_id, output_index=self._index, item=wire))
        previous = self._conversation.add(item) if self._conversation is not None else None
        self._previous_ids.append(previous)
        if self._conversation is not None:
            self._outbox.put(events.ItemAdded(previous_item_id=previous, item=wire))

    def _end_call(self, status: Literal["completed", "incomplete"]) -> None:
        if not self._items or self._items[-1].status != "in_progress":
            return
        item = self._items[-1]
        item.status = status
        if status == "completed":
            self._outbox.put(
                events.ArgumentsDone(
                    response_id=self._response_id,
                    item_id=item.id,
                    output_index=self._index,
                    call_id=item.call_id,
                    name=item.name,
                    arguments=item.arguments,
                )
            )
        wire = wire_item(item)
        self._outbox.put(events.OutputItemDone(response_id=self._response_id, output_index=self._index, item=wire))
        if self._conversation is not None:
            self._outbox.put(events.ItemDone(previous_item_id=self._previous_ids[-1], item=wire))
