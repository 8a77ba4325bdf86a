"""A tiny Diffusers pipeline in a real vLLM engine on the CPU, through the orchestrator."""

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from diffusers import DiffusionPipeline

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_args import diffusion_engine_args
from omni_server.engine.engine_handle import Stage
from omni_server.errors import CorruptDataError, StageError
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.protocol.images import StepProgress, decode_job, encode_job
from omni_server.types import ChatMessage, Finished, OmniEvent, OmniRequest, TextPart
from omni_server.types.images import ImageDone, ImageOutput, ImageProgress, ImageSize, PartialImage
from stages.diffusers import FAMILY
from stages.diffusers.options import DiffusersStage
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.engines import CPU_ENVIRONMENT, diffusion_engine
from tests.integration.live import changed_config
from tests.unit.orchestrator.fake_stages import ReadRun, submit

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ("a red cube", "two green spheres on a table", "x")
SIZE = ImageSize(64, 64)
NUM_STEPS = 8
TOKENS_PER_IMAGE = 16
TOKENS_PER_STEP = 3 * TOKENS_PER_IMAGE
WHOLE_STEP = ImageSize(64, 3 * 64)
NEVER_ENDS = 1000
"""Steps."""
WAIT_S = 60.0
Pixels = npt.NDArray[np.uint8]


@dataclass
class Served:
    orchestrator: Orchestrator
    handle: DiffusionHandle
    folder: Path

    async def counts(self) -> dict[str, int]:
        (counts,) = await self.handle.engine.collective_rpc("counts")
        return dict(counts)

    async def submit(self, name: str, index: int = 0, **changes: Any) -> ReadRun:
        image = ImageOutput(**({"size": SIZE, "seed": index, "num_steps": NUM_STEPS} | changes))
        message = ChatMessage("user", (TextPart(PROMPTS[index % len(PROMPTS)]),))
        return await submit(self.orchestrator, OmniRequest(name, (message,), image=image))

    async def events(self, name: str, index: int = 0, **changes: Any) -> list[OmniEvent]:
        async with asyncio.timeout(WAIT_S):
            return [event async for event in await self.submit(name, index, **changes)]

    async def image(self, name: str, index: int = 0, **changes: Any) -> Pixels:
        events = await self.events(name, index, **changes)
        (image,) = (event for event in events if isinstance(event, ImageDone))
        return image.pixels

    @asynccontextmanager
    async def at_once(self, num_requests: int) -> AsyncIterator[None]:
        """What is submitted in the block, this many requests, begins at its end: until the engine has all of
        them, its steps are full."""
        run = await self.submit("full", size=WHOLE_STEP, num_steps=NEVER_ENDS)
        try:
            async with asyncio.timeout(WAIT_S):
                while not (await self.counts())["requests"]:
                    pass
                yield
                while self.handle.num_active <= num_requests:
                    await self.counts()
                await self.counts()  # it is answered behind what was sent before
        finally:
            await run.aclose()

    async def until_released(self) -> None:
        """The engine answers between two steps, and hears of an end with the step after it."""
        async with asyncio.timeout(WAIT_S):
            while (await self.counts())["requests"] or self.handle.num_active:
                pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = make_demo_checkpoint(tmp_path_factory.mktemp("images") / "pipeline", family="diffusers")
    limits = {
        "max_model_len": TOKENS_PER_STEP,
        "max_image_tokens": TOKENS_PER_STEP,
        "max_num_batched_tokens": TOKENS_PER_STEP,
    }
    shipped = load_stage_config(find_shipped_config("diffusers.demo-cpu"))
    config: StageConfig = changed_config(shipped, stages={"image": limits})
    stage = config.stages["image"]
    assert isinstance(stage, DiffusersStage)
    FAMILY.register()
    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="t-") as sockets:
        for name, value in CPU_ENVIRONMENT.items():
            environment.setenv(name, value)
        arguments = diffusion_engine_args(
            folder,
            stage,
            platform="cpu",
            load_format="auto",
            hf_overrides=FAMILY.hf_overrides("image"),
            carries_state=False,
            stepwise=config.stage_spec("image").stepwise,
        )
        handle = await diffusion_engine("image", arguments, Path(sockets))
        stages = {"image": Stage("image", (handle,))}
        orchestrator = Orchestrator(
            FAMILY.open(folder), config, ar={}, diffusion=stages, request_timeout_s=WAIT_S
        )
        try:
            yield Served(orchestrator, handle, folder)
        finally:
            await handle.shutdown()


