"""Prompts for Qwen3-Omni: chats, and the chats that express the tasks of the API's audio routes.

The checkpoint's template adds no system message, and speech needs none. The authors' model card recommends
one for voice chats, which limits answers to 50 spoken words; callers who want that can send it.
"""

from collections.abc import Sequence
from pathlib import Path

from omni_server.family import Prompt
from omni_server.types import ChatMessage, FunctionTool, Task, TextPart, Transcribe
from stages import chat_prompts
from stages.chat_prompts import language_name


class PromptRenderer:
    """Renders with the checkpoint's `Qwen3OmniMoeProcessor`.

    Its template can write tools, but then takes the system message as plain text only. So tools are written
    here, in the same words.
    """

    def __init__(self, model_dir: Path) -> None:
        self._renderer = chat_prompts.PromptRenderer(model_dir, tools_system_prompt=None)

    def render(self, messages: Sequence[ChatMessage], *, tools: Sequence[FunctionTool] = ()) -> Prompt:
        """Raises `InvalidRequestError` if the template refuses the chat or the text cannot be encoded."""
        return self._renderer.render(messages, tools=tools)


def task_messages(task: Task) -> tuple[ChatMessage, ...]:
    if isinstance(task, Transcribe):
        return _transcribe(task)
    manner = f"How to read it: {task.instructions}\n\n" if task.instructions is not None else ""
    request = "Read the following text aloud, word for word, and say nothing else.\n\n"
    return (ChatMessage("user", (TextPart(request + manner + task.text),)),)


def _transcribe(task: Transcribe) -> tuple[ChatMessage, ...]:
    """The authors' prompts for these tasks, from the evaluation section of the model card: no system message,
    and the audio before the text. There, the language is always given."""
    language = f"{language_name(task.language)} " if task.language is not None else ""
    if task.to_english:
        wanted = f"Listen to the provided {language}speech and produce a translation in English text."
    elif language:
        wanted = f"Transcribe the {language}audio into text."
    else:
        wanted = "Transcribe the audio into text, in the language that is spoken."
    if task.hint is not None:
        wanted += (
            "\nThese words may help to understand it; do not repeat them where they are not "
            f"said:\n{task.hint}"
        )
    return (ChatMessage("user", (task.audio, TextPart(wanted))),)
