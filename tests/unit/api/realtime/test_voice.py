"""The user's voice: committed by hand or by the detector of turns, interruptions, transcription."""

import asyncio
import threading

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.api.state import ServerState
from omni_server.errors import OverloadedError
from omni_server.types import AudioDelta, AudioPart, TextDelta, TextPart, Transcribe
from tests.unit.api.fake_generator import (
    TEXT,
    FakeGenerator,
    Hang,
    ScriptEntry,
    Wait,
    finished,
    speech_script,
)
from tests.unit.api.realtime.answers import ENDLESS, MANUAL
from tests.unit.api.realtime.realtime_client import (
    RealtimeClient,
    ScriptedModel,
    audio_of,
    base64_of,
    realtime_app,
    silence,
    voice,
)
from tests.unit.orchestrator.virtual_time import in_virtual_time


async def test_audio_is_committed_by_hand_and_answered() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio=MANUAL)
        await client.append(voice(0.7))
        await client.nothing_comes()
        await client.append(voice(0.7))
        first = len(client.events)
        await client.send("input_audio_buffer.commit")
        done = await client.until("conversation.item.done")
        committed, added, _ = client.events[first:]
        assert committed["type"] == "input_audio_buffer.committed"
        assert added["type"] == "conversation.item.added"
        assert committed["item_id"] == added["item"]["id"] == done["item"]["id"]
        assert done["item"]["content"] == [{"type": "input_audio", "text": None, "transcript": None}]
        await client.nothing_comes()
        await client.answer()
        part = client.generator.last_request.messages[0].content[0]
        assert isinstance(part, AudioPart)
        assert len(part.samples) == 0.7 * 24_000


async def test_telephone_audio_comes_in_at_its_rate() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio={"input": {"turn_detection": None, "format": {"type": "audio/pcma"}}})
        await client.send("input_audio_buffer.append", audio=base64_of(b"\xd5" * 4000))
        await client.send("input_audio_buffer.commit")
        await client.answer()
        part = client.generator.last_request.messages[0].content[0]
        assert isinstance(part, AudioPart)
        assert (len(part.samples), part.sample_rate_hz) == (4000, 8000)


async def test_committing_too_little_audio_is_refused() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio=MANUAL)
        for seconds in (0.0, 0.09):
            await client.append(voice(seconds))
            error = await client.refused("input_audio_buffer.commit")
            assert error["code"] == "input_audio_buffer_commit_empty"
            assert "buffer too small. Expected at least 100ms" in error["message"]


@pytest.mark.parametrize("audio", ["no base64!", "AAA", base64_of(b"\0\0\0")])
async def test_audio_that_is_none_is_refused(audio: str) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        error = await client.refused("input_audio_buffer.append", audio=audio)
        assert (error["code"], error["param"]) == ("invalid_value", "audio")


async def test_clearing_forgets_the_audio() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio=MANUAL)
        await client.append(voice(1))
        await client.send("input_audio_buffer.clear")
        assert (await client.next())["type"] == "input_audio_buffer.cleared"
        error = await client.refused("input_audio_buffer.commit")
        assert error["code"] == "input_audio_buffer_commit_empty"


async def test_a_spoken_turn_is_found_committed_and_answered() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.append(np.concatenate([silence(2), voice(1), silence(1)]))
        await client.until("response.done")
        assert client.types()[1:7] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
        ]
        started, stopped, committed, added, _, _ = client.events[1:7]
        assert abs(started["audio_start_ms"] - 1700) <= 32
        assert abs(stopped["audio_end_ms"] - 3500) <= 64
        assert len({started["item_id"], stopped["item_id"], committed["item_id"], added["item"]["id"]}) == 1
        part = client.generator.last_request.messages[0].content[0]
        assert isinstance(part, AudioPart)
        length_ms = 1000 * len(part.samples) / 24_000
        assert abs(length_ms - (stopped["audio_end_ms"] - started["audio_start_ms"])) < 2
        assert client.of_type("response.done")[0]["response"]["status"] == "completed"


async def test_a_turn_is_only_committed_where_no_response_is_wanted() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio={"input": {"turn_detection": {"create_response": False}}})
        await client.append(np.concatenate([voice(1), silence(1)]))
        await client.until("conversation.item.done")
        await client.nothing_comes()
    assert client.generator.requests == []