@pytest.fixture(scope="module")
def alone(served: Served) -> Callable[..., torch.Tensor]:
    """The pipeline as Diffusers documents it."""
    torch.set_num_threads(1)
    pipe = DiffusionPipeline.from_pretrained(served.folder)
    pipe.set_progress_bar_config(disable=True)

    @cache
    def image(index: int = 0, *, num_steps: int = NUM_STEPS, height: int = 64) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        result: torch.Tensor = pipe(
            PROMPTS[index % len(PROMPTS)],
            height=height,
            width=64,
            num_inference_steps=num_steps,
            generator=generator,
            output_type="pt",
        ).images[0]
        return result.permute(1, 2, 0)

    return image


def as_pixels(image: torch.Tensor) -> Pixels:
    pixels: Pixels = np.rint(255 * image.numpy()).astype(np.uint8)
    return pixels


def assert_close(pixels: Pixels, image: torch.Tensor) -> None:
    """Of an image that was joined with others: rounding may go the other way."""
    expected = as_pixels(image)
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= 1


async def test_alone_the_result_is_the_pipelines_own_to_the_last_bit(
    served: Served, alone: Callable[..., torch.Tensor]
) -> None:
    asked = ImageOutput(SIZE, 0, num_steps=NUM_STEPS)
    prompt, _ = served.orchestrator.images.render((ChatMessage("user", (TextPart(PROMPTS[0]),)),), asked)
    seen: list[object] = []
    result = await served.handle.run("raw", prompt.token_ids, prompt.payload, on_event=seen.append)
    assert torch.equal(torch.from_numpy(result), alone())
    assert seen == [StepProgress(step, NUM_STEPS) for step in range(1, NUM_STEPS + 1)]


async def test_progress_and_partial_images_precede_the_image(
    served: Served, alone: Callable[..., torch.Tensor]
) -> None:
    *events, image, finished = await served.events("events", num_partial_images=3)
    steps = [event.step for event in events if isinstance(event, ImageProgress)]
    assert steps == list(range(1, NUM_STEPS + 1))
    shown = [(i, event) for i, event in enumerate(events) if isinstance(event, PartialImage)]
    assert [event.index for _, event in shown] == [0, 1, 2]
    for place, step in zip((i for i, _ in shown), (2, 4, 6), strict=True):
        assert events[place - 1] == ImageProgress(step, NUM_STEPS)
    assert isinstance(image, ImageDone)
    np.testing.assert_array_equal(image.pixels, as_pixels(alone()))
    distances = [float(np.abs(event.pixels - image.pixels.astype(float)).mean()) for _, event in shown]
    assert distances == sorted(distances, reverse=True)
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "stop"


async def test_three_requests_are_computed_in_the_same_passes(
    served: Served, alone: Callable[..., torch.Tensor]
) -> None:
    before = await served.counts()
    async with served.at_once(3):
        tasks = [asyncio.create_task(served.image(f"three-{index}", index)) for index in range(3)]
    for index, task in enumerate(tasks):
        assert_close(await task, alone(index))
    after = await served.counts()
    passes, calls = after["passes"] - before["passes"], after["calls"] - before["calls"]
    assert calls - passes == 2 * NUM_STEPS  # two calls less in each pass, if each made one of its own


