"""Admission: what is refused, and what a request's settings become."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from vllm import SamplingParams

from omni_server.config.pipeline import find_family
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import CommonStage, SamplingDefaults
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    StageDeadError,
)
from omni_server.family import DiffusionPrompt, EmbeddingsPrompt, FamilyModel, PlaceholderIds, TextRows
from omni_server.family.codec import CodecLayout
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.protocol.rows import (
    RowsPayload,
    Segment,
    SharedBlock,
)
from omni_server.types import (
    ChatMessage,
    FunctionTool,
    OmniRequest,
    Output,
    Prompt,
    ReadAloud,
    SamplingConfig,
    SpeechOutput,
    Task,
    TextPart,
    ToolCall,
)
from omni_server.types.images import ImageFeatures, ImageOutput, ImageSize
from tests.unit.orchestrator.fake_stages import (
    FakeArStage,
    FakeCode2Wav,
    FakeCodecEdge,
    collected,
    settle,
    submit,
)

MAX_MODEL_LEN = 64
AUDIO, IMAGE, VIDEO = 901, 902, 903
THINKER_DEFAULTS = SamplingDefaults(temperature=0.5, max_tokens=9)
NO_DEFAULTS = SamplingDefaults()
_PIPELINE = find_family("qwen2_5_omni").pipeline


class FakeCodecFamily:
    """Its pipeline is run; what it says of prompts is `FakeFamily`'s."""

    pipeline = replace(
        _PIPELINE,
        edges=(_PIPELINE.edges[0], replace(_PIPELINE.edges[1], function=f"{__name__}:fake_codec_edge")),
    )


FAMILY = f"{__name__}:FakeCodecFamily"