async def test_speech_interrupts_the_response() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.say("Tell me a story")
        await client.send("response.create")
        response_id = (await client.until("response.output_audio.delta"))["response_id"]
        await client.append(voice(0.2))
        done = await client.until("response.done")
        assert done["response"]["id"] == response_id
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        assert "input_audio_buffer.speech_started" in client.types()
        await asyncio.wait_for(generator.generations[0].closed.wait(), 5)
        item = done["response"]["output"][0]
        await client.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=150)
        await client.until("conversation.item.truncated")
        generator.script = speech_script()
        ended = len(client.events)
        await client.append(silence(1))
        done = await client.until("response.done")
        later = [event for event in client.events[ended:] if event["type"] == "response.output_audio.delta"]
        assert later
        assert all(event["response_id"] != response_id for event in later)
        roles = [message.role for message in generator.last_request.messages]
        assert roles == ["user", "assistant", "user"]
        assert generator.last_request.messages[1].content == (TextPart("Once upon a"),)


@in_virtual_time
async def test_unsent_audio_is_dropped_by_an_interruption() -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), AudioDelta(0, voice(10)), Hang()])
    async with RealtimeClient(generator) as client:
        await client.opened()
        client.reading.clear()
        await client.send("response.create")
        await asyncio.wait_for(generator.submitted.wait(), 5)
        await asyncio.sleep(0.05)
        await client.send("response.cancel")
        await asyncio.wait_for(generator.generations[0].closed.wait(), 5)
        client.reading.set()
        await client.until("response.done")
    assert client.of_type("response.output_audio_transcript.delta")
    assert audio_of(client.events) == b""


async def test_a_turn_beside_an_uninterruptible_response_is_answered_after_it() -> None:
    go_on = asyncio.Event()
    script: list[ScriptEntry] = [TextDelta("a", (1,)), Wait(go_on), finished()]
    generator = FakeGenerator(script=script)
    async with RealtimeClient(generator) as client:
        await client.opened(audio={"input": {"turn_detection": {"interrupt_response": False}}})
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        await client.append(np.concatenate([voice(1), silence(1)]))
        await client.until("conversation.item.done")
        assert len(generator.requests) == 1
        go_on.set()
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert len(generator.requests) == 2


async def test_what_the_user_says_is_transcribed_if_asked() -> None:
    async with RealtimeClient() as client:
        await client.opened(
            audio={
                "input": {"turn_detection": None, "transcription": {"model": "whisper-1", "language": "en"}}
            }
        )
        await client.append(voice(0.5))
        await client.send("input_audio_buffer.commit")
        event = await client.until("conversation.item.input_audio_transcription.completed")
        assert event["transcript"] == TEXT
        assert event["usage"]["type"] == "tokens"
        deltas = client.of_type("conversation.item.input_audio_transcription.delta")
        assert "".join(delta["delta"] for delta in deltas) == TEXT
        request = client.generator.last_request
        assert request.speech is None
        (task,) = client.generator.tasks
        assert isinstance(task, Transcribe)
        assert task.language == "en"
        assert np.abs(task.audio.samples - voice(0.5)).max() < 1e-4
        assert request.messages == client.generator.task_messages(task)
        await client.send("conversation.item.retrieve", item_id=event["item_id"])
        assert (await client.next())["item"]["content"][0]["transcript"] == TEXT


@pytest.mark.parametrize(("kind", "bytes_per_s"), [("audio/pcm", 48_000), ("audio/pcmu", 8_000)])
async def test_long_pieces_of_audio_do_not_keep_other_requests_waiting(kind: str, bytes_per_s: int) -> None:
    """Half a second is searched at once, in any format; more in a thread. All ones are silence in both
    formats."""
    threads: list[int] = []

    class Noting(ScriptedModel):
        def probability(self, frame: npt.NDArray[np.float32]) -> float:
            threads.append(threading.get_ident())
            return super().probability(frame)

    state = ServerState(FakeGenerator())
    async with RealtimeClient(state=state, app=realtime_app(state, model=Noting)) as client:
        await client.opened(audio={"input": {"format": {"type": kind}}})
        await client.send("input_audio_buffer.append", audio=base64_of(b"\xff" * (bytes_per_s * 4 // 10)))
        await client.nothing_comes()
        assert set(threads) == {threading.get_ident()}
        threads.clear()
        await client.send("input_audio_buffer.append", audio=base64_of(b"\xff" * (bytes_per_s * 6 // 10)))
        await client.nothing_comes()
        assert threads
        assert threading.get_ident() not in threads


async def test_a_transcription_that_fails_harms_nothing() -> None:
    generator = FakeGenerator()
    generator.submit_error = OverloadedError("full")
    async with RealtimeClient(generator) as client:
        await client.opened(audio={"input": {"turn_detection": None, "transcription": {}}})
        await client.append(voice(0.5))
        await client.send("input_audio_buffer.commit")
        event = await client.until("conversation.item.input_audio_transcription.failed")
        assert event["error"]["code"] == "server_overloaded"
        generator.submit_error = None
        assert (await client.answer())["status"] == "completed"
