"""Converts a request body to an `OmniRequest`; checks rules across fields and those of the model."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from omni_server.api.constraints import structured_output, tool_use
from omni_server.api.sampling import stage_sampling
from omni_server.api.schemas import (
    MODALITIES,
    ChatCompletionRequest,
    Message,
    RefusalContent,
    TextContent,
    TextFields,
)
from omni_server.api.validation import missing_parameter, unsupported, unsupported_choice
from omni_server.api.voice_store import VoiceStore
from omni_server.api.voices import speech_output
from omni_server.audio.formats import AUDIO_FORMATS, AudioFormat, parse_format
from omni_server.errors import InvalidRequestError, ModelNotFoundError
from omni_server.types import ChatMessage, ModelInfo, OmniRequest, SpeechOutput

logger = logging.getLogger(__name__)

LoadMessages = Callable[[bool], Awaitable[tuple[ChatMessage, ...]]]
"""Loads a request's messages, given whether the audio tracks of videos are heard."""

_MAX_CHOICES_WITH_MEDIA = 8
"""Each choice is a separate request: its media are processed, stored and sent to the engine again."""


async def parse_chat_request(
    body: ChatCompletionRequest,
    request_id: str,
    model: ModelInfo,
    voices: VoiceStore,
    load: LoadMessages,
) -> tuple[tuple[OmniRequest, ...], AudioFormat | None]:
    """Returns one request per choice, and the speech format or None without speech.

    Raises `InvalidRequestError`, or what `load` raises. Cheap checks run first; media are loaded last.
    """
    check_text_fields(body)
    if model.text_stage is None and not model.only_generates_images:
        raise unsupported(f"The model '{model.name}' does not answer chats.", "model")
    output = _speech_output(body, model, voices)
    num_choices = body.n if body.n is not None else 1
    if num_choices > 1 and output is not None:
        raise unsupported("Only n=1 is supported with audio.", "n")
    if num_choices > _MAX_CHOICES_WITH_MEDIA and _has_media(body.messages):
        raise InvalidRequestError(
            f"Invalid 'n': expected a value <= {_MAX_CHOICES_WITH_MEDIA} "
            "where 'messages' contain audio or images.",
            param="n",
            code="integer_above_max_value",
        )
    tools = tool_use(body)
    structure = structured_output(body, with_speech=output is not None, with_tools=tools is not None)
    if tools is not None and tools.is_required:
        output = None  # no speech for calls
    speech, audio_format = output if output is not None else (None, None)
    sampling = stage_sampling(body, model, with_speech=speech is not None)
    hears_videos = _hears_videos(body, model)
    request = OmniRequest(
        request_id=request_id,
        messages=await load(hears_videos),
        speech=speech,
        sampling=sampling,
        tools=tools,
        structured_output=structure,
        max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
    )
    requests = (request,) if num_choices == 1 else choices_of(request, num_choices, model.text_stage)
    return requests, audio_format


def check_text_fields(body: TextFields) -> None:
    check_extra_fields(body.model_extra, _HARMLESS_VALUES, _HINTS)
    if body.stream_options is not None and body.stream is not True:
        raise InvalidRequestError(
            "'stream_options' is allowed only where 'stream' is true.", param="stream_options"
        )


def choices_of(request: OmniRequest, number: int, text_stage: str | None) -> tuple[OmniRequest, ...]:
    """Gives each choice its own id and seed, like vLLM's parallel sampling, and all the same
    deadline."""
    began_at = time.monotonic()
    choices = []
    for index in range(number):
        sampling = dict(request.sampling)
        if text_stage is not None:
            text = sampling[text_stage]
            seed = None if text.seed is None else (text.seed + index + 2**63) % 2**64 - 2**63
            sampling[text_stage] = replace(text, seed=seed)
        choice = replace(
            request, request_id=f"{request.request_id}-{index}", sampling=sampling, began_at=began_at
        )
        choices.append(replace(choice, is_sibling_choice=index > 0))
    return tuple(choices)


