"""A request whose text one stage writes, and of which another draws an image."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import cast

import msgspec
import numpy as np
import pytest

from omni_server.config.pipeline import EdgeSpec, Pipeline, StageSpec, Text
from omni_server.config.stage_config import StageConfig
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import CorruptDataError, InvalidRequestError, StageDeadError
from omni_server.family import FamilyModel
from omni_server.images import ImageDone, ImageOutput, ImageSize
from omni_server.omni import warm_up_request
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.types import (
    ChatMessage,
    Finished,
    OmniEvent,
    OmniRequest,
    TextDelta,
    TextDone,
    TextPart,
)
from tests.toy_families import image_only
from tests.toy_families.image_only import ImageInput, ImageModel
from tests.unit.orchestrator.fake_stages import collected, kinds, only, settle
from tests.unit.orchestrator.test_images import LADDER, FakePainter
from tests.unit.orchestrator.test_orchestrator import FakeEntry


def shouted(text: str) -> str:
    return text.upper()


class DrawnTextFamily(image_only.ImageFamily):
    pipeline = Pipeline(
        {"writer": StageSpec("ar", output="text"), "painter": StageSpec("diffusion", output="image")},
        (EdgeSpec("writer", "painter", Text(), f"{__name__}:shouted"),),
    )


class DrawnTextModel(ImageModel):
    stop_ids: Mapping[str, tuple[int, ...]] = MappingProxyType({"writer": (256,)})


FAMILY = DrawnTextFamily()


class Chain:
    def __init__(self) -> None:
        self.writer, self.painter = FakeEntry("writer", prompt=(1, 2, 3)), FakePainter("painter", LADDER)
        self.config = StageConfig.model_validate(
            {
                "model_family": f"{__name__}:FAMILY",
                "platform": "cpu",
                "stages": {"writer": {"max_model_len": 512}, "painter": {"max_model_len": 6}},
            }
        )
        self.orchestrator = Orchestrator(
            cast(FamilyModel, DrawnTextModel(Path())),
            self.config,
            ar={"writer": Stage("writer", (cast(ArHandle, self.writer),))},
            diffusion={"painter": Stage("painter", (cast(DiffusionHandle, self.painter),))},
            request_timeout_s=30.0,
        )

    @property
    def drawn(self) -> list[ImageInput]:
        return [msgspec.msgpack.decode(payload, type=ImageInput) for payload in self.painter.payloads]


def request(image: ImageOutput | None) -> OmniRequest:
    return OmniRequest("a", (ChatMessage("user", (TextPart("Draw"),)),), image=image)


async def test_the_image_is_drawn_of_the_whole_text_when_it_is_complete() -> None:
    chain = Chain()
    run = await chain.orchestrator.submit(request(ImageOutput(ImageSize(48, 32), seed=7)))
    chain.painter.result = np.zeros((32, 48, 3), np.float32)
    events = asyncio.create_task(collected(run))
    await settle()
    chain.writer.stream.send(5, text="a light")
    await settle()
    assert chain.painter.payloads == []
    chain.writer.stream.send(6, 256, text="house", finish="stop")
    told = await events
    assert chain.drawn == [ImageInput("A LIGHTHOUSE", 48, 32, 7)]
    assert "".join(event.text for event in told if isinstance(event, TextDelta)) == "a lighthouse"
    image = cast(ImageDone, only(ImageDone, told))
    assert (image.pixels.shape, image.prompt) == ((32, 48, 3), "A LIGHTHOUSE")
    finished = told[-1]
    assert isinstance(finished, Finished)
    usage = finished.usage
    assert (finished.finish_reason, usage.prompt.total, usage.text_tokens) == ("stop", 3, 3)
    assert usage.image_tokens == 3 * 2
    assert list(finished.times) == ["writer", "painter"]


async def test_a_chat_without_an_image_leaves_the_painter_alone() -> None:
    chain = Chain()
    chain.painter.life.went_down("killed")  # and does not need it
    run = await chain.orchestrator.submit(request(None))
    events = asyncio.create_task(collected(run))
    await settle()
    chain.writer.stream.send(256, text="Hello", finish="stop")
    assert kinds(await events) == ["TextDelta", "TextDone", "Finished"]
    assert chain.painter.payloads == []


async def test_an_image_that_cannot_be_drawn_is_refused_before_anything_is_written() -> None:
    chain = Chain()
    with pytest.raises(InvalidRequestError, match="size 64x64 is not offered"):
        await chain.orchestrator.submit(request(ImageOutput(ImageSize(64, 64))))
    assert chain.writer.streams == []


async def test_a_painter_that_is_down_when_the_text_is_written_ends_the_request() -> None:
    chain = Chain()
    run = await chain.orchestrator.submit(request(ImageOutput()))
    events = asyncio.create_task(collected(run))
    await settle()
    chain.painter.life.went_down("killed")
    chain.writer.stream.send(256, text="A boat", finish="stop")
    with pytest.raises(StageDeadError, match="painter"):
        await events
    assert chain.writer.stream.num_closed == 1


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_painter_that_fails_after_the_text_was_written_ends_the_request(is_killed: bool) -> None:
    chain = Chain()
    chain.painter.gate.clear()
    run = await chain.orchestrator.submit(request(ImageOutput()))
    told: list[OmniEvent] = []

    async def read() -> None:
        async for event in run:
            told.append(event)

    reading = asyncio.create_task(read())
    await settle()
    chain.writer.stream.send(256, text="A boat", finish="stop")
    async with asyncio.timeout(10):
        await chain.painter.began.wait()
    if is_killed:
        chain.painter.life.went_down("killed")
    else:
        chain.painter.error = CorruptDataError("painter", "samples", "pixels that are NaN")
        chain.painter.gate.set()
    with pytest.raises(StageDeadError if is_killed else CorruptDataError, match="painter"):
        await reading
    assert kinds(told) == ["TextDelta", "TextDone"]
    assert (chain.painter.num_active, chain.writer.stream.num_closed) == (0, 1)
    assert chain.orchestrator.num_running == 0


async def test_a_client_that_leaves_between_text_and_image_frees_both_stages() -> None:
    chain = Chain()
    run = await chain.orchestrator.submit(request(ImageOutput()))
    await settle()
    chain.writer.stream.send(256, text="A boat", finish="stop")
    async with asyncio.timeout(10):
        async with aclosing(aiter(run)) as events:
            async for event in events:
                if isinstance(event, TextDone):
                    break
    assert chain.painter.num_active == 0
    assert chain.writer.stream.num_closed == 1
    assert chain.orchestrator.num_running == 0


async def test_a_client_that_leaves_while_the_image_is_drawn_frees_both_stages() -> None:
    chain = Chain()
    chain.painter.gate.clear()
    run = await chain.orchestrator.submit(request(ImageOutput()))
    await settle()
    chain.writer.stream.send(256, text="A boat", finish="stop")
    async with asyncio.timeout(10):
        await chain.painter.began.wait()
    await run.aclose()
    assert (chain.painter.num_active, chain.writer.stream.num_closed) == (0, 1)
    assert chain.orchestrator.num_running == 0


def test_a_warm_up_passes_both_stages() -> None:
    request = warm_up_request(Chain().config, is_greedy=True)
    assert request.image is not None
    assert request.sampling.keys() == {"writer"}
