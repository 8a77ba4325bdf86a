"""Converts a request's messages to the model's conversation; loads media and looks up spoken answers."""

from collections import Counter
from collections.abc import Iterable

from omni_server.api.answer_store import AnswerStore
from omni_server.api.media_loader import MediaLoader
from omni_server.api.schemas import MediaContent, Message, PastToolCall, RefusalContent, TextContent
from omni_server.api.validation import missing_parameter, unsupported
from omni_server.errors import InvalidRequestError
from omni_server.types import ChatMessage, ContentPart, MediaKind, ModelInfo, Role, TextPart, ToolCall

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MEDIA_ROLES = frozenset({"user", "tool"})
_MEDIA_KINDS: dict[str, MediaKind] = {
    "input_audio": "audio",
    "audio_url": "audio",
    "image_url": "image",
    "video_url": "video",
}


async def load_messages(
    messages: list[Message],
    model: ModelInfo,
    media: MediaLoader,
    store: AnswerStore | None,
    *,
    hears_videos: bool = False,
) -> tuple[ChatMessage, ...]:
    """Checks all messages before it fetches or decodes anything. Returns tool results in the order of
    their calls. Raises `InvalidRequestError`.

    With `hears_videos`, videos have their audio tracks, and each counts as an audio as well.
    """
    _check_number(messages, model)
    _check_results(messages)
    drafts = [message_parts(message, f"messages[{index}]", store) for index, message in enumerate(messages)]
    kinds = media_kinds(part for draft in drafts for part in draft)
    if hears_videos:
        kinds += [("audio", param) for kind, param in kinds if kind == "video"]
    check_media(kinds, model, "messages")
    loaded: list[ChatMessage] = []
    for message, draft in zip(messages, drafts, strict=True):
        content: list[ContentPart] = [
            part if isinstance(part, TextPart) else await media.load(part, param, hears_videos=hears_videos)
            for part, param in draft
        ]
        loaded.append(ChatMessage(_ROLES[message.role], tuple(content), _calls(message)))
    return tuple(loaded[index] for index in _in_order_of_calls(messages))


