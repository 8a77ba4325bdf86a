"""Events on their way out: in order, bounded, within time."""

import asyncio

import pytest

from omni_server.api.realtime.outbox import Outbox, SlowClientError
from omni_server.api.realtime.server_events import BufferCleared, OutputAudioDelta, ServerEvent


class Pipe:
    """Takes frames while `is_open` is set."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def send(self, frame: str) -> None:
        await self.is_open.wait()
        self.frames.append(frame)


def delta(response_id: str, size: int = 4) -> ServerEvent:
    return OutputAudioDelta(response_id=response_id, item_id="item", delta="A" * size)


async def test_events_are_sent_in_order() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe.send, 5)
    events = [BufferCleared() for _ in range(20)]
    running = asyncio.create_task(outbox.run())
    for event in events:
        outbox.put(event)
        await asyncio.sleep(0)
    await asyncio.wait_for(outbox.wait_sent(), 5)
    assert pipe.frames == [event.model_dump_json() for event in events]
    running.cancel()


async def test_only_the_audio_of_that_response_is_dropped() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe.send, 5)
    kept = [delta("a"), BufferCleared(), delta("a")]
    for event in (kept[0], delta("b"), kept[1], delta("b"), kept[2]):
        outbox.put(event)
    outbox.drop_audio("b")
    running = asyncio.create_task(outbox.run())
    await asyncio.wait_for(outbox.wait_sent(), 5)
    assert pipe.frames == [event.model_dump_json() for event in kept]
    running.cancel()


async def test_who_takes_nothing_in_time_is_too_slow() -> None:
    pipe = Pipe()
    pipe.is_open.clear()
    outbox = Outbox(pipe.send, 0.05)
    outbox.put(BufferCleared())
    with pytest.raises(SlowClientError):
        await asyncio.wait_for(outbox.run(), 5)


async def test_unsent_events_are_bounded() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe.send, 5)
    for _ in range(40):
        outbox.put(delta("a", 1024 * 1024))
    with pytest.raises(SlowClientError):
        await asyncio.wait_for(outbox.run(), 5)
    outbox.forget_all()
    outbox.put(BufferCleared())
    running = asyncio.create_task(outbox.run())
    await asyncio.wait_for(outbox.wait_sent(), 5)
    assert len(pipe.frames) == 1
    running.cancel()
