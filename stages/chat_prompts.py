"""Prompts of chats, for families whose chat template is the checkpoint's own.

The families' templates support tools in part or not at all, but their tokenizers have the tags of calls as
tokens. So tools become part of the system message, calls part of the assistant's and results part of the
user's, as the chat templates of Qwen's text models write them; the checkpoint's own template does the rest.
Source: `chat_template` in tokenizer_config.json of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.protocol.tool_calls import CALL_BEGIN, CALL_END, CALL_TAIL, call_head
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ContentPart,
    FunctionTool,
    ImagePart,
    MediaKind,
    Prompt,
    TextPart,
    ToolCall,
    VideoPart,
)

_TOOLS = """\
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


_A_TEXT = "a text of no template"
_REASONING_END = "</think>"


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
    """Renders with a checkpoint's processor, which the reference uses too, or a text model's tokenizer."""

    input_modalities: tuple[MediaKind, ...]
    """Of images and videos, those that the processor takes."""

    def __init__(self, model_dir: Path, *, tools_system_prompt: str | None) -> None:
        """`tools_system_prompt` precedes tools in a chat that has no system message."""
        from transformers import AutoProcessor, ProcessorMixin

        processor: Any = AutoProcessor.from_pretrained(model_dir, trust_remote_code=False)
        tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
        self._template: Any = processor if processor.chat_template else tokenizer
        if not self._template.chat_template:
            raise ConfigError(
                f"{model_dir} has no chat template (chat_template.jinja): use a model for chats"
            )
        self._tokens = tuple(tokenizer.get_added_vocab())
        self._takes_parts = _takes_parts(self._template)
        kinds: tuple[MediaKind, ...] = ("image", "video")
        self.input_modalities = tuple(
            kind
            for kind in kinds
            if self._takes_parts and getattr(processor, f"{kind}_processor", None) is not None
        )
        self._tools_system_prompt = tools_system_prompt

    def render(self, messages: Sequence[ChatMessage], *, tools: Sequence[FunctionTool] = ()) -> Prompt:
        """Raises `InvalidRequestError` if the template refuses the chat or the text cannot be encoded."""
        plain = PlainText(self._tokens)
        messages = with_tools(
            [_marked(message, plain) for message in messages], tools, plain.marked, self._tools_system_prompt
        )
        conversation = [{"role": message.role, "content": self._content(message)} for message in messages]
        pieces = rendered_pieces(self._template, conversation, plain)
        parts = [part for message in messages for part in message.content]
        videos = [part for part in parts if isinstance(part, VideoPart)]
        return Prompt(
            text="".join(pieces),
            add_special_tokens=False,  # the template has them
            audios=tuple((p.samples, p.sample_rate_hz) for p in parts if isinstance(p, AudioPart)),
            images=tuple(p.pixels for p in parts if isinstance(p, ImagePart)),
            videos=tuple(videos),
            processor_kwargs={"do_sample_frames": False} if videos else {},
            pieces=pieces if len(pieces) > 1 else (),
        )

    def _content(self, message: ChatMessage) -> str | list[dict[str, str]]:
        if self._takes_parts:
            return [template_part(part) for part in joined_texts(message.content)]
        return "".join(part.text for part in message.content if isinstance(part, TextPart))


def _takes_parts(template: Any) -> bool:
    """Whether it renders lists of parts. Some templates of models of text write them as Python does, some
    leave them out, some fail."""
    conversation = [{"role": "user", "content": [{"type": "text", "text": _A_TEXT}]}]
    try:
        rendered: str = template.apply_chat_template(conversation, tokenize=False)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return _A_TEXT in rendered and "'type'" not in rendered


def rendered_pieces(template: Any, conversation: list[dict[str, Any]], plain: PlainText) -> tuple[str, ...]:
    """`template`: a processor or a tokenizer of transformers. Raises `InvalidRequestError` if it refuses the
    chat or the text cannot be encoded."""
    try:
        rendered: str = template.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        rendered.encode()
    except TemplateError as exc:  # e.g. on an odd order of roles
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {exc}", param="messages"
        ) from exc
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"the messages hold text that cannot be encoded: {exc}", param="messages"
        ) from exc
    return plain.pieces(rendered)


def joined_texts(parts: Iterable[ContentPart]) -> list[ContentPart]:
    """Joins adjacent texts. Some templates make a turn of each part of a system message."""
    joined: list[ContentPart] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, TextPart)):
        if is_text:
            joined.append(TextPart("".join(part.text for part in group if isinstance(part, TextPart))))
        else:
            joined += group
    return joined


def _marked(message: ChatMessage, plain: PlainText) -> ChatMessage:
    """Marks joined texts, as the template joins them: together they may spell a token. Leaves out the
    reasoning of earlier answers, which templates do not recognise once its tags are marked."""
    parts = []
    for part in joined_texts(message.content):
        if isinstance(part, TextPart):
            is_answer = message.role == "assistant" and _REASONING_END in part.text
            text = part.text.rpartition(_REASONING_END)[2].lstrip("\n") if is_answer else part.text
            part = TextPart(plain.marked(text))
        parts.append(part)
    return replace(message, content=tuple(parts))


def template_part(part: ContentPart) -> dict[str, str]:
    """The part as the chat template sees it; the processor gets the media."""
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}


def with_tools(
    messages: Sequence[ChatMessage],
    tools: Sequence[FunctionTool],
    marked: Callable[[str], str],
    system_prompt: str | None,
) -> tuple[ChatMessage, ...]:
    """Rewrites a chat without calls and the role "tool", and puts any tools in its first message.

    Consecutive results become one message. `marked` is applied to the caller's text in calls and tools, but
    not to the tags around it, which are tokens. `system_prompt` precedes tools if there is no system message.
    """
    written: list[ChatMessage] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            written.append(ChatMessage("user", _tool_results(list(group))))
        else:
            written += [_without_calls(message, marked) for message in group]
    if not tools:
        return tuple(written)
    return _with_system_tools(written, [marked(tool.definition) for tool in tools], system_prompt)


def _with_system_tools(
    messages: Sequence[ChatMessage], tools: Sequence[str], system_prompt: str | None
) -> tuple[ChatMessage, ...]:
    text = _TOOLS.format(definitions="\n".join(tools), begin=CALL_BEGIN, end=CALL_END)
    if messages and messages[0].role == "system":
        first = messages[0].content
        return (ChatMessage("system", (*first, TextPart("\n\n" + text))), *messages[1:])
    before = "" if system_prompt is None else system_prompt + "\n\n"
    return (ChatMessage("system", (TextPart(before + text),)), *messages)


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


def language_name(code: str) -> str:
    """English name of an ISO 639-1 code. Raises `InvalidRequestError` if transformers' Whisper list lacks
    it."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    name: str | None = LANGUAGES.get(code.lower())
    if name is None:
        raise InvalidRequestError(
            f"Unknown language '{code[:64]}'; known are {', '.join(sorted(LANGUAGES))}.", param="language"
        )
    return name.title()
