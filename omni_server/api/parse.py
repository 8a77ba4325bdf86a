"""A request body as an `OmniRequest`: the rules between fields, and those that depend on the model."""

import logging
from dataclasses import dataclass

from omni_server.api.audio_history import AudioHistory
from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import load_messages
from omni_server.api.sampling import stage_sampling
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.voices import resolve_voice
from omni_server.audio.formats import AUDIO_FORMATS, STREAMABLE_FORMATS, AudioFormat, parse_format
from omni_server.errors import InvalidRequestError, ModelNotFoundError
from omni_server.types import ModelInfo, OmniRequest, SpeechOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatTurn:
    """What to generate, and how to answer."""

    request: OmniRequest
    audio_format: AudioFormat | None
    """None where no speech is wanted."""
    stream: bool
    include_usage: bool


async def parse_chat_request(
    body: ChatCompletionRequest, request_id: str, model: ModelInfo, media: MediaLoader, history: AudioHistory
) -> ChatTurn:
    """Raises `InvalidRequestError`, `ModelNotFoundError`, or `OverloadedError` from loading media. Checks go from
    cheap to expensive: media come last."""
    check_model(body.model, model)
    _check_extra_fields(body)
    stream = body.stream is True
    if body.stream_options is not None and not stream:
        raise InvalidRequestError("'stream_options' is allowed only where 'stream' is true.", param="stream_options")
    if body.n is not None and body.n > 1:
        raise InvalidRequestError("Only n=1 is supported.", param="n", code="unsupported_value")
    if body.stage_sampling is not None and body.stage_sampling.talker is not None and not model.voices:
        raise InvalidRequestError(
            "Unknown parameter: 'stage_sampling.talker'. The served model has no talker.",
            param="stage_sampling.talker",
            code="unknown_parameter",
        )
    output = _speech_output(body, model, stream=stream)
    speech, audio_format = output if output is not None else (None, None)
    sampling = stage_sampling(body, with_speech=speech is not None)
    messages = await load_messages(body.messages, model, media, history)
    return ChatTurn(
        request=OmniRequest(request_id=request_id, messages=messages, speech=speech, sampling=sampling),
        audio_format=audio_format,
        stream=stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
    )


def check_model(name: str, model: ModelInfo) -> None:
    """Raises `ModelNotFoundError` unless `name` is one of the served names."""
    if name != model.name and name not in model.aliases:
        raise ModelNotFoundError(f"The model '{name[:200]}' does not exist.", param="model")


def _speech_output(
    body: ChatCompletionRequest, model: ModelInfo, *, stream: bool
) -> tuple[SpeechOutput, AudioFormat] | None:
    if body.modalities is None:
        return None
    for modality in body.modalities:
        if modality not in ("text", "audio"):
            raise InvalidRequestError(
                f"Invalid value: '{modality[:64]}'. Supported values are: 'text', 'audio'.", param="modalities"
            )
    if "audio" not in body.modalities:
        return None
    if not model.voices:
        raise InvalidRequestError("This model answers with text only.", param="modalities", code="unsupported_value")
    if body.audio is None:
        raise _missing("audio")
    if body.audio.voice is None:
        raise _missing("audio.voice")
    if body.audio.format is None:
        raise _missing("audio.format")
    audio_format = parse_format(body.audio.format)
    if audio_format is None:
        raise _unsupported_format(body.audio.format, "", AUDIO_FORMATS)
    if stream and audio_format not in STREAMABLE_FORMATS:
        raise _unsupported_format(body.audio.format, " when stream=true", STREAMABLE_FORMATS)
    # Sources of noise commonly refuse negative seeds, which OpenAI's int64 includes.
    seed = body.seed % 2**63 if body.seed is not None else None
    return SpeechOutput(voice=resolve_voice(body.audio.voice, model), seed=seed), audio_format


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def _unsupported_format(name: str, where: str, supported: tuple[AudioFormat, ...]) -> InvalidRequestError:
    values = ", ".join(f"'{value}'" for value in supported)
    return InvalidRequestError(
        f"Unsupported value: 'audio.format' does not support '{name[:64]}'{where}. Supported values are: {values}.",
        param="audio.format",
        code="unsupported_value",
    )


def _check_extra_fields(body: ChatCompletionRequest) -> None:
    """Refuses fields that would change the answer and are not implemented; others are ignored."""
    fields = body.model_extra if body.model_extra is not None else {}
    if fields.get("tools") == []:
        raise InvalidRequestError("Invalid 'tools': the array must not be empty.", param="tools", code="empty_array")
    if not fields.get("tools") and fields.get("tool_choice") not in (None, "none"):
        raise InvalidRequestError("'tool_choice' is allowed only where 'tools' are given.", param="tool_choice")
    _check_top_logprobs(fields.get("top_logprobs"), fields.get("logprobs"))
    for name, value in fields.items():
        if name not in _HARMLESS_VALUES:
            logger.debug("ignoring the unknown field %.64r", name)
        elif not any(value is harmless or value == harmless for harmless in _HARMLESS_VALUES[name]):
            raise InvalidRequestError(
                f"'{name}' is not supported with this value by this server.", param=name, code="unsupported_value"
            )


def _check_top_logprobs(top_logprobs: object, logprobs: object) -> None:
    if top_logprobs is None:
        return
    if type(top_logprobs) is not int or not 0 <= top_logprobs <= 20:
        raise InvalidRequestError("Invalid 'top_logprobs': expected an integer from 0 to 20.", param="top_logprobs")
    if logprobs is not True:
        raise InvalidRequestError("'top_logprobs' is allowed only where 'logprobs' is true.", param="top_logprobs")


_HARMLESS_VALUES: dict[str, tuple[object, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "prompt_logprobs": (None,),
    "tools": (None,),
    "tool_choice": (None, "none"),
    "functions": (None,),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "use_beam_search": (None, False),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "mm_processor_kwargs": (None, {}, {"use_audio_in_video": False}),
}
"""Fields of OpenAI and of vLLM that change the answer, with the values that ask for nothing."""
