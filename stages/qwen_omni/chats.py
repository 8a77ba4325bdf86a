"""The chats of both families in the server process, and the tasks of the API's audio routes in them."""

from collections.abc import Collection, Sequence
from typing import ClassVar

from omni_server.family import FamilyModel
from omni_server.types import ChatMessage, FunctionTool, Output, Prompt, Task, TextPart, Transcribe
from stages.chat_prompts import PromptRenderer, language_name


class QwenOmniModel(FamilyModel):
    """What the families have in common."""

    input_modalities = ("audio", "image", "video")
    hears_videos = True
    recognition_request: ClassVar[str]
    """Asks for the text of a recording in `{language}`."""
    _renderer: PromptRenderer
    _dtype: str

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        return self._renderer.render(messages, tools=tools)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        if isinstance(task, Transcribe):
            return (ChatMessage("user", (task.audio, TextPart(self._transcription_request(task)))),)
        manner = f"How to read it: {task.instructions}\n\n" if task.instructions is not None else ""
        request = "Read the following text aloud, word for word, and say nothing else.\n\n"
        return (ChatMessage("user", (TextPart(request + manner + task.text),)),)

    def _transcription_request(self, task: Transcribe) -> str:
        language = None if task.language is None else language_name(task.language)
        if task.to_english:
            speech = "speech" if language is None else f"{language} speech"
            request = f"Listen to the provided {speech} and produce a translation in English text."
        elif language is None:
            request = "Transcribe the audio into text, in the language that is spoken."
        else:
            request = self.recognition_request.format(language=language)
        if task.hint is not None:
            request += (
                "\nThese words may help to understand it; do not repeat them where they are not "
                f"said:\n{task.hint}"
            )
        return request

    def dtype_name(self) -> str:
        return self._dtype
