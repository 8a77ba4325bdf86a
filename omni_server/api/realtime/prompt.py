"""A conversation as the messages that the model reads."""

from collections.abc import Sequence

import numpy as np

from omni_server.api.realtime.items import (
    AssistantItem,
    CallItem,
    CallOutputItem,
    HeardAudio,
    Item,
    SeenImage,
    SystemItem,
    UserItem,
    WrittenText,
)
from omni_server.types import AudioPart, ChatMessage, ContentPart, MediaKind, ModelInfo, TextPart, ToolCall


def messages_of(items: Sequence[Item], instructions: str, model: ModelInfo) -> tuple[ChatMessage, ...]:
    """The instructions as a system message, if there are any, then the items.

    A prompt may hold only so many sounds and pictures (`ModelInfo.max_media_per_prompt`): the latest ones are in it.
    Of an older sound its transcript, if it is known, stands in its place; messages that are left with nothing are
    left out.
    """
    latest = _latest_media(items, model)
    messages = [ChatMessage("system", (TextPart(instructions),))] if instructions else []
    for item in items:
        message = _message(item, latest)
        if not message.content and not message.tool_calls:
            continue
        if message.tool_calls and messages and messages[-1].role == "assistant":  # one turn is one message
            before = messages.pop()
            message = ChatMessage("assistant", before.content, before.tool_calls + message.tool_calls)
        messages.append(message)
    return tuple(messages)


def without_oldest(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...] | None:
    """About a quarter shorter, for a prompt that did not fit; None if only the last message is left.

    System messages at the beginning stay.
    """
    kept = 0
    while kept < len(messages) and messages[kept].role == "system":
        kept += 1
    num_others = len(messages) - kept
    if num_others <= 1:
        return None
    rest = messages[kept + min(max(1, num_others // 4), num_others - 1) :]
    while len(rest) > 1 and rest[0].role == "tool":  # the result of a call that is gone
        rest = rest[1:]
    return messages[:kept] + rest


def _latest_media(items: Sequence[Item], model: ModelInfo) -> set[int]:
    """`id()` of the parts that the prompt has room for."""
    room: dict[MediaKind, int] = {kind: model.max_media_per_prompt.get(kind, 0) for kind in ("audio", "image")}
    latest: set[int] = set()
    for item in reversed(items):
        if not isinstance(item, UserItem):
            continue
        for part in reversed(item.content):
            kind: MediaKind
            match part:
                case HeardAudio():
                    kind = "audio"
                case SeenImage():
                    kind = "image"
                case _:
                    continue
            if room[kind] > 0:
                room[kind] -= 1
                latest.add(id(part))
    return latest


def _message(item: Item, latest: set[int]) -> ChatMessage:
    match item:
        case SystemItem():
            return ChatMessage("system", tuple(TextPart(part.text) for part in item.content))
        case AssistantItem():
            said = [part.text if isinstance(part, WrittenText) else part.transcript for part in item.content]
            return ChatMessage("assistant", tuple(TextPart(text) for text in said if text))
        case UserItem():
            parts = [_user_part(part, in_prompt=id(part) in latest) for part in item.content]
            return ChatMessage("user", tuple(part for part in parts if part is not None))
        case CallItem(status="completed"):
            return ChatMessage("assistant", (), (ToolCall(item.name, item.arguments),))
        case CallItem():  # interrupted while it was written
            return ChatMessage("assistant", ())
        case CallOutputItem():
            return ChatMessage("tool", (TextPart(item.output),))


def _user_part(part: WrittenText | HeardAudio | SeenImage, *, in_prompt: bool) -> ContentPart | None:
    match part:
        case WrittenText(text):
            return TextPart(text)
        case SeenImage(image):
            return image if in_prompt else None
        case HeardAudio() if in_prompt:
            return audio_part(part)
        case HeardAudio():
            return TextPart(part.transcript) if part.transcript else None


def audio_part(audio: HeardAudio) -> AudioPart:
    """At its own rate: the model's processor brings it to the encoder's."""
    return AudioPart(audio.samples.astype(np.float32) / np.float32(32768.0), audio.rate_hz)
