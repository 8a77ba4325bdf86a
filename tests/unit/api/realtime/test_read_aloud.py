"""A session with a model that only reads aloud: its responses speak what users write."""

from dataclasses import replace
from typing import Any

import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.api.voice_store import StoredVoice
from omni_server.types import ClonedVoice, ModelInfo, SamplingConfig
from tests.unit.api.fake_generator import (
    CLONING_CHAT_MODEL,
    CLONING_MODEL,
    PIECES,
    PROMPT,
    READING_MODEL,
    SAMPLES,
    FakeGenerator,
    finished,
)
from tests.unit.api.realtime.answers import ENDLESS, OPENING, SPOKEN_CLOSING
from tests.unit.api.realtime.realtime_client import RealtimeClient, audio_of, base64_of
from tests.unit.api.test_speech import LONG


def reading(**fields: Any) -> RealtimeClient:
    return RealtimeClient(FakeGenerator(READING_MODEL, **fields))


def speech_of(client: RealtimeClient) -> Any:
    return client.generator.last_request.speech


async def test_a_message_of_the_user_is_read_aloud_and_is_the_transcript() -> None:
    async with reading() as client:
        audio = {"output": {"voice": "Ethan"}}
        await client.opened(instructions="Whisper.", max_output_tokens=40, audio=audio)
        await client.say("Good morning!")
        first = len(client.events)
        done = await client.answer()
        types = [event["type"] for event in client.events[first:]]
        assert types[: len(OPENING) + 1] == [*OPENING, "response.output_audio_transcript.delta"]
        assert set(types[len(OPENING) + 1 : -6]) == {"response.output_audio.delta"}
        assert types[-6:] == SPOKEN_CLOSING
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["transcript"] == "Good morning!"
        assert len(audio_of(client.events)) == 2 * SAMPLES.size
        assert (speech_of(client).text, speech_of(client).voice) == ("Good morning!", "Ethan")
        assert speech_of(client).instructions == "Whisper."
        assert client.generator.last_request.sampling == {"talker": SamplingConfig(max_tokens=40)}


@pytest.mark.parametrize("model", [CLONING_MODEL, CLONING_CHAT_MODEL])
async def test_a_model_that_clones_speaks_in_a_voice_that_was_sent(model: ModelInfo) -> None:
    async with RealtimeClient(FakeGenerator(model)) as client:
        await client.opened()
        client.state.voices.add(StoredVoice("Ada", 0, "Ada", ClonedVoice(b"1234")))
        error = await client.refused("session.update", session=session_with("Bob"))
        assert error["param"] == "session.audio.output.voice"
        await client.say("Hello.")
        await client.send("session.update", session=session_with("Ada"))
        assert (await client.until("session.updated"))["session"]["audio"]["output"]["voice"] == "Ada"
        assert (await client.answer())["status"] == "completed"
        assert speech_of(client).clone == ClonedVoice(b"1234")


def session_with(voice: str) -> Any:
    return {"type": "realtime", "audio": {"output": {"voice": voice}}}


@pytest.mark.parametrize("model", [CLONING_MODEL, CLONING_CHAT_MODEL])
async def test_a_model_that_clones_needs_a_voice(model: ModelInfo) -> None:
    async with RealtimeClient(FakeGenerator(model)) as client:
        await client.opened()
        await client.say("Hello.")
        assert (await client.refused("response.create"))["param"] == "response.audio.output.voice"
        voice = StoredVoice("Ada", 0, "Ada", ClonedVoice(b"1234"))
        client.state.voices.add(voice)
        await client.send("session.update", session=session_with("Ada"))
        await client.until("session.updated")
        client.state.voices.remove(voice)
        await client.send("session.update", session={"type": "realtime", "instructions": "Whisper."})
        await client.until("session.updated")
        assert (await client.refused("response.create"))["param"] == "response.audio.output.voice"


async def test_each_response_reads_what_was_written_since_the_last_one() -> None:
    async with reading() as client:
        await client.opened()
        await client.say("One.")
        await client.answer()
        await client.say("Two.")
        await client.say("Three.")
        await client.answer()
        assert speech_of(client).text == "Two.\nThree."
        error = await client.refused("response.create")
        assert (error["code"], error["param"]) == ("empty_string", "response.input")


