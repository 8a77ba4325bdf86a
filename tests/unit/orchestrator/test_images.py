"""A request that diffusion stages answer with an image."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from omni_server.config.pipeline import EdgeSpec, Pipeline, StageSpec, Tensor
from omni_server.config.stage_config import StageConfig
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import (
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    OmniError,
    StageDeadError,
    StageDownError,
)
from omni_server.family import DiffusionPrompt, FamilyModel
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.protocol.diffusion import decode_stage_result
from omni_server.protocol.images import StageEvent
from omni_server.types import ChatMessage, Finished, OmniRequest, TextPart
from omni_server.types.images import ImageDone, ImageOutput, ImageSize
from tests.toy_families import image_only
from tests.toy_families.image_only import ImageInput, ImageModel
from tests.unit.orchestrator.fake_stages import FakeEngine, collected, settle

SMALL, WIDE = ImageModel.image_sizes
LADDER = np.linspace(0, 1, 32 * 32 * 3, dtype=np.float32).reshape(32, 32, 3)


class FakePainter(FakeEngine):
    """Stands for `DiffusionHandle`."""

    def __init__(self, name: str, result: npt.NDArray[np.float32]) -> None:
        super().__init__(name)
        self.result = result
        self.error: OmniError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Event()
        self.payloads: list[bytes] = []
        self.num_tokens: list[int] = []
        self.num_active = 0

    async def run(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        payload: bytes,
        *,
        priority: int = 0,
        num_streams: int | None = None,
        on_event: Callable[[StageEvent], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        self.payloads.append(payload)
        self.num_tokens.append(len(token_ids))
        self.num_active += 1
        self.began.set()
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return self.result
        finally:
            self.num_active -= 1


class TwoStageFamily(image_only.ImageFamily):
    pipeline = Pipeline(
        {"denoiser": StageSpec("diffusion"), "decoder": StageSpec("diffusion", output="image")},
        (EdgeSpec("denoiser", "decoder", Tensor()),),
    )


TWO_STAGES = TwoStageFamily()
ONE_STAGE = "tests.toy_families.image_only:FAMILY"


def orchestrator_of(stages: Mapping[str, FakePainter], family: str = ONE_STAGE) -> Orchestrator:
    config = StageConfig.model_validate(
        {
            "model_family": family,
            "platform": "cpu",
            "stages": {name: {"max_model_len": 6} for name in stages},
        }
    )
    diffusion = {name: Stage(name, (cast(DiffusionHandle, stage),)) for name, stage in stages.items()}
    model = cast(FamilyModel, ImageModel(Path()))
    return Orchestrator(model, config, ar={}, diffusion=diffusion, request_timeout_s=30.0)


def request(size: ImageSize | None = None, seed: int | None = 5) -> OmniRequest:
    message = ChatMessage("user", (TextPart("A lighthouse"),))
    return OmniRequest("a", (message,), image=ImageOutput(size, seed))


@pytest.fixture
def painter() -> FakePainter:
    return FakePainter("painter", LADDER)


async def test_the_painter_is_told_prompt_size_and_seed(painter: FakePainter) -> None:
    run = await orchestrator_of({"painter": painter}).submit(request())
    image, finished = await collected(run)
    assert isinstance(image, ImageDone)
    assert image.pixels.dtype == np.uint8
    np.testing.assert_array_equal(image.pixels, np.rint(LADDER * 255))
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "stop"
    assert [name for name, times in finished.times.items() if times.last_output_s is not None] == ["painter"]
    assert [msgspec.msgpack.decode(payload, type=ImageInput) for payload in painter.payloads] == [
        ImageInput("A lighthouse", 32, 32, 5)
    ]
    assert (painter.num_tokens, run.prompt.total, finished.usage.image_tokens) == ([4], 0, 4)


async def test_without_a_seed_each_request_draws_one(painter: FakePainter) -> None:
    orchestrator = orchestrator_of({"painter": painter})
    for _ in range(2):
        await collected(await orchestrator.submit(request(seed=None)))
    seeds = {msgspec.msgpack.decode(payload, type=ImageInput).seed for payload in painter.payloads}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_the_result_of_one_stage_is_the_input_of_the_next() -> None:
    denoiser = FakePainter("denoiser", np.ones((2, 2, 4), np.float32))
    decoder = FakePainter("decoder", LADDER)
    stages = {"denoiser": denoiser, "decoder": decoder}
    run = await orchestrator_of(stages, f"{__name__}:TWO_STAGES").submit(request())
    image, finished = await collected(run)
    assert isinstance(image, ImageDone)
    assert isinstance(finished, Finished)
    assert list(finished.times) == ["denoiser", "decoder"]
    assert image.pixels.shape == (32, 32, 3)
    (payload,) = decoder.payloads
    told, latents = decode_stage_result(payload)
    assert told == denoiser.payloads[0]
    np.testing.assert_array_equal(latents, denoiser.result)
    assert decoder.num_tokens == denoiser.num_tokens == [4]


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (LADDER[1:], "shape"),
        (LADDER[:, :, :1], "shape"),
        (LADDER[:, :, 0], "shape"),
        (LADDER.transpose(2, 0, 1), "shape"),
        (np.where(LADDER > 0.5, np.float32("nan"), LADDER), "samples"),
        (LADDER * np.float32(1.01), "samples"),
        (LADDER - np.float32(0.01), "samples"),
    ],
)
async def test_what_is_no_image_fails_the_request(
    painter: FakePainter, result: npt.NDArray[np.float32], kind: str
) -> None:
    orchestrator = orchestrator_of({"painter": painter})
    painter.result = result
    with pytest.raises(CorruptDataError) as failure:
        await collected(await orchestrator.submit(request()))
    assert (failure.value.stage, failure.value.kind) == ("painter", kind)
    assert orchestrator.num_corrupt["painter", kind] == 1
    painter.result = LADDER
    assert len(await collected(await orchestrator.submit(request()))) == 2


async def test_an_image_of_another_size_than_asked_for_fails_the_request(painter: FakePainter) -> None:
    painter.result = np.zeros((48, 32, 3), np.float32)  # height and width confused
    with pytest.raises(CorruptDataError, match="48x32"):
        await collected(await orchestrator_of({"painter": painter}).submit(request(WIDE)))


async def test_a_size_that_is_not_offered_is_refused(painter: FakePainter) -> None:
    with pytest.raises(InvalidRequestError, match="32x32, 48x32") as refusal:
        await orchestrator_of({"painter": painter}).submit(request(ImageSize(8, 8)))
    assert refusal.value.param == "size"
    assert painter.payloads == []


async def test_a_prompt_longer_than_the_stage_takes_is_refused(
    painter: FakePainter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_only, "PIXELS_PER_TOKEN", 8)
    with pytest.raises(InvalidRequestError) as refusal:
        await orchestrator_of({"painter": painter}).submit(request())
    assert refusal.value.code == "context_length_exceeded"


async def test_rendering_does_not_block_the_event_loop(
    painter: FakePainter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding large images to edit takes a while."""
    render, go_on = ImageModel.image_prompt, threading.Event()

    def slow(self: ImageModel, *args: Any, **kwargs: Any) -> DiffusionPrompt:
        assert go_on.wait(2)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(ImageModel, "image_prompt", slow)
    submitting = asyncio.create_task(orchestrator_of({"painter": painter}).submit(request()))
    await settle()
    go_on.set()
    assert len(await collected(await submitting)) == 2