def _has_media(messages: Sequence[Message]) -> bool:
    return any(
        not isinstance(part, TextContent | RefusalContent)
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


def check_model(name: str | None, model: ModelInfo) -> None:
    """Raises `ModelNotFoundError` unless `name` is missing or one of the served names."""
    if name is not None and name != model.name and name not in model.aliases:
        served = ", ".join(f"'{served}'" for served in (model.name, *model.aliases))
        raise ModelNotFoundError(
            f"The model '{name[:200]}' does not exist. This server serves: {served}.", param="model"
        )


def check_text_model(name: str | None, model: ModelInfo) -> None:
    """Raises what `check_model` raises, and `InvalidRequestError` for a model that writes no text."""
    check_model(name, model)
    if model.text_stage is None:
        raise unsupported(f"The model '{model.name}' writes no text.", "model")


def check_transcribes(model: ModelInfo) -> None:
    """Raises `InvalidRequestError` for a model that cannot."""
    if "audio" not in model.input_modalities:
        raise unsupported("This model does not take audio input.", "model")


def _speech_output(
    body: ChatCompletionRequest, model: ModelInfo, voices: VoiceStore
) -> tuple[SpeechOutput, AudioFormat] | None:
    if body.modalities is None:
        return None
    for modality in body.modalities:
        if modality not in MODALITIES:
            supported = ", ".join(f"'{name}'" for name in MODALITIES)
            raise InvalidRequestError(
                f"Invalid value: '{modality[:64]}'. Supported values are: {supported}.",
                param="modalities",
            )
    if "audio" not in body.modalities:
        return None
    if not model.voices:
        raise unsupported("This model answers with text only.", "modalities")
    if body.audio is None:
        raise missing_parameter("audio")
    if body.audio.voice is None:
        raise missing_parameter("audio.voice")
    if body.audio.format is None:
        raise missing_parameter("audio.format")
    audio_format = parse_format(body.audio.format)
    if audio_format is None:
        raise unsupported_choice("audio.format", body.audio.format, AUDIO_FORMATS)
    # Random generators often refuse negative seeds, which OpenAI's int64 allows.
    seed = body.seed % 2**63 if body.seed is not None else None
    return replace(speech_output(body.audio.voice, model, voices), seed=seed), audio_format


def _hears_videos(body: ChatCompletionRequest, model: ModelInfo) -> bool:
    """Whether the audio tracks of videos are heard."""
    options = body.mm_processor_kwargs
    if options is None or not options.use_audio_in_video:
        return False
    if not model.hears_videos:
        raise unsupported(
            f"The model '{model.name}' does not hear the audio track of a video. "
            "Send the audio as an audio part beside the video.",
            "mm_processor_kwargs.use_audio_in_video",
        )
    return True


def check_extra_fields(
    fields: Mapping[str, object] | None,
    harmless_values: Mapping[str, Sequence[object]],
    hints: Mapping[str, str],
) -> None:
    """Refuses unimplemented fields that would change the answer; ignores all others."""
    for name, value in (fields or {}).items():
        if name not in harmless_values:
            logger.debug("ignoring the unknown field %.64r", name)
        elif not any(value is harmless or value == harmless for harmless in harmless_values[name]):
            hint = hints.get(name, f"'{name}' is not supported with this value by this server.")
            raise unsupported(hint, name)


_HARMLESS_VALUES: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (None,),
    "functions": (None,),
    "function_call": (None, "none"),
    "use_beam_search": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "truncate_prompt_tokens": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "prompt_embeds": (None,),
}
"""Fields of OpenAI and vLLM that change the answer, with the values that have no effect."""

_HINTS = {
    "functions": "'functions' is not supported; use 'tools' instead.",
    "function_call": "'function_call' is not supported; use 'tool_choice' instead.",
}
