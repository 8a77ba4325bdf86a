"""Responses: their events in order, overrides, failures, cancelling."""

import asyncio
import json

import numpy as np
import pytest

from omni_server.errors import OverloadedError, StageError
from omni_server.types import AudioDelta, TextDelta, TextPart
from tests.unit.api.fake_generator import (
    SAMPLES,
    TEXT,
    FakeGenerator,
    ScriptEntry,
    finished,
)
from tests.unit.api.realtime.answers import CLOSING, ENDLESS, OPENING, SPOKEN_CLOSING
from tests.unit.api.realtime.realtime_client import (
    RealtimeClient,
    audio_of,
    voice,
)


async def test_a_text_response_comes_in_order() -> None:
    async with RealtimeClient() as client:
        await client.opened(output_modalities=["text"])
        user_id = await client.say("hi")
        first = len(client.events)
        await client.send("response.create")
        done = await client.until("response.done")
        answer = client.events[first:]
        deltas = [event["delta"] for event in answer if event["type"] == "response.output_text.delta"]
        assert [event["type"] for event in answer] == [
            *OPENING,
            *["response.output_text.delta"] * len(deltas),
            "response.output_text.done",
            *CLOSING,
        ]
        assert "".join(deltas) == TEXT
        response = done["response"]
        item = response["output"][0]
        assert item["content"] == [{"type": "output_text", "text": TEXT, "transcript": None}]
        assert item["status"] == "completed"
        assert response["status"] == "completed"
        assert response["usage"] == {
            "total_tokens": 26,
            "input_tokens": 20,
            "output_tokens": 6,
            "input_token_details": {
                "text_tokens": 12,
                "audio_tokens": 5,
                "image_tokens": 2,
                "cached_tokens": 3,
            },
            "output_token_details": {"text_tokens": 6, "audio_tokens": 0},
        }
        assert answer[0]["response"]["status"] == "in_progress"
        assert answer[0]["response"]["usage"] is None
        assert answer[2]["previous_item_id"] == user_id
        assert answer[2]["item"]["role"] == "assistant"
        assert all(event["item_id"] == item["id"] for event in answer if "item_id" in event)
        assert client.generator.last_request.speech is None


async def test_a_spoken_response_comes_in_order() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.say("hi")
        first = len(client.events)
        await client.send("response.create")
        done = await client.until("response.done")
        types = [event["type"] for event in client.events[first:]]
        assert types[:4] == OPENING
        assert types[-6:] == SPOKEN_CLOSING
        assert set(types[4:-6]) == {"response.output_audio.delta", "response.output_audio_transcript.delta"}
        deltas = client.of_type("response.output_audio_transcript.delta")
        assert "".join(event["delta"] for event in deltas) == TEXT
        assert client.of_type("response.output_audio_transcript.done")[0]["transcript"] == TEXT
        part = client.of_type("response.content_part.done")[0]["part"]
        assert (part["type"], part["transcript"]) == ("audio", TEXT)
        content = done["response"]["output"][0]["content"]
        assert content == [{"type": "output_audio", "text": None, "transcript": TEXT}]
        heard = np.frombuffer(audio_of(client.events), dtype="<i2")
        assert np.abs(heard / 32768 - SAMPLES).max() < 1 / 32768
        assert done["response"]["usage"]["output_token_details"]["audio_tokens"] > 0
        request = client.generator.last_request
        assert request.speech is not None
        assert request.speech.voice == "Chelsie"


async def test_long_audio_is_sent_in_deltas_of_a_fifth_of_a_second() -> None:
    script: list[ScriptEntry] = [AudioDelta(0, voice(1.1)), finished(codec_tokens=1)]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened()
        await client.answer()
        sizes = [len(audio_of([event])) for event in client.of_type("response.output_audio.delta")]
        assert sizes == [9600] * 5 + [4800]


async def test_overrides_hold_for_one_response() -> None:
    async with RealtimeClient() as client:
        await client.opened(instructions="Be kind.")
        await client.say("hi")
        overrides = {
            "instructions": "Be rude.",
            "output_modalities": ["text"],
            "max_output_tokens": 5,
            "audio": {"output": {"voice": "Ethan"}},
        }
        response = await client.answer(overrides)
        assert response["output_modalities"] == ["text"]
        assert response["max_output_tokens"] == 5
        assert response["audio"]["output"]["voice"] == "Ethan"
        request = client.generator.last_request
        assert request.messages[0].content == (TextPart("Be rude."),)
        assert request.sampling["thinker"].max_tokens == 5
        await client.answer()
        request = client.generator.last_request
        assert request.messages[0].content == (TextPart("Be kind."),)
        assert request.sampling["thinker"].max_tokens is None


