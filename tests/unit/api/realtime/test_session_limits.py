"""How many generations one session may run."""

import asyncio

import numpy as np

from omni_server.generation import Deliver
from omni_server.types import OmniRequest
from tests.unit.api.fake_generator import FakeGeneration, FakeGenerator
from tests.unit.api.realtime.answers import ENDLESS
from tests.unit.api.realtime.realtime_client import RealtimeClient, silence, voice

BESIDE = {"conversation": "none"}


class SlowGeneration(FakeGeneration):
    """Is let go of when `released` is set."""

    released: asyncio.Event

    async def aclose(self) -> None:
        await self.released.wait()
        await super().aclose()


class SlowGenerator(FakeGenerator):
    """Generations without an end that are not let go of before `released` is set."""

    def __init__(self) -> None:
        super().__init__(script=ENDLESS)
        self.released = asyncio.Event()

    async def submit(self, request: OmniRequest, deliver: Deliver) -> FakeGeneration:
        self.requests.append(request)
        generation = SlowGeneration(request.request_id, ENDLESS, deliver)
        generation.released = self.released
        self.generations.append(generation)
        return generation


async def start(client: RealtimeClient, count: int) -> None:
    """So many responses beside the conversation."""
    for _ in range(count):
        await client.send("response.create", response=BESIDE)
        await client.until("response.output_audio.delta")


async def start_and_cancel(client: RealtimeClient, count: int) -> None:
    """So many responses of the conversation, one after the other, each cancelled while it speaks."""
    for _ in range(count):
        await client.begin()
        await client.send("response.cancel")
        await client.until("response.done")


async def test_four_responses_run_beside_one_of_the_conversation_and_no_more() -> None:
    async with RealtimeClient(FakeGenerator(script=ENDLESS)) as client:
        await client.opened()
        await start(client, 4)
        error = await client.refused("response.create", response=BESIDE)
        assert error["code"] == "too_many_responses"
        await client.begin()
        assert (await client.refused("response.create", response=BESIDE))["code"] == "too_many_responses"


async def test_a_response_that_has_ended_makes_room_for_another() -> None:
    async with RealtimeClient(FakeGenerator(script=ENDLESS)) as client:
        await client.opened()
        await start(client, 4)
        response_id = client.of_type("response.created")[0]["response"]["id"]
        await client.send("response.cancel", response_id=response_id)
        await client.until("response.done")
        await asyncio.wait_for(client.generator.generations[0].closed.wait(), 10)
        await start(client, 1)


async def test_transcriptions_count_among_the_responses_beside_the_conversation() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator) as client:
        await client.opened(audio={"input": {"turn_detection": None, "transcription": {}}})
        await start(client, 3)
        for _ in range(2):
            await client.append(voice(0.2))
            await client.send("input_audio_buffer.commit")
        failed = await client.until("conversation.item.input_audio_transcription.failed")
        assert failed["error"]["code"] == "server_overloaded"
        assert failed["item_id"] == client.of_type("input_audio_buffer.committed")[1]["item_id"]
        await client.send("response.create", response=BESIDE)
        assert (await client.until("error"))["error"]["code"] == "too_many_responses"
        assert len(generator.requests) == 4


async def test_cancelled_responses_count_until_the_model_has_let_go_of_them() -> None:
    generator = SlowGenerator()
    async with RealtimeClient(generator) as client:
        await client.opened()
        await start_and_cancel(client, 3)
        assert (await client.refused("response.create"))["code"] == "too_many_responses"
        generator.released.set()
        await asyncio.wait_for(generator.generations[-1].closed.wait(), 10)
        await client.begin()


async def test_a_turn_that_finds_too_many_cancelled_responses_is_answered_after_them() -> None:
    generator = SlowGenerator()
    async with RealtimeClient(generator) as client:
        await client.opened()
        await start_and_cancel(client, 3)
        await client.append(np.concatenate([voice(1), silence(1)]))
        await client.until("conversation.item.done")
        assert len(generator.requests) == 3
        generator.released.set()
        await client.until("response.output_audio.delta")
        assert len(generator.requests) == 4
