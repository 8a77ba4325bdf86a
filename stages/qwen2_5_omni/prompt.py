"""Renders a chat with the checkpoint's own template, as the reference's processor does."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.family import Prompt
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ContentPart,
    FunctionTool,
    ImagePart,
    TextPart,
    VideoPart,
)
from stages.qwen2_5_omni.tool_prompt import with_tools

SPEECH_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""The model card asks for exactly this text when speech is wanted."""


class PlainText:
    """Callers' text among what the chat template writes: it may spell special tokens, and must not become
    them.

    For one prompt. What is marked before it is rendered can be cut afterwards, so that the tokenizer never
    sees all of a token that a caller has spelled.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        """`tokens`: those that the tokenizer finds in text before anything else."""
        self._tokens = [token for token in tokens if len(token) > 1]
        # Nobody can have sent it. Letters and digits only: JSON leaves it as it is.
        self._mark = secrets.token_hex(16)

    def marked(self, text: str) -> str:
        """With a mark behind the first character of every token in it."""
        for token in self._tokens:
            while token in text:  # again only for one that overlaps itself
                text = text.replace(token, token[0] + self._mark + token[1:])
        return text

    def pieces(self, rendered: str) -> tuple[str, ...]:
        """`rendered`, without the marks, cut at them."""
        return tuple(rendered.split(self._mark))


class PromptRenderer:
    """Holds the checkpoint's processor (`Qwen2_5OmniProcessor`)."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoProcessor

        self._processor: Any = AutoProcessor.from_pretrained(model_dir)
        if not self._processor.chat_template:
            raise ConfigError(f"{model_dir} has no chat template (chat_template.json)")
        self._tokens = tuple(self._processor.tokenizer.get_added_vocab())

    def render(
        self, messages: Sequence[ChatMessage], *, speech: bool, tools: Sequence[FunctionTool] = ()
    ) -> Prompt:
        """Raises `InvalidRequestError` if the template refuses the chat, or its text cannot be encoded."""
        if speech and not any(message.role == "system" for message in messages):
            messages = (ChatMessage("system", (TextPart(SPEECH_SYSTEM_PROMPT),)), *messages)
        plain = PlainText(self._tokens)
        messages = with_tools([_marked(message, plain) for message in messages], tools, plain.marked)
        conversation = [
            {"role": message.role, "content": [_template_part(part) for part in message.content]}
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
        _check_encoding(text)
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
    """Texts that follow each other become one, as the template writes them: together they may spell a
    token."""
    parts: list[ContentPart] = []
    for is_text, group in groupby(message.content, lambda part: isinstance(part, TextPart)):
        if is_text:
            parts.append(
                TextPart(plain.marked("".join(part.text for part in group if isinstance(part, TextPart))))
            )
        else:
            parts += group
    return replace(message, content=tuple(parts))


def _check_encoding(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"the messages hold text that cannot be encoded: {exc}", param="messages"
        ) from exc


def _template_part(part: ContentPart) -> dict[str, str]:
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
    """The processor takes one frame rate for all videos; it sets the time axis of the positions."""
    rates = {video.fps for video in videos}
    if len(rates) > 1:
        raise InvalidRequestError(
            f"the videos of one request must have one frame rate, not {', '.join(map(str, sorted(rates)))}",
            param="messages",
        )
    return {"fps": rates.pop(), "do_sample_frames": False} if rates else {}