async def test_an_answer_that_ran_into_its_limit_is_incomplete() -> None:
    script: list[ScriptEntry] = [TextDelta("a", (1,)), finished("length")]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened()
        response = await client.answer()
        assert response["status"] == "incomplete"
        assert response["status_details"]["reason"] == "max_output_tokens"
        assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("error", [StageError("talker", "broken"), RuntimeError("secret")])
async def test_a_response_that_fails_says_so_and_the_session_goes_on(error: Exception) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), error])
    async with RealtimeClient(generator) as client:
        await client.opened()
        response = await client.answer()
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["type"] == "server_error"
        assert "secret" not in json.dumps(response)
        assert response["usage"]["total_tokens"] == 0
        generator.script = None
        assert (await client.answer())["status"] == "completed"
    assert all(generation.num_closed == 1 for generation in generator.generations)


@pytest.mark.parametrize("kind", ["audio/pcm", "audio/pcmu"])
async def test_invalid_audio_fails_the_response(kind: str) -> None:
    broken = np.array([np.nan], dtype=np.float32)
    script: list[ScriptEntry] = [
        AudioDelta(0, SAMPLES[:3000]),
        AudioDelta(3000, broken),
        finished(),
    ]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened(audio={"output": {"format": {"type": kind}}})
        response = await client.answer()
        assert response["status"] == "failed"
        assert "not finite" in response["status_details"]["error"]["message"]


async def test_a_request_that_is_not_admitted_is_a_failed_response() -> None:
    generator = FakeGenerator()
    generator.submit_error = OverloadedError("full")
    async with RealtimeClient(generator) as client:
        await client.opened()
        response = await client.answer()
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "server_overloaded"
        assert response["output"] == []
        assert client.types()[1:] == ["response.created", "response.done"]


async def test_a_response_is_cancelled_at_once() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.begin()
        await client.send("response.cancel")
        done = await client.until("response.done")
        assert client.types()[-6:] == SPOKEN_CLOSING
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["status_details"] == {
            "type": "cancelled",
            "reason": "client_cancelled",
            "error": None,
        }
        assert done["response"]["usage"]["total_tokens"] == 0
        assert done["response"]["output"][0]["status"] == "incomplete"
        await asyncio.wait_for(generator.generations[0].closed.wait(), 5)
        await client.nothing_comes()


async def test_cancelling_while_the_request_waits_for_admission() -> None:
    generator = FakeGenerator()
    generator.submit_hangs = True
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.send("response.create")
        response_id = (await client.until("response.created"))["response"]["id"]
        await asyncio.wait_for(generator.submitted.wait(), 5)
        await client.send("response.cancel", response_id=response_id)
        assert (await client.next())["response"]["status"] == "cancelled"
    assert generator.submit_cancelled


async def test_cancelling_nothing_is_a_harmless_error() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        for fields in ({}, {"response_id": "resp_1"}):
            error = await client.refused("response.cancel", **fields)
            assert error["code"] == "response_cancel_not_active"
            assert error["message"].startswith("Cancellation failed: no active response found")


async def test_only_one_response_of_the_conversation_at_a_time() -> None:
    async with RealtimeClient(FakeGenerator(script=ENDLESS)) as client:
        await client.opened()
        await client.begin()
        error = await client.refused("response.create")
        assert error["code"] == "conversation_already_has_active_response"
        await client.send("response.cancel")
        assert (await client.until("response.done"))["response"]["status"] == "cancelled"
        await client.send("response.create")
        await client.until("response.created")


async def test_a_response_beside_the_conversation_leaves_it_alone() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.say("the conversation")
        await client.begin()
        generator.script = None
        first = len(client.events)
        given = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "something else"}],
        }
        overrides = {
            "conversation": "none",
            "output_modalities": ["text"],
            "input": [given],
            "metadata": {"a": "b"},
        }
        await client.send("response.create", response=overrides)
        done = await client.until("response.done")
        assert done["response"]["conversation_id"] is None
        assert done["response"]["metadata"] == {"a": "b"}
        assert done["response"]["status"] == "completed"
        assert not [event for event in client.events[first:] if event["type"].startswith("conversation.")]
        assert [message.content for message in generator.last_request.messages] == [
            (TextPart("something else"),)
        ]
        await client.send("response.cancel")
        assert (await client.until("response.done"))["response"]["status"] == "cancelled"


async def test_a_response_may_refer_to_items() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        first = await client.say("one")
        await client.say("two")
        await client.answer({"input": [{"type": "item_reference", "id": first}]})
        assert [m.content for m in client.generator.last_request.messages] == [(TextPart("one"),)]
        reference = [{"type": "item_reference", "id": "nothing"}]
        error = await client.refused("response.create", response={"input": reference})
        assert error["param"] == "response.input[0].id"
