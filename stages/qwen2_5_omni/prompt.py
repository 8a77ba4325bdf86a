"""Prompts for Qwen2.5-Omni: chats, and the chats that express the tasks of the API's audio routes."""

from collections.abc import Sequence
from pathlib import Path

from omni_server.family import Prompt
from omni_server.types import ChatMessage, FunctionTool, Task, TextPart, Transcribe
from stages import chat_prompts
from stages.chat_prompts import language_name

SPEECH_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""The model card requires exactly this text for speech output."""

_DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
"""The checkpoint's template inserts it if there is no system message."""

# The model authors' prompts for these tasks, from "Universal Audio Understanding" in the cookbooks of
# QwenLM/Qwen2.5-Omni. The originals ask for text without punctuation marks, to match their benchmarks.
_RECOGNITION_SYSTEM_PROMPT = "You are a speech recognition model."
_TRANSLATION_SYSTEM_PROMPT = "You are a speech translation model."


class PromptRenderer:
    """Renders with the checkpoint's `Qwen2_5OmniProcessor`. Its template does not support tools."""

    def __init__(self, model_dir: Path) -> None:
        self._renderer = chat_prompts.PromptRenderer(model_dir, tools_system_prompt=_DEFAULT_SYSTEM_PROMPT)

    def render(
        self, messages: Sequence[ChatMessage], *, speech: bool, tools: Sequence[FunctionTool] = ()
    ) -> Prompt:
        """Raises `InvalidRequestError` if the template refuses the chat or the text cannot be encoded."""
        if speech and not any(message.role == "system" for message in messages):
            messages = (ChatMessage("system", (TextPart(SPEECH_SYSTEM_PROMPT),)), *messages)
        return self._renderer.render(messages, tools=tools)


def task_messages(task: Task) -> tuple[ChatMessage, ...]:
    if isinstance(task, Transcribe):
        return _transcribe(task)
    # No system message: the renderer adds the one for speech.
    manner = f"How to read it: {task.instructions}\n\n" if task.instructions is not None else ""
    request = "Read the following text aloud, word for word, and say nothing else.\n\n"
    return (ChatMessage("user", (TextPart(request + manner + task.text),)),)


def _transcribe(task: Transcribe) -> tuple[ChatMessage, ...]:
    language = f"{language_name(task.language)} " if task.language is not None else ""
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