async def test_text_and_speech_are_refused(painter: FakePainter) -> None:
    with pytest.raises(InvalidRequestError, match="does not answer with text"):
        await orchestrator_of({"painter": painter}).submit(replace(request(), image=None))


async def test_a_request_that_is_ended_leaves_the_stage(painter: FakePainter) -> None:
    painter.gate.clear()
    orchestrator = orchestrator_of({"painter": painter})
    run = await orchestrator.submit(request())
    await settle()
    assert (painter.num_active, orchestrator.num_running) == (1, 1)
    await run.aclose()
    assert (painter.num_active, orchestrator.num_running) == (0, 0)


async def test_a_deadline_ends_it(painter: FakePainter) -> None:
    painter.gate.clear()
    run = await orchestrator_of({"painter": painter}).submit(replace(request(), deadline_s=0.05))
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(collected(run), 5)
    assert painter.num_active == 0


async def test_a_stage_that_goes_down_fails_it_and_refuses_others(painter: FakePainter) -> None:
    painter.gate.clear()
    orchestrator = orchestrator_of({"painter": painter})
    run = await orchestrator.submit(request())
    await settle()
    painter.life.went_down("its engine process was killed (SIGKILL)")
    with pytest.raises(StageDeadError):
        await asyncio.wait_for(collected(run), 5)
    with pytest.raises(StageDownError):
        await orchestrator.submit(request())
    assert orchestrator.num_running == 0
