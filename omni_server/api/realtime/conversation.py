"""A session's conversation: its items in order, and the messages made of them for the model."""

import logging
from collections import deque
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from omni_server.api.realtime.items import (
    AnswerText,
    AssistantItem,
    CallItem,
    CallOutputItem,
    HeardAudio,
    InputContent,
    Item,
    SeenImage,
    SpokenAudio,
    SystemItem,
    UserItem,
    WrittenText,
    num_bytes,
)
from omni_server.api.realtime.server_events import new_id
from omni_server.errors import InvalidRequestError
from omni_server.types import AudioPart, ChatMessage, ContentPart, MediaKind, ModelInfo, TextPart, ToolCall

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024 * 1024
"""23 minutes of 24 kHz audio, more than the models' longest prompt: older items would not fit anyway."""
_MAX_ITEMS = 2000
_ROUNDING_MS = 100
"""Tolerance for clients that round their playback position up."""


class Conversation:
    """Holds at most `_MAX_ITEMS` items of `MAX_BYTES` in total; beyond that, drops the oldest."""

    def __init__(self) -> None:
        self.id = new_id("conv")
        self._items: list[Item] = []

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    @property
    def call_ids(self) -> set[str]:
        return {item.call_id for item in self._items if isinstance(item, CallItem)}

    def find(self, item_id: str) -> Item | None:
        return next((item for item in self._items if item.id == item_id), None)

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Inserts `item` at the end or after another one; "root" is the beginning. Returns the previous
        item's id.

        Raises `InvalidRequestError`.
        """
        if num_bytes(item) > MAX_BYTES:
            raise InvalidRequestError("The item is larger than a conversation may be.", param="item")
        if self.find(item.id) is not None:
            raise InvalidRequestError(f"Item with item_id '{item.id}' already exists.", param="item.id")
        position = len(self._items) if previous_item_id is None else self._position_after(previous_item_id)
        self._items.insert(position, item)
        before = self._items[position - 1].id if position else None
        self._forget_oldest(item)
        return before

    def retrieve(
        self, item_id: str, doing: str = "retrieving", code: str = "item_retrieve_invalid_item_id"
    ) -> Item:
        """Raises `InvalidRequestError` with `code` if there is no such item."""
        item = self.find(item_id)
        if item is None:
            raise InvalidRequestError(
                f"Error {doing} item: the item with id '{item_id[:128]}' does not exist.",
                param="item_id",
                code=code,
            )
        return item

    def delete(self, item_id: str) -> None:
        """Raises `InvalidRequestError`."""
        self._items.remove(self.retrieve(item_id, "deleting", "item_delete_invalid_item_id"))

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """See `SpokenAudio.truncate`. Raises `InvalidRequestError`."""
        item = self.retrieve(item_id, "truncating", "item_truncate_invalid_item_id")
        content = item.content if isinstance(item, AssistantItem) else []
        part = content[content_index] if content_index < len(content) else None
        if not isinstance(part, SpokenAudio):
            raise InvalidRequestError(
                "Only audio of an assistant's message can be truncated.",
                param="content_index",
                code="invalid_value",
            )
        if part.is_truncated:
            raise InvalidRequestError("The item has been truncated already.", code="item_already_truncated")
        if audio_end_ms > part.audio_ms + _ROUNDING_MS:
            raise InvalidRequestError(
                f"Audio content of {part.audio_ms:.0f}ms is already shorter than {audio_end_ms}ms",
                param="audio_end_ms",
            )
        part.truncate(audio_end_ms)

    def _position_after(self, item_id: str) -> int:
        if item_id == "root":
            return 0
        for position, item in enumerate(self._items):
            if item.id == item_id:
                return position + 1
        raise InvalidRequestError(
            f"Previous item with item_id '{item_id[:128]}' was not found.", param="previous_item_id"
        )

    def _forget_oldest(self, newest: Item) -> None:
        total = sum(num_bytes(item) for item in self._items)
        while total > MAX_BYTES or len(self._items) > _MAX_ITEMS:
            oldest = next(item for item in self._items if item is not newest and item.status != "in_progress")
            logger.debug("conversation %s is full; forgetting item %a", self.id, oldest.id)
            self._items.remove(oldest)
            total -= num_bytes(oldest)


def messages_of(items: Sequence[Item], instructions: str, model: ModelInfo) -> tuple[ChatMessage, ...]:
    """Returns the instructions as a system message, if any, then the items.

    `ModelInfo.max_media_per_prompt` limits recordings and images: the prompt holds the latest ones. Older
    recordings are replaced by their transcripts, if known; messages that become empty are omitted.
    """
    room: dict[MediaKind, int] = {
        kind: model.max_media_per_prompt.get(kind, 0) for kind in ("audio", "image")
    }
    messages: deque[ChatMessage] = deque()
    for item in reversed(items):
        message = _message(item, room)
        if not message.content and not message.tool_calls:
            continue
        if message.role == "assistant" and messages and messages[0].tool_calls and not messages[0].content:
            calls = messages.popleft().tool_calls  # one turn is one message
            message = ChatMessage("assistant", message.content, message.tool_calls + calls)
        messages.appendleft(message)
    if instructions:
        messages.appendleft(ChatMessage("system", (TextPart(instructions),)))
    return tuple(messages)


def text_to_read(items: Sequence[Item]) -> str:
    """What users have written since the last answer, for a model that only reads aloud.

    Raises `InvalidRequestError` if that is nothing.
    """
    unread = list(takewhile(lambda item: not isinstance(item, AssistantItem), reversed(items)))
    parts = [part for item in reversed(unread) if isinstance(item, UserItem) for part in item.content]
    text = "\n".join(part.text for part in parts if isinstance(part, WrittenText)).strip()
    if not text:
        raise InvalidRequestError(
            "There is no text to read: a response reads what users have written since the last one.",
            param="response.input",
            code="empty_string",
        )
    return text


def _message(item: Item, room: dict[MediaKind, int]) -> ChatMessage:
    """`room`: recordings and images that the prompt may still hold; those of `item` are deducted."""
    match item:
        case SystemItem():
            return ChatMessage("system", tuple(TextPart(part.text) for part in item.content))
        case AssistantItem():
            said = [part.text if isinstance(part, AnswerText) else part.transcript for part in item.content]
            return ChatMessage("assistant", tuple(TextPart(text) for text in said if text))
        case UserItem():
            parts = [_user_part(part, room) for part in reversed(item.content)]
            return ChatMessage("user", tuple(part for part in reversed(parts) if part is not None))
        case CallItem(status="completed"):
            return ChatMessage("assistant", (), (ToolCall(item.name, item.arguments),))
        case CallItem():  # interrupted while being written
            return ChatMessage("assistant", ())
        case CallOutputItem():
            return ChatMessage("tool", (TextPart(item.output),))


def _user_part(part: InputContent, room: dict[MediaKind, int]) -> ContentPart | None:
    match part:
        case WrittenText(text):
            return TextPart(text)
        case SeenImage(image):
            room["image"] -= 1
            return image if room["image"] >= 0 else None
        case HeardAudio():
            room["audio"] -= 1
            if room["audio"] >= 0:
                return audio_part(part)
            return TextPart(part.transcript) if part.transcript else None


def audio_part(audio: HeardAudio) -> AudioPart:
    """Keeps the sample rate: the model's processor resamples."""
    return AudioPart(audio.samples.astype(np.float32) / np.float32(32768.0), audio.rate_hz)