async def test_what_is_written_before_an_answer_begins_is_read_by_the_next() -> None:
    async with reading() as client:
        await client.opened()
        await client.say("One.")
        client.generator.may_submit.clear()
        await client.send("response.create")
        await client.say("Two.")
        client.generator.may_submit.set()
        await client.until("response.done")
        await client.answer()
        assert speech_of(client).text == "Two."


async def test_what_is_read_may_be_deleted_before_the_answer_begins() -> None:
    async with reading() as client:
        await client.opened()
        item_id = await client.say("One.")
        client.generator.may_submit.clear()
        await client.send("response.create")
        await client.send("conversation.item.delete", item_id=item_id)
        await client.until("conversation.item.deleted")
        client.generator.may_submit.set()
        assert (await client.until("response.done"))["response"]["status"] == "completed"


async def test_input_of_a_response_is_read_in_place_of_the_conversation() -> None:
    async with reading() as client:
        await client.opened()
        await client.say("Later.")
        content = [{"type": "input_text", "text": "Now."}]
        item = {"type": "message", "role": "user", "content": content}
        await client.answer({"conversation": "none", "input": [item]})
        assert speech_of(client).text == "Now."
        await client.answer()
        assert speech_of(client).text == "Later."


async def test_a_long_text_is_one_response_of_several_passages() -> None:
    async with RealtimeClient(FakeGenerator(replace(READING_MODEL, longest_speech_s=60.0))) as client:
        await client.opened()
        await client.say(LONG)
        done = await client.answer()
        num_passages = len(client.generator.requests)
        assert num_passages > 1
        assert len(audio_of(client.events)) == 2 * SAMPLES.size * num_passages
        assert done["output"][0]["content"][0]["transcript"] == LONG.strip()
        assert done["usage"]["input_tokens"] == PROMPT.total * num_passages
        assert done["usage"]["output_token_details"]["audio_tokens"] == len(PIECES) * num_passages


async def test_speech_that_reaches_its_limit_is_incomplete() -> None:
    async with reading(script=[finished("length", codec_tokens=3)]) as client:
        await client.opened()
        await client.say("One.")
        done = await client.answer()
        assert done["status"] == "incomplete"
        assert done["status_details"]["reason"] == "max_output_tokens"


async def test_speech_is_cancelled_and_truncated_as_any_answer() -> None:
    async with reading(script=ENDLESS[1:]) as client:
        await client.opened()
        await client.say("Once upon a time there was a king.")
        await client.begin()
        await client.send("response.cancel")
        done = (await client.until("response.done"))["response"]
        assert done["status"] == "cancelled"
        item_id = done["output"][0]["id"]
        await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=83)
        await client.until("conversation.item.truncated")
        await client.send("conversation.item.retrieve", item_id=item_id)
        item = (await client.until("conversation.item.retrieved"))["item"]
        assert item["content"][0]["transcript"] == "Once upon a time"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"output_modalities": ["text"]}, "output_modalities"),
        ({"tools": [{"type": "function", "name": "weather"}]}, "tools"),
    ],
)
async def test_text_and_calls_are_refused(changes: dict[str, Any], param: str) -> None:
    async with reading() as client:
        await client.opened()
        error = await client.refused("session.update", session={"type": "realtime", **changes})
        assert (error["code"], error["param"]) == ("unsupported_value", f"session.{param}")
        assert error["message"] == "This model only reads aloud."


async def test_sound_is_refused() -> None:
    async with reading() as client:
        await client.opened()
        error = await client.refused("input_audio_buffer.append", audio=base64_of(bytes(4800)))
        assert error["message"] == "This model does not take audio input."
        content = [{"type": "input_audio", "audio": base64_of(bytes(4800))}]
        item = {"type": "message", "role": "user", "content": content}
        error = await client.refused("conversation.item.create", item=item)
        assert error["message"] == "This model does not take audio input."


@pytest.mark.parametrize(
    ("text", "instructions", "param"),
    [("123456", "", "response.input"), ("12345", "a" * 5000, "response.instructions")],
)
async def test_what_is_too_long_is_refused(text: str, instructions: str, param: str) -> None:
    config = ApiConfig(max_speech_characters=5)
    async with RealtimeClient(state=ServerState(FakeGenerator(READING_MODEL)), config=config) as client:
        await client.opened(instructions=instructions)
        await client.say(text)
        error = await client.refused("response.create")
        assert (error["code"], error["param"]) == ("string_above_max_length", param)