def without_oldest(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...] | None:
    """Drops about a quarter of a prompt that did not fit. None if only the last message is left.

    Leading system messages stay.
    """
    kept = 0
    while kept < len(messages) and messages[kept].role == "system":
        kept += 1
    num_others = len(messages) - kept
    if num_others <= 1:
        return None
    rest = messages[kept + min(max(1, num_others // 4), num_others - 1) :]
    while len(rest) > 1 and rest[0].role == "tool":  # the result of a dropped call
        rest = rest[1:]
    return messages[:kept] + rest


def _check_number(messages: list[Message], model: ModelInfo) -> None:
    """Refuses what cannot fit before it costs event loop time: each message and call is at least a token."""
    number = len(messages) + sum(len(message.tool_calls or []) for message in messages)
    if number > model.max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {model.max_model_len} tokens, "
            f"but the request has {number} messages and calls.",
            param="messages",
            code="context_length_exceeded",
        )


def _check_results(messages: list[Message]) -> None:
    """Checks that each tool result answers a call of the preceding assistant message. A call without an
    id matches any result."""
    ids: set[str | None] = set()
    for index, message in enumerate(messages):
        if message.role != "tool":
            ids = {call.id for call in message.tool_calls or []} if message.role == "assistant" else set()
            continue
        param = f"messages[{index}]"
        if message.tool_call_id is None:
            raise missing_parameter(f"{param}.tool_call_id")
        if not ids:
            raise InvalidRequestError(
                "The result of a tool must follow the assistant's message that calls it.",
                param=f"{param}.role",
            )
        if message.tool_call_id not in ids and None not in ids:
            raise InvalidRequestError(
                f"There is no call '{message.tool_call_id[:64]}' in the assistant message before.",
                param=f"{param}.tool_call_id",
            )


def _calls(message: Message) -> tuple[ToolCall, ...]:
    if message.role != "assistant" or message.tool_calls is None:
        return ()
    return tuple(ToolCall(call.function.name, call.function.arguments or "") for call in message.tool_calls)


def _in_order_of_calls(messages: list[Message]) -> list[int]:
    """Message positions, with tool results sorted in the order of their calls, because the prompt has no
    call ids."""
    keys: list[tuple[int, int]] = []  # position of the preceding message, index of the call
    # Call indices by id; a duplicate id refers to the first call.
    numbers: dict[str | None, int] = {}
    calls: list[PastToolCall] = []
    for position, message in enumerate(messages):
        if message.role == "tool":
            keys.append((keys[-1][0], numbers.get(message.tool_call_id, len(calls))))
        else:
            calls = message.tool_calls or []
            numbers = {call.id: number for number, call in reversed(list(enumerate(calls)))}
            keys.append((position, -1))
    return sorted(range(len(messages)), key=keys.__getitem__)


def message_parts(
    message: Message, param: str, store: AnswerStore | None = None
) -> list[tuple[TextPart | MediaContent, str]]:
    """The content parts, with media not yet loaded, each with its request field. `param` is that of the
    message. Raises `InvalidRequestError`."""
    match message.content:
        case None | "" if message.role == "assistant":
            return [(TextPart(_spoken_or_refused(message, param, store)), param)]
        case None:
            raise missing_parameter(f"{param}.content")
        case str(text):
            return [(TextPart(text), param)]
        case parts:
            params = [f"{param}.content[{index}]" for index in range(len(parts))]
            return [(_draft_part(*part, message), part[1]) for part in zip(parts, params, strict=True)]


def _draft_part(
    part: TextContent | RefusalContent | MediaContent, param: str, message: Message
) -> TextPart | MediaContent:
    match part:
        case TextContent(text=text):
            return TextPart(text)
        case RefusalContent(refusal=text) if message.role == "assistant":
            return TextPart(text)
        case RefusalContent():
            cannot = "cannot hold a refusal"
        case _ if message.role in _MEDIA_ROLES:
            return part
        case _:
            cannot = "can hold text only"
    raise unsupported(f"Messages with the role '{message.role}' {cannot}.", f"{param}.type")


def _spoken_or_refused(message: Message, param: str, store: AnswerStore | None) -> str:
    """Text of an assistant message without content."""
    if message.audio is not None:
        kept = store.find(message.audio.id, "audio_") if store is not None else None
        transcript = kept.decode() if kept is not None else message.audio.transcript
        if transcript is None:
            raise InvalidRequestError(
                f"Audio '{message.audio.id[:64]}' was not found or has expired.",
                param=f"{param}.audio.id",
                code="audio_not_found",
            )
        return transcript
    if message.refusal is not None:
        return message.refusal
    if message.tool_calls:
        return ""
    if message.content is None:
        raise missing_parameter(f"{param}.content", f" (or '{param}.audio')")
    return ""


def media_kinds(parts: Iterable[tuple[TextPart | MediaContent, str]]) -> list[tuple[MediaKind, str]]:
    """Kind and request field of each part that is not text."""
    return [(_MEDIA_KINDS[part.type], param) for part, param in parts if not isinstance(part, TextPart)]


def check_media(parts: Iterable[tuple[MediaKind, str]], model: ModelInfo, param: str) -> None:
    """Raises `InvalidRequestError` for media that `model` does not accept. `parts` has the kind and request
    field of each part of one prompt; `param` is the field that contains them all."""
    num_parts: Counter[MediaKind] = Counter()
    for kind, part in parts:
        if kind not in model.input_modalities:
            raise unsupported(f"This model does not take {kind} input.", f"{part}.type")
        num_parts[kind] += 1
    for kind, number in num_parts.items():
        limit = model.max_media_per_prompt.get(kind)
        if limit is not None and number > limit:
            raise InvalidRequestError(
                f"At most {limit} {kind}(s) may be provided in one prompt.",
                param=param,
                code="too_many_media",
            )
