"""Events on their way out: in order, bounded, within time."""

import asyncio

import pytest
from openai.types.realtime import InputAudioBufferClearedEvent, ResponseAudioDeltaEvent
from pydantic_core import from_json

from omni_server.api.realtime.outbox import Outbox, SlowClientError


class Pipe:
    """Takes frames while `is_open` is set."""

    def __init__(self) -> None:
        self.frames: list[str | bytes] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def send(self, frame: str | bytes) -> None:
        await self.is_open.wait()
        self.frames.append(frame)


def put_audio(outbox: Outbox, response_id: str, data: str) -> None:
    outbox.put(
        ResponseAudioDeltaEvent,
        response_id=response_id,
        item_id="item",
        output_index=0,
        content_index=0,
        delta=data,
    )


async def test_only_the_audio_of_that_response_is_dropped() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe.send, 5)
    put_audio(outbox, "a", "1")
    put_audio(outbox, "b", "2")
    outbox.put(InputAudioBufferClearedEvent)
    put_audio(outbox, "b", "3")
    put_audio(outbox, "a", "4")
    outbox.drop_audio("b")
    running = asyncio.create_task(outbox.run())
    await asyncio.wait_for(outbox.wait_sent(), 5)
    assert [from_json(frame).get("delta") for frame in pipe.frames] == ["1", None, "4"]
    running.cancel()


async def test_unsent_events_are_bounded() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe.send, 5)
    for _ in range(40):
        put_audio(outbox, "a", "A" * 1024 * 1024)
    with pytest.raises(SlowClientError):
        await asyncio.wait_for(outbox.run(), 5)
    outbox.forget_all()
    outbox.put(InputAudioBufferClearedEvent)
    running = asyncio.create_task(outbox.run())
    await asyncio.wait_for(outbox.wait_sent(), 5)
    assert len(pipe.frames) == 1
    running.cancel()
