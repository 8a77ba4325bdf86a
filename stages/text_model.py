"""What the server needs of a text model: its chat template and its end tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omni_server.config.checkpoint_files import read_json_object
from omni_server.errors import ConfigError
from omni_server.family import Prompt
from omni_server.types import ChatMessage, FunctionTool, TextPart
from stages.chat_prompts import PlainText, rendered_pieces, with_tools


class TextModel:
    """Any language model of vLLM's whose folder has a chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` without a chat template or an end token."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{folder} has no chat template (chat_template.jinja): use a model for chats")
        self._tokens = tuple(self._tokenizer.get_added_vocab())
        self.stop_ids = _stop_ids(folder)

    def prompt(self, messages: Sequence[ChatMessage], *, tools: Sequence[FunctionTool] = ()) -> Prompt:
        """Raises `InvalidRequestError` if the template refuses the chat or the text cannot be encoded."""
        plain = PlainText(self._tokens)
        marked = [
            replace(message, content=(TextPart(plain.marked(_text_of(message))),)) for message in messages
        ]
        conversation = [
            {"role": message.role, "content": _text_of(message)}
            for message in with_tools(marked, tools, plain.marked, None)
        ]
        pieces = rendered_pieces(self._tokenizer, conversation, plain)
        return Prompt("".join(pieces), pieces=pieces if len(pieces) > 1 else ())


def _text_of(message: ChatMessage) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))


def _stop_ids(folder: Path) -> tuple[int, ...]:
    """Those of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = read_json_object(path).get("eos_token_id") if path.is_file() else None
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids:
            return tuple(map(int, ids))
    raise ConfigError(f"{folder}: neither generation_config.json nor config.json names an eos_token_id")
