"""What a request needs of the deployment, and what the deployment refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_server.config.stage_config import StageConfig
from omni_server.errors import InvalidRequestError
from omni_server.orchestrator.request_plan import RequestPlan, plan_request
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ClonedVoice,
    ContentPart,
    FunctionTool,
    ImagePart,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    StructuredOutput,
    TextPart,
    ToolUse,
    VideoPart,
)
from tests.toy_families.branched import BranchedModel

MEDIA = np.zeros((4, 8, 8, 3), np.uint8)
VIDEO = VideoPart(MEDIA, 2.0)
HEARD_VIDEO = VideoPart(MEDIA, 2.0, AudioPart(np.zeros(8, np.float32), 16_000))
TOOLS = ToolUse((FunctionTool("go", "{}", "{}"),), frozenset({"go"}))
JSON = StructuredOutput("json", "{}", "response_format")

CHATS = ("tests.toy_families.branched:FAMILY", ("writer", "speaker", "vocoder"))
WRITES = (CHATS[0], ("writer",))
SPEAKS = ("tests.toy_families.speech_only:FAMILY", ("speaker", "vocoder"))
ANSWERS_OR_READS = ("stages.spoken_llm:FAMILY", ("thinker", "talker", "code2wav"))


def plan(deployment: tuple[str, tuple[str, ...]], *media: ContentPart, **options: Any) -> RequestPlan:
    family, stages = deployment
    document = {"model_family": family, "platform": "cpu"}
    config = StageConfig.model_validate(
        document | {"stages": {name: {"max_model_len": 64} for name in stages}}
    )
    model = BranchedModel(Path())
    model.voices, model.default_voice, model.input_modalities = ("Low",), "Low", ("video",)
    request = OmniRequest("a", (ChatMessage("user", (TextPart("Hello"), *media)),), **options)
    return plan_request(request, config, model, 30.0)


@pytest.mark.parametrize(
    ("deployment", "media", "options", "param", "message"),
    [
        (WRITES, (), {"speech": SpeechOutput()}, "modalities", "does not answer with audio"),
        (SPEAKS, (), {}, "modalities", "does not answer with text"),
        (SPEAKS, (), {"speech": SpeechOutput(), "tools": TOOLS}, "tools", "writes no text"),
        (SPEAKS, (), {"speech": SpeechOutput(), "structured_output": JSON}, JSON.param, "writes no text"),
        (CHATS, (), {"speech": SpeechOutput("Nobody")}, "audio.voice", "'Nobody' is unknown; voices are Low"),
        (CHATS, (), {"speech": SpeechOutput(clone=ClonedVoice(b""))}, "voice", "with its own voices"),
        (CHATS, (ImagePart(MEDIA[0]),), {}, "messages", "does not take image input"),
        (CHATS, (HEARD_VIDEO,), {}, "messages", "does not hear the audio track"),
        (
            CHATS,
            (),
            {"sampling": {"singer": SamplingConfig()}},
            "stage_sampling.singer",
            "no stage 'singer' to sample in; stages are writer, speaker",
        ),
    ],
)
def test_what_the_deployment_cannot_do_is_refused(
    deployment: tuple[str, tuple[str, ...]],
    media: tuple[ContentPart, ...],
    options: dict[str, Any],
    param: str,
    message: str,
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        plan(deployment, *media, **options)
    assert refused.value.param == param


def test_a_video_without_its_audio_track_is_seen_by_a_model_that_hears_none() -> None:
    assert plan(CHATS, VIDEO).outputs == {"text"}


def test_speech_is_with_the_models_voice_unless_the_request_names_one() -> None:
    assert plan(CHATS).voice == ""
    assert plan(CHATS, speech=SpeechOutput()).voice == "Low"


@pytest.mark.parametrize(
    ("speech", "reader", "stages"),
    [
        (None, None, ("thinker",)),
        (SpeechOutput(), None, ("thinker", "talker", "code2wav")),
        (SpeechOutput(text="Hello"), "talker", ("talker", "code2wav")),
    ],
)
def test_only_stages_that_the_answer_passes_through_take_part(
    speech: SpeechOutput | None, reader: str | None, stages: tuple[str, ...]
) -> None:
    made = plan(ANSWERS_OR_READS, speech=speech)
    assert (made.reader, made.stages) == (reader, stages)
