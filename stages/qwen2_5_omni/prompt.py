"""Prompts for Qwen2.5-Omni: chats, rendered with the checkpoint's own template as the reference's processor
does it, tools, and the chats that express the tasks of the API's audio routes.

Qwen2.5-Omni's template does not support tools, but its thinker is a Qwen2.5 whose tokenizer has the tags of
calls as tokens. So tools become part of the system message, calls part of the assistant's and results part of
the user's, as the chat template of Qwen2.5's text models writes them; the checkpoint's own template does the
rest. Source: `chat_template` in tokenizer_config.json of Qwen/Qwen2.5-7B-Instruct.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.family import Prompt
from omni_server.protocol.tool_calls import CALL_BEGIN, CALL_END, CALL_TAIL, call_head
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ContentPart,
    FunctionTool,
    ImagePart,
    Task,
    TextPart,
    ToolCall,
    Transcribe,
    VideoPart,
)

SPEECH_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""The model card requires exactly this text for speech output."""

_DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
"""The checkpoint's template inserts it if there is no system message."""

_TOOLS = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{definitions}
</tools>

For each function call, return a json object with function name and arguments within {begin}{end} XML tags:
{begin}
{{"name": <function-name>, "arguments": <args-json-object>}}
{end}"""

# The model authors' prompts for these tasks, from "Universal Audio Understanding" in the cookbooks of
# QwenLM/Qwen2.5-Omni. The originals ask for text without punctuation marks, to match their benchmarks.
_RECOGNITION_SYSTEM_PROMPT = "You are a speech recognition model."
_TRANSLATION_SYSTEM_PROMPT = "You are a speech translation model."


class PlainText:
    """Keeps callers' text within a chat template from turning into the special tokens that it spells.

    Use one instance per prompt. Text that is marked before rendering can be cut afterwards, so that the
    tokenizer never sees the whole of a token that a caller spelled.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        """`tokens`: those that the tokenizer looks for in text first."""
        self._tokens = [token for token in tokens if len(token) > 1]
        # No caller can guess it. JSON leaves letters and digits unchanged.
        self._mark = secrets.token_hex(16)

    def marked(self, text: str) -> str:
        """Returns `text` with a mark after each token's first character."""
        for token in self._tokens:
            while token in text:  # repeats only if it overlaps itself
                text = text.replace(token, token[0] + self._mark + token[1:])
        return text

    def pieces(self, rendered: str) -> tuple[str, ...]:
        """Splits `rendered` at the marks."""
        return tuple(rendered.split(self._mark))


class PromptRenderer:
    """Renders with the checkpoint's `Qwen2_5OmniProcessor`."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoProcessor

        self._processor: Any = AutoProcessor.from_pretrained(model_dir)
        if not self._processor.chat_template:
            raise ConfigError(f"{model_dir} has no chat template (chat_template.json)")
        self._tokens = tuple(self._processor.tokenizer.get_added_vocab())

    def render(
        self, messages: Sequence[ChatMessage], *, speech: bool, tools: Sequence[FunctionTool] = ()
    ) -> Prompt:
        """Raises `InvalidRequestError` if the template refuses the chat or the text cannot be encoded."""
        if speech and not any(message.role == "system" for message in messages):
            messages = (ChatMessage("system", (TextPart(SPEECH_SYSTEM_PROMPT),)), *messages)
        plain = PlainText(self._tokens)
        messages = with_tools([_marked(message, plain) for message in messages], tools, plain.marked)
        conversation = [
            {"role": message.role, "content": [template_part(part) for part in message.content]}
            for message in messages
        ]
        try:
            rendered: str = self._processor.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as exc:  # jinja2 errors raised by the template itself, e.g. on an odd order of roles
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {exc}", param="messages"
            ) from exc
        pieces = plain.pieces(rendered)
        text = "".join(pieces)
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequestError(
                f"the messages hold text that cannot be encoded: {exc}", param="messages"
            ) from exc
        parts = [part for message in messages for part in message.content]
        videos = [part for part in parts if isinstance(part, VideoPart)]
        return Prompt(
            text=text,
            audios=tuple((p.samples, p.sample_rate_hz) for p in parts if isinstance(p, AudioPart)),
            images=tuple(p.pixels for p in parts if isinstance(p, ImagePart)),
            videos=tuple(p.frames for p in videos),
            processor_kwargs=_video_kwargs(videos),
            pieces=pieces if len(pieces) > 1 else (),
        )


def _marked(message: ChatMessage, plain: PlainText) -> ChatMessage:
    """Joins adjacent texts, as the template does: together they may spell a token."""
    parts: list[ContentPart] = []
    for is_text, group in groupby(message.content, lambda part: isinstance(part, TextPart)):
        if is_text:
            text = "".join(part.text for part in group if isinstance(part, TextPart))
            parts.append(TextPart(plain.marked(text)))
        else:
            parts += group
    return replace(message, content=tuple(parts))


def template_part(part: ContentPart) -> dict[str, str]:
    """The part as the chat template sees it; the processor gets the media."""
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case AudioPart():
            return {"type": "audio"}
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}


def _video_kwargs(videos: Sequence[VideoPart]) -> dict[str, object]:
    """The processor accepts one frame rate for all videos, which sets the positions' time axis."""
    rates = {video.fps for video in videos}
    if len(rates) > 1:
        raise InvalidRequestError(
            f"the videos of one request must have one frame rate, not {', '.join(map(str, sorted(rates)))}",
            param="messages",
        )
    return {"fps": rates.pop(), "do_sample_frames": False} if rates else {}


