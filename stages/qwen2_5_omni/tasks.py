"""The chats by which Qwen2.5-Omni is given the tasks of the API's audio routes."""

from omni_server.types import ChatMessage, ReadAloud, Task, TextPart, Transcribe

# The prompts of the model's authors for these tasks: "Universal Audio Understanding" among the cookbooks of
# QwenLM/Qwen2.5-Omni. Theirs ask for text without punctuation marks, as their benchmarks have it.
_RECOGNITION_SYSTEM_PROMPT = "You are a speech recognition model."
_TRANSLATION_SYSTEM_PROMPT = "You are a speech translation model."


def task_messages(task: Task) -> tuple[ChatMessage, ...]:
    match task:
        case ReadAloud():
            return _read_aloud(task)
        case Transcribe():
            return _transcribe(task)


def _read_aloud(task: ReadAloud) -> tuple[ChatMessage, ...]:
    """Without a system message: the renderer puts the one that speech needs."""
    manner = f"How to read it: {task.instructions}\n\n" if task.instructions is not None else ""
    request = "Read the following text aloud, word for word, and say nothing else.\n\n"
    return (ChatMessage("user", (TextPart(request + manner + task.text),)),)


def _transcribe(task: Transcribe) -> tuple[ChatMessage, ...]:
    language = _language_name(task.language) if task.language is not None else None
    if task.to_english:
        system = _TRANSLATION_SYSTEM_PROMPT
        spoken = f"{language} speech" if language is not None else "speech"
        wanted = f"Listen to the provided {spoken} and produce a translation in English text."
    else:
        system = _RECOGNITION_SYSTEM_PROMPT
        spoken = f"{language} audio" if language is not None else "audio"
        wanted = f"Transcribe the {spoken} into text, in the language that is spoken."
    if task.hint is not None:
        wanted += f"\nThese words may help to understand it; do not repeat them where they are not said:\n{task.hint}"
    return (
        ChatMessage("system", (TextPart(system),)),
        ChatMessage("user", (task.audio, TextPart(wanted))),
    )


def _language_name(code: str) -> str:
    """English name of an ISO 639-1 code; the code itself where transformers' list, Whisper's, lacks it."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    name: str | None = LANGUAGES.get(code.lower())
    return code if name is None else name.title()
