"""A request that diffusion stages answer with an image."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.config.stage_config import StageConfig
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import (
    DeadlineExceededError,
    InvalidRequestError,
)
from omni_server.family import DiffusionPrompt, FamilyModel
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.protocol.images import StageEvent
from omni_server.types import ChatMessage, OmniRequest, TextPart
from omni_server.types.images import ImageOutput, ImageSize
from tests.toy_families import image_only
from tests.toy_families.image_only import ImageModel
from tests.unit.orchestrator.fake_stages import FakeEngine, collected, settle, submit


class FakePainter(FakeEngine):
    """Stands for `DiffusionHandle`."""

    def __init__(self) -> None:
        super().__init__("painter")
        self.gate = asyncio.Event()
        self.gate.set()
        self.payloads: list[bytes] = []
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
        self.num_active += 1
        try:
            await self.gate.wait()
            return np.zeros((32, 32, 3), np.float32)
        finally:
            self.num_active -= 1


def orchestrator_of(painter: FakePainter) -> Orchestrator:
    config = StageConfig.model_validate(
        {
            "model_family": "tests.toy_families.image_only:FAMILY",
            "platform": "cpu",
            "stages": {"painter": {"max_model_len": 6}},
        }
    )
    diffusion = {"painter": Stage("painter", (cast(DiffusionHandle, painter),))}
    model = cast(FamilyModel, ImageModel(Path()))
    return Orchestrator(model, config, ar={}, diffusion=diffusion, request_timeout_s=30.0)


def request(size: ImageSize | None = None, seed: int | None = 5) -> OmniRequest:
    message = ChatMessage("user", (TextPart("A lighthouse"),))
    return OmniRequest("a", (message,), image=ImageOutput(size, seed))


@pytest.fixture
def painter() -> FakePainter:
    return FakePainter()


async def test_a_size_that_is_not_offered_is_refused(painter: FakePainter) -> None:
    with pytest.raises(InvalidRequestError, match="32x32, 48x32") as refusal:
        await submit(orchestrator_of(painter), request(ImageSize(8, 8)))
    assert refusal.value.param == "size"
    assert painter.payloads == []


async def test_a_prompt_longer_than_the_stage_takes_is_refused(
    painter: FakePainter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_only, "PIXELS_PER_TOKEN", 8)
    with pytest.raises(InvalidRequestError) as refusal:
        await submit(orchestrator_of(painter), request())
    assert refusal.value.code == "context_length_exceeded"


async def test_rendering_does_not_block_the_event_loop(
    painter: FakePainter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding large images to edit takes a while."""
    render, go_on = ImageModel.image_prompt, threading.Event()

    def slow(self: ImageModel, *args: Any, **kwargs: Any) -> DiffusionPrompt:
        assert go_on.wait(60)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(ImageModel, "image_prompt", slow)
    submitting = asyncio.create_task(submit(orchestrator_of(painter), request()))
    await settle()
    go_on.set()
    assert len(await collected(await submitting)) == 2


async def test_a_deadline_ends_it(painter: FakePainter) -> None:
    painter.gate.clear()
    run = await submit(orchestrator_of(painter), replace(request(), deadline_s=0.05))
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(collected(run), 5)
    assert painter.num_active == 0