def with_tools(
    messages: Sequence[ChatMessage], tools: Sequence[FunctionTool], marked: Callable[[str], str]
) -> tuple[ChatMessage, ...]:
    """Rewrites a chat without calls and the role "tool", and puts any tools in its first message.

    Consecutive results become one message. `marked` is applied to the caller's text in calls and tools, but
    not to the tags around it, which are tokens.
    """
    written: list[ChatMessage] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            written.append(ChatMessage("user", _tool_results(list(group))))
        else:
            written += [_without_calls(message, marked) for message in group]
    return tuple(
        _with_system_tools(written, [marked(tool.definition) for tool in tools]) if tools else written
    )


def _with_system_tools(messages: list[ChatMessage], tools: Sequence[str]) -> list[ChatMessage]:
    text = TextPart(_TOOLS.format(definitions="\n".join(tools), begin=CALL_BEGIN, end=CALL_END))
    if messages and messages[0].role == "system":
        return [ChatMessage("system", (*messages[0].content, text)), *messages[1:]]
    return [ChatMessage("system", (TextPart(_DEFAULT_SYSTEM_PROMPT), text)), *messages]


def _without_calls(message: ChatMessage, marked: Callable[[str], str]) -> ChatMessage:
    if not message.tool_calls:
        return message
    calls = "\n".join(_written_call(call, marked) for call in message.tool_calls)
    has_text = any(not isinstance(part, TextPart) or part.text for part in message.content)
    return ChatMessage(message.role, (*message.content, TextPart("\n" + calls if has_text else calls)))


def _written_call(call: ToolCall, marked: Callable[[str], str]) -> str:
    """Writes arguments in the layout of the model's training data, or unchanged if they are not JSON, nest
    too deeply or contain an escape that encodes no character."""
    try:
        arguments = json.dumps(json.loads(call.arguments or "{}"), ensure_ascii=False)
        arguments.encode()
    except (ValueError, RecursionError):
        arguments = call.arguments
    return call_head(marked(call.name)) + marked(arguments) + CALL_TAIL


def _tool_results(messages: list[ChatMessage]) -> tuple[ContentPart, ...]:
    parts: list[ContentPart] = []
    for position, message in enumerate(messages):
        parts.append(TextPart(("\n" if position else "") + "<tool_response>\n"))
        parts += message.content
        parts.append(TextPart("\n</tool_response>"))
    return tuple(parts)


def task_messages(task: Task) -> tuple[ChatMessage, ...]:
    if isinstance(task, Transcribe):
        return _transcribe(task)
    # No system message: the renderer adds the one for speech.
    manner = f"How to read it: {task.instructions}\n\n" if task.instructions is not None else ""
    request = "Read the following text aloud, word for word, and say nothing else.\n\n"
    return (ChatMessage("user", (TextPart(request + manner + task.text),)),)


def _transcribe(task: Transcribe) -> tuple[ChatMessage, ...]:
    language = f"{_language_name(task.language)} " if task.language is not None else ""
    if task.to_english:
        system = _TRANSLATION_SYSTEM_PROMPT
        wanted = f"Listen to the provided {language}speech and produce a translation in English text."
    else:
        system = _RECOGNITION_SYSTEM_PROMPT
        wanted = f"Transcribe the {language}audio into text, in the language that is spoken."
    if task.hint is not None:
        wanted += (
            "\nThese words may help to understand it; do not repeat them where they are not "
            f"said:\n{task.hint}"
        )
    return (
        ChatMessage("system", (TextPart(system),)),
        ChatMessage("user", (task.audio, TextPart(wanted))),
    )


def _language_name(code: str) -> str:
    """English name of an ISO 639-1 code, or the code itself if transformers' Whisper list lacks it."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    name: str | None = LANGUAGES.get(code.lower())
    return code if name is None else name.title()