class FakeFamily:
    voices = ("Ada", "Bob")
    default_voice = "Ada"
    stop_ids: Mapping[str, tuple[int, ...]] = {"thinker": (1,), "talker": (2,)}
    placeholder_ids = PlaceholderIds(AUDIO, IMAGE, VIDEO)
    input_modalities = ("audio", "image", "video")
    hears_videos = False
    codec = CodecLayout(4, 480)
    row_width = 4
    extra_rows_per_request = 3
    image_sizes: tuple[ImageSize, ...] = ()

    def prompt(
        self,
        messages: tuple[ChatMessage, ...],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        return Prompt(" ".join(tool.name for tool in tools))

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        assert isinstance(task, ReadAloud)
        return (ChatMessage("user", (TextPart(f"read {task.text}"),)),)

    def embeddings_prompt(self, stage: str, source_ids: Sequence[int], *, voice: str) -> EmbeddingsPrompt:
        return EmbeddingsPrompt((8,) * len(source_ids) + (6, 7), len(source_ids))

    def image_features(self, stage: CommonStage) -> ImageFeatures:
        return ImageFeatures()

    def image_prompt(
        self, messages: Sequence[ChatMessage], image: ImageOutput, *, size: ImageSize, seed: int
    ) -> DiffusionPrompt:
        raise NotImplementedError

    def dtype_name(self) -> str:
        return "float32"


class FakeEntry(FakeArStage):
    """With what admission asks of an `ArHandle`."""

    max_model_len = MAX_MODEL_LEN

    def __init__(self, name: str, prompt: tuple[int, ...] = (10, 11, AUDIO, AUDIO, IMAGE, VIDEO)) -> None:
        super().__init__(name)
        self.prompt = prompt
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: InvalidRequestError | None = None
        self.checked: list[tuple[SamplingParams, str | None]] = []
        self.rendered: list[Prompt] = []
        self.max_chars = 1000

    def check_text(self, num_chars: int) -> None:
        if num_chars > self.max_chars:
            raise InvalidRequestError("too long", code="context_length_exceeded")

    async def check(self, params: SamplingParams, structured_param: str | None = None) -> None:
        self.checked.append((params, structured_param))
        if self.refusal is not None:
            raise self.refusal

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    async def render(self, prompt: Prompt, reply: str | None = None) -> RenderedPrompt:
        await self.gate.wait()
        self.rendered.append(prompt)
        if reply is None:
            return RenderedPrompt(self.prompt, None)
        return RenderedPrompt((*self.prompt, *map(ord, reply)), None, reply, len(reply))


class Pipeline:
    def __init__(
        self,
        *,
        speech: bool = True,
        thinker_defaults: SamplingDefaults = THINKER_DEFAULTS,
        talker_defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.thinker, self.talker, self.code2wav = FakeEntry("thinker"), FakeEntry("talker"), FakeCode2Wav()
        length = {"max_model_len": MAX_MODEL_LEN}
        stages: dict[str, Any] = {"thinker": length | {"default_sampling": thinker_defaults}}
        if speech:
            stages["talker"] = length | {"default_sampling": talker_defaults}
            stages["code2wav"] = {"max_model_len": 2048}
        document: dict[str, Any] = {"model_family": FAMILY, "platform": "cpu", "stages": stages}
        if speech:
            document["edges"] = [
                {"from": "thinker", "to": "talker"},
                {"from": "talker", "to": "code2wav", "chunks": {"mode": "whole"}},
            ]
        ar = (self.thinker, self.talker) if speech else (self.thinker,)
        self.orchestrator = Orchestrator(
            cast(FamilyModel, FakeFamily()),
            StageConfig.model_validate(document),
            ar={fake.name: Stage(fake.name, (cast(ArHandle, fake),)) for fake in ar},
            diffusion={"code2wav": Stage("code2wav", (cast(DiffusionHandle, self.code2wav),))}
            if speech
            else {},
            request_timeout_s=30.0,
        )


def fake_codec_edge(*_: object, **__: object) -> FakeCodecEdge:
    return FakeCodecEdge()


def request(request_id: str = "a", *, voice: str | None = None, speech: bool = True) -> OmniRequest:
    message = ChatMessage("user", (TextPart("Hello"),))
    return OmniRequest(request_id, (message,), SpeechOutput(voice) if speech else None)


async def sampling_of(pipeline: Pipeline, request: OmniRequest) -> tuple[SamplingParams, SamplingParams]:
    """What the thinker and the talker are given. The talker is, as soon as the prompt's rows have come."""
    run = await submit(pipeline.orchestrator, request)
    await settle()
    sink, num_prompt = pipeline.thinker.stream.row_sink, len(pipeline.thinker.prompt)
    assert sink is not None
    sink(RowsPayload(num_prompt, 0, 4, "float32", SharedBlock(0, 1, 0), (Segment(0, num_prompt + 1, 0),)))
    await settle()
    await run.aclose()
    ((thinker,), (talker,)) = pipeline.thinker.params, pipeline.talker.params
    return thinker, talker


async def test_prompt_tokens_are_counted_by_what_they_stand_for() -> None:
    pipeline = Pipeline()
    run = await submit(pipeline.orchestrator, request())
    counted = run.run.prompt
    assert (counted.total, counted.text, counted.audio, counted.image, counted.video) == (6, 2, 2, 1, 1)
    await run.aclose()


async def test_text_that_cannot_fit_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of all messages, calls included."""
    rendered: list[tuple[ChatMessage, ...]] = []
    prompt = FakeFamily.prompt

    def noted(self: FakeFamily, messages: tuple[ChatMessage, ...], **options: Any) -> Prompt:
        rendered.append(messages)
        return prompt(self, messages, **options)

    monkeypatch.setattr(FakeFamily, "prompt", noted)
    pipeline = Pipeline()
    messages = (
        ChatMessage("user", (TextPart("abc"), TextPart("de"))),
        ChatMessage("assistant", (TextPart("f"),), (ToolCall("go", "{}"),)),
    )
    wanted = replace(request(), messages=messages)
    pipeline.thinker.max_chars = 7
    with pytest.raises(InvalidRequestError) as error:
        await submit(pipeline.orchestrator, wanted)
    assert error.value.code == "context_length_exceeded"
    assert rendered == []
    pipeline.thinker.max_chars = 8
    await (await submit(pipeline.orchestrator, wanted)).aclose()
    assert rendered == [messages]


@pytest.mark.parametrize("prompt", [Prompt("text"), Prompt(token_ids=(10, 11))])
async def test_a_given_prompt_is_not_rendered_as_a_chat(prompt: Prompt) -> None:
    pipeline = Pipeline()
    pipeline.thinker.prompt = (10, 11)
    run = await submit(pipeline.orchestrator, replace(request(speech=False), messages=(), prompt=prompt))
    assert pipeline.thinker.rendered == [prompt]
    await run.aclose()


@pytest.mark.parametrize("placeholder", [AUDIO, IMAGE, VIDEO])
async def test_a_given_prompt_cannot_have_tokens_that_stand_for_media(placeholder: int) -> None:
    pipeline = Pipeline()
    pipeline.thinker.prompt = (10, placeholder)
    wanted = replace(request(speech=False), messages=(), prompt=Prompt(token_ids=(10, placeholder)))
    with pytest.raises(InvalidRequestError, match="stand for media"):
        await submit(pipeline.orchestrator, wanted)
    assert pipeline.orchestrator.num_running == 0


async def test_a_given_text_that_does_not_fit_the_thinkers_context_is_refused() -> None:
    wanted = replace(request(), speech=SpeechOutput(text="x" * (MAX_MODEL_LEN - 6)))
    with pytest.raises(InvalidRequestError) as error:
        await submit(Pipeline().orchestrator, wanted)
    assert error.value.code == "context_length_exceeded"


async def test_two_requests_cannot_have_one_id_even_when_both_are_being_admitted() -> None:
    pipeline = Pipeline()
    pipeline.thinker.gate.clear()
    submitted = [asyncio.create_task(submit(pipeline.orchestrator, request("same"))) for _ in range(2)]
    await settle()
    pipeline.thinker.gate.set()
    run = await submitted[0]
    with pytest.raises(InvalidRequestError, match="running already"):
        await submitted[1]
    await run.aclose()
    assert pipeline.orchestrator.num_running == 0


async def test_a_cancelled_submission_leaves_nothing() -> None:
    pipeline = Pipeline()
    pipeline.thinker.gate.clear()
    submitted = asyncio.create_task(submit(pipeline.orchestrator, request()))
    await settle()
    submitted.cancel()
    await asyncio.wait([submitted])
    assert pipeline.orchestrator.num_running == 0
    assert pipeline.thinker.streams == []


async def test_a_deadline_of_zero_is_a_deadline() -> None:
    run = await submit(Pipeline().orchestrator, replace(request(), deadline_s=0.0))
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(collected(run), 5)


async def test_a_deadline_counts_from_when_the_request_began() -> None:
    pipeline = Pipeline()
    pipeline.thinker.gate.clear()
    late = replace(request(), deadline_s=60.0, began_at=time.monotonic() - 61.0)
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(submit(pipeline.orchestrator, late), 5)
    assert pipeline.orchestrator.num_running == 0


async def test_request_whose_prompt_is_being_read_fails_at_once_when_the_thinker_dies() -> None:
    pipeline = Pipeline()
    pipeline.thinker.gate.clear()
    submitting = asyncio.create_task(submit(pipeline.orchestrator, request()))
    await settle()
    pipeline.thinker.life.went_down("its engine process was killed (SIGKILL)")
    with pytest.raises(StageDeadError, match="SIGKILL"):
        await asyncio.wait_for(submitting, 5)
    assert pipeline.orchestrator.num_running == 0


async def test_closing_ends_running_requests_and_refuses_new_ones() -> None:
    pipeline = Pipeline()
    run = await submit(pipeline.orchestrator, request())
    events = asyncio.create_task(collected(run))
    await settle()
    await pipeline.orchestrator.close()
    with pytest.raises(OmniError):
        await asyncio.wait_for(events, 5)
    assert pipeline.orchestrator.num_running == 0
    with pytest.raises(OverloadedError, match="shutting down"):
        await submit(pipeline.orchestrator, request())


async def test_a_request_in_admission_is_refused_when_the_server_closes() -> None:
    pipeline = Pipeline()
    pipeline.thinker.gate.clear()
    submitted = asyncio.create_task(submit(pipeline.orchestrator, request()))
    await settle()
    await pipeline.orchestrator.close()
    pipeline.thinker.gate.set()
    with pytest.raises(OverloadedError, match="shutting down"):
        await submitted
    assert pipeline.orchestrator.num_running == 0


@pytest.mark.parametrize(
    "sampling", [{"thinker": SamplingConfig(max_tokens=10**6)}, {"thinker": SamplingConfig(top_p=9.0)},
                 {"talker": SamplingConfig(max_tokens=0)}]
)  # fmt: skip
async def test_a_prompt_that_is_refused_after_rendering_reaches_no_stage(
    sampling: dict[str, SamplingConfig],
) -> None:
    pipeline = Pipeline()
    with pytest.raises(InvalidRequestError):
        await submit(pipeline.orchestrator, replace(request(), sampling=sampling))
    assert not pipeline.thinker.prompts
    assert pipeline.orchestrator.num_running == 0


@pytest.mark.parametrize(
    ("stage", "name", "param"),
    [
        ("thinker", "max_tokens", "max_completion_tokens"),
        ("thinker", "min_tokens", "min_tokens"),
        ("talker", "max_tokens", "stage_sampling.talker.max_tokens"),
        ("talker", "min_tokens", "stage_sampling.talker.min_tokens"),
    ],
)
async def test_limits_of_a_request_must_fit_the_stages_context(stage: str, name: str, param: str) -> None:
    num_prompt = {"thinker": 6, "talker": 8}[stage]

    def asking_for(number: int) -> OmniRequest:
        limit = (
            SamplingConfig(max_tokens=number) if name == "max_tokens" else SamplingConfig(min_tokens=number)
        )
        return replace(request(), sampling={stage: limit})

    pipeline = Pipeline(thinker_defaults=NO_DEFAULTS)
    await (await submit(pipeline.orchestrator, asking_for(MAX_MODEL_LEN - num_prompt))).aclose()
    with pytest.raises(
        InvalidRequestError, match=rf"is {MAX_MODEL_LEN} .* needs {MAX_MODEL_LEN + 1}\."
    ) as error:
        await submit(pipeline.orchestrator, asking_for(MAX_MODEL_LEN - num_prompt + 1))
    assert (error.value.code, error.value.param) == ("context_length_exceeded", param)
    assert pipeline.orchestrator.num_running == 0


@pytest.mark.parametrize("defaults", [SamplingDefaults(max_tokens=40), SamplingDefaults(max_tokens=40, min_tokens=30),
                                      NO_DEFAULTS])  # fmt: skip
async def test_without_a_limit_in_the_request_the_rest_of_each_context_is_the_limit(
    defaults: SamplingDefaults,
) -> None:
    pipeline = Pipeline(thinker_defaults=defaults, talker_defaults=defaults)
    pipeline.thinker.prompt = (10,) * (MAX_MODEL_LEN - 5)
    thinker, talker = await sampling_of(pipeline, request())
    assert (thinker.max_tokens, talker.max_tokens) == (5, 3)
    assert thinker.min_tokens <= 5
    assert talker.min_tokens <= 3


async def test_a_prompt_that_can_be_shortened_must_leave_room_for_the_default_limit() -> None:
    pipeline = Pipeline()
    pipeline.thinker.prompt = (10,) * (MAX_MODEL_LEN - 8)
    long = replace(request(), can_be_shortened=True)
    with pytest.raises(InvalidRequestError) as error:
        await submit(pipeline.orchestrator, long)
    assert error.value.code == "context_length_exceeded"
    pipeline.thinker.prompt = (10,) * (MAX_MODEL_LEN - 9)
    await (await submit(pipeline.orchestrator, long)).aclose()


async def test_with_room_enough_the_stage_configs_limit_holds() -> None:
    pipeline = Pipeline(talker_defaults=SamplingDefaults(max_tokens=11))
    assert [params.max_tokens for params in await sampling_of(pipeline, request())] == [9, 11]


@pytest.mark.parametrize(
    ("wanted", "as_ids", "sizes"),
    [
        (request(), True, (1, 1, 1, 1, 2, 4)),
        (replace(request(), sampling={"thinker": SamplingConfig(stop=("x",))}), True, (1,)),
        (replace(request(), sampling={"thinker": SamplingConfig(logprobs=0)}), True, (1,)),
        (request(speech=False), True, (1,)),
        (request(), False, (1,)),
    ],
)
async def test_later_tokens_of_a_text_that_crosses_as_ids_come_together_unless_each_is_needed(
    wanted: OmniRequest, *, as_ids: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_ids(
        family: FakeFamily, stage: str, source_ids: Sequence[int], *, voice: str
    ) -> EmbeddingsPrompt:
        return EmbeddingsPrompt((8, 8, 8), 3, TextRows((1, 2), (), (9,)))

    if as_ids:
        monkeypatch.setattr(FakeFamily, "embeddings_prompt", with_ids)
    pipeline = Pipeline()
    run = await submit(pipeline.orchestrator, wanted)
    await settle()
    assert pipeline.thinker.stream.tokens_per_output == sizes
    await run.aclose()


async def test_a_prompt_that_fills_the_talkers_context_is_refused() -> None:
    pipeline = Pipeline()
    pipeline.talker.max_model_len = 8  # six tokens, two more, and none left to speak
    with pytest.raises(InvalidRequestError) as error:
        await submit(pipeline.orchestrator, request())
    assert error.value.code == "context_length_exceeded"
