"""Diffusion stages one behind the other: what each is given, and what becomes of it where one fails."""

import asyncio
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.errors import CorruptDataError, StageDeadError
from omni_server.orchestrator.decoder import Decoder
from omni_server.orchestrator.request_timeline import RequestTimeline
from tests.unit.orchestrator.fake_stages import FakeCode2Wav, settle

TONES = np.arange(6, dtype=np.float32).reshape(3, 2)


class Engine(FakeCode2Wav):
    def __init__(self, name: str, result: npt.NDArray[np.float32]) -> None:
        super().__init__(name)
        self.sound = result
        self.payloads: list[bytes] = []

    async def run(self, *arguments: Any, **options: Any) -> npt.NDArray[np.float32]:
        self.payloads.append(arguments[2])
        return await super().run(*arguments, **options)


class Pair:
    def __init__(self) -> None:
        self.tones, self.mixer = Engine("tones", TONES), Engine("mixer", TONES.sum(axis=1))
        self.decoder = Decoder([cast(DiffusionHandle, engine) for engine in (self.tones, self.mixer)])

    async def run(self) -> npt.NDArray[np.float32]:
        timeline = RequestTimeline()
        timeline.mark_submitted("tones")
        async with self.decoder.needed():
            return await self.decoder.run(
                "a-0", (1, 2), b"window", priority=3, num_streams=1, timeline=timeline
            )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_what_cannot_be_right_is_found_where_it_was_made(value: float) -> None:
    pair = Pair()
    pair.tones.sound = np.full((3, 2), value, np.float32)
    with pytest.raises(CorruptDataError, match=r"stage 'tones': corrupt data \(samples\): "):
        await pair.run()
    assert pair.mixer.payloads == []


@pytest.mark.parametrize("dead", ["tones", "mixer"])
@pytest.mark.parametrize("computing", ["tones", "mixer"])
async def test_a_stage_that_dies_ends_the_work_of_the_others(dead: str, computing: str) -> None:
    pair = Pair()
    engines = {"tones": pair.tones, "mixer": pair.mixer}
    engines[computing].gate.clear()
    work = asyncio.create_task(pair.run())
    await settle()
    assert engines[computing].running == 1
    engines[dead].life.went_down("killed")
    with pytest.raises(StageDeadError, match=f"stage '{dead}'"):
        await work
    assert [engine.running for engine in engines.values()] == [0, 0]


async def test_stages_that_die_together_are_one_error() -> None:
    pair = Pair()
    pair.tones.gate.clear()
    work = asyncio.create_task(pair.run())
    await settle()
    pair.mixer.life.went_down("killed")
    pair.tones.life.went_down("killed")
    with pytest.raises(StageDeadError):
        await work
    assert work.cancelling() == 0
    assert pair.tones.running == 0