async def test_a_request_joins_at_a_later_step(served: Served, alone: Callable[..., torch.Tensor]) -> None:
    run = await served.submit("long", 2, num_steps=NEVER_ENDS)
    late: asyncio.Task[Pixels] | None = None
    async with asyncio.timeout(WAIT_S):
        async for event in run:
            if isinstance(event, ImageProgress) and event.step == 3:
                late = asyncio.create_task(served.image("late", 1))
            if late is not None and late.done():
                break
    assert late is not None
    assert isinstance(event, ImageProgress)  # it did not wait for the other's end
    assert_close(await late, alone(1))


async def test_the_tokens_of_a_step_are_limited(served: Served, alone: Callable[..., torch.Tensor]) -> None:
    await served.until_released()  # the last step of another test's request would be counted
    before = await served.counts()
    images = await asyncio.gather(*(served.image(f"five-{index}", index) for index in range(5)))
    after = await served.counts()
    for index, pixels in enumerate(images):
        assert_close(pixels, alone(index))
    calls, passes = after["calls"] - before["calls"], after["passes"] - before["passes"]
    assert calls == 5 * NUM_STEPS
    assert passes >= 2 * NUM_STEPS  # three fit into a step


async def test_waiting_requests_begin_by_priority_and_then_by_arrival(served: Served) -> None:
    asked = ImageOutput(WHOLE_STEP, 0, num_steps=NUM_STEPS)
    prompt, _ = served.orchestrator.images.render((ChatMessage("user", (TextPart("x"),)),), asked)
    finished: list[str] = []

    async def run(name: str, priority: int) -> None:
        await served.handle.run(name, prompt.token_ids, prompt.payload, priority=priority)
        finished.append(name)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group, served.at_once(4):
        for name, priority in (("last", 3), ("second", 1), ("third", 1), ("first", 0)):
            group.create_task(run(name, priority))
    assert finished == ["first", "second", "third", "last"]


async def test_an_abort_takes_effect_within_one_step(served: Served) -> None:
    run = await served.submit("aborted", num_steps=NEVER_ENDS)
    events = aiter(run)
    async with asyncio.timeout(WAIT_S):
        while not isinstance(event := await anext(events), ImageProgress) or event.step < 3:
            pass
        await run.aclose()
        # The engine reads messages between two steps, this one after the abort. The abort takes effect at the
        # beginning of the step that follows.
        calls = (await served.counts())["calls"]
        await served.until_released()
        assert (await served.counts())["calls"] - calls <= 1


async def test_health_checks_are_answered_while_an_image_is_computed(served: Served) -> None:
    run = await served.submit("healthy", num_steps=NEVER_ENDS)
    async with asyncio.timeout(WAIT_S):
        async for event in run:
            if isinstance(event, ImageProgress) and event.step == 3:
                await served.handle.check_health()
                break
    await served.until_released()


async def test_a_request_that_fails_does_not_disturb_the_others(
    served: Served, alone: Callable[..., torch.Tensor]
) -> None:
    good = asyncio.create_task(served.image("good", 1))
    with pytest.raises(StageError, match="stage 'image': "):
        await served.events("bad", num_steps=0)
    assert_close(await good, alone(1))


async def test_a_result_that_is_not_finite_is_corrupt(served: Served) -> None:
    with pytest.raises(CorruptDataError, match="latents that are NaN"):
        await served.events("nan", negative_prompt="rain", true_cfg_scale=math.inf)


async def test_a_request_whose_tokens_do_not_match_its_size_is_refused(served: Served) -> None:
    prompt, _ = served.orchestrator.images.render(
        (ChatMessage("user", (TextPart("x"),)),), ImageOutput(SIZE, 0)
    )
    job = decode_job(prompt.payload)
    with pytest.raises(StageError, match="an image of 64x64 has 16 tokens, not 4"):
        await served.handle.run("few", prompt.token_ids[:4], encode_job(job))


async def test_afterwards_all_is_as_before(served: Served, alone: Callable[..., torch.Tensor]) -> None:
    np.testing.assert_array_equal(await served.image("after"), as_pixels(alone()))
    await served.until_released()
    assert served.orchestrator.num_running == 0
    assert served.handle.engine.output_processor.event_sinks == {}
