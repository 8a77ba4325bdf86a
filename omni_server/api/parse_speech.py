"""The body of a speech request as requests to the model: the rules between fields, and those of the model."""

import logging
from dataclasses import dataclass

from omni_server.api.parse import check_model
from omni_server.api.passages import passages
from omni_server.api.sampling import speech_sampling
from omni_server.api.speech_schemas import MAX_CHARACTERS, SPEECH_FORMATS, SpeechRequest
from omni_server.api.voices import resolve_voice
from omni_server.audio.formats import AudioFormat, parse_format
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generator
from omni_server.types import ModelInfo, OmniRequest, ReadAloud, SpeechOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeechJob:
    """What to generate, and how to answer."""

    name: str
    requests: tuple[OmniRequest, ...]
    """Never empty; their sounds, joined, are the answer."""
    audio_format: AudioFormat
    speed: float
    """How many times as fast as the model speaks."""
    as_events: bool


def parse_speech_request(body: SpeechRequest, name: str, generator: Generator) -> SpeechJob:
    """`name` becomes part of the requests' ids. Raises `InvalidRequestError` or `ModelNotFoundError`."""
    model = generator.model_info
    check_model(body.model, model)
    for field in body.model_extra or {}:
        logger.debug("ignoring the unknown field %.64r", field)
    voice = _voice(body.voice, model)
    audio_format = _audio_format(body.response_format)
    _check_length(body.input, "input")
    texts = passages(body.input, model.longest_speech_s, model.about.longest_passage if model.about else None)
    if not texts:
        raise InvalidRequestError("Invalid 'input': there is no text to read.", param="input", code="empty_string")
    instructions = _instructions(body.instructions)
    sampling = speech_sampling(body.stage_sampling, body.seed, model)
    seed = body.seed % 2**63 if body.seed is not None else None  # as in chat completions
    requests = [
        OmniRequest(
            request_id=f"{name}-{index}",
            messages=generator.task_messages(ReadAloud(text, instructions)),
            speech=SpeechOutput(voice=voice, seed=seed, text=text),
            sampling=sampling,
        )
        for index, text in enumerate(texts)
    ]
    return SpeechJob(
        name,
        tuple(requests),
        audio_format,
        speed=1.0 if body.speed is None else body.speed,
        as_events=body.stream_format == "sse",
    )


def _voice(name: str | None, model: ModelInfo) -> str | None:
    if not model.voices:
        raise InvalidRequestError("This model answers with text only.", param="model", code="unsupported_value")
    return model.default_voice if name is None else resolve_voice(name, model, "voice")


def _audio_format(name: str | None) -> AudioFormat:
    audio_format = parse_format(name) if name is not None else "mp3"
    if audio_format is None:
        assert name is not None
        values = ", ".join(f"'{value}'" for value in SPEECH_FORMATS)
        raise InvalidRequestError(
            f"Unsupported value: 'response_format' does not support '{name[:64]}'. Supported values are: {values}.",
            param="response_format",
            code="unsupported_value",
        )
    return audio_format


def _instructions(given: str | None) -> str | None:
    if given is None or given.strip() in ("", "None"):
        return None
    _check_length(given, "instructions")
    return given.strip()


def _check_length(text: str, param: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"Invalid '{param}': string too long. Expected a string with maximum length {MAX_CHARACTERS}, but got a "
            f"string with length {len(text)} instead.",
            param=param,
            code="string_above_max_length",
        )
