"""What a request needs of the deployment. Refuses what the deployment cannot do."""

import time
from dataclasses import dataclass

from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.errors import InvalidRequestError
from omni_server.family import FamilyModel
from omni_server.types import OmniRequest, Output, SpeechOutput, TextPart, VideoPart


@dataclass(frozen=True)
class RequestPlan:
    request: OmniRequest
    outputs: frozenset[Output]
    """What to generate."""
    stages: tuple[str, ...]
    """All that take part."""
    reader: str | None
    """Of `stages`, the one that reads a text that is given; None if a stage writes the text."""
    voice: str
    """Empty without speech."""
    began: float
    """Clock time (`time.monotonic`)."""
    deadline_s: float
    """Seconds from `began`."""


def plan_request(
    request: OmniRequest, config: StageConfig, model: FamilyModel, request_timeout_s: float
) -> RequestPlan:
    """Plans the request. Raises `InvalidRequestError` for what the deployment cannot do."""
    outputs = requested_outputs(request, config)
    _check_input(request, config, model)
    _check_sampling(request, config)
    stages, reader, speech = config.stages_for(outputs), config.reader, request.speech
    is_given = speech is not None and (speech.text is not None or speech.pieces is not None)
    if speech is None or (not is_given and reader != config.entry):
        reader = None
    return RequestPlan(
        request,
        outputs,
        stages=stages if reader is None else stages[stages.index(reader) :],
        reader=reader,
        voice="" if speech is None else _voice(speech, model),
        began=time.monotonic() if request.began_at is None else request.began_at,
        deadline_s=request_timeout_s if request.deadline_s is None else request.deadline_s,
    )


def requested_outputs(request: OmniRequest, config: StageConfig) -> frozenset[Output]:
    """Raises `InvalidRequestError` if the deployment lacks one."""
    available = config.outputs
    wanted: set[Output] = {"image"} if request.image is not None else {"text"}
    if request.speech is not None:
        wanted = (wanted & available) | {"audio"}  # a speech-only model writes no text
    if missing := wanted - available:
        raise InvalidRequestError(f"this model does not answer with {min(missing)}", param="modalities")
    if "text" not in wanted and request.tools is not None:
        raise InvalidRequestError("this model writes no text, and calls no tools", param="tools")
    if "text" not in wanted and request.structured_output is not None:
        raise InvalidRequestError(
            "this model writes no text that could have a format", param=request.structured_output.param
        )
    return frozenset(wanted)


def _check_input(request: OmniRequest, config: StageConfig, model: FamilyModel) -> None:
    """Raises `InvalidRequestError` for what the model does not hear or read."""
    speech = request.speech
    if speech is not None and config.reader is None and (speech.pieces or speech.clone):
        raise InvalidRequestError("this model answers chats, with its own voices", param="voice")
    parts = [part for message in request.messages for part in message.content]
    kinds = {part.kind for part in parts if not isinstance(part, TextPart)}
    if request.image is None and (refused := kinds.difference(model.input_modalities)):
        raise InvalidRequestError(f"this model does not take {min(refused)} input", param="messages")
    has_track = any(isinstance(part, VideoPart) and part.audio is not None for part in parts)
    if has_track and not model.hears_videos:
        raise InvalidRequestError("this model does not hear the audio track of a video", param="messages")


def _check_sampling(request: OmniRequest, config: StageConfig) -> None:
    sampling = [name for name, stage in config.stages.items() if isinstance(stage, ArStage)]
    for name in request.sampling:
        if name not in sampling:
            raise InvalidRequestError(
                f"there is no stage '{name}' to sample in; stages are {', '.join(sampling)}",
                param=f"stage_sampling.{name}",
            )


def _voice(speech: SpeechOutput, model: FamilyModel) -> str:
    voice = model.default_voice if speech.voice is None else speech.voice
    if voice is None or voice not in model.voices:
        raise InvalidRequestError(
            f"voice '{voice}' is unknown; voices are {', '.join(model.voices)}", param="audio.voice"
        )
    return voice
