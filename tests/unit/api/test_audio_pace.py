"""Streamed audio is sent at most `max_audio_ahead_s` ahead of its playback. Time is simulated."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.audio_pace import AudioPace
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.errors import OverloadedError
from omni_server.types import AudioDelta, ChatMessage, Finished, OmniRequest, TextDelta
from tests.unit.api.clients import URL, answer_of, app_of, chat, http_client
from tests.unit.api.fake_generator import FakeGenerator, ScriptEntry, finished
from tests.unit.api.realtime.realtime_client import RealtimeClient
from tests.unit.api.test_stalled_clients import SPEECH_URL
from tests.unit.orchestrator.virtual_time import run

PCM: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
SECOND = np.zeros(24_000, np.float32)
SPEECH: list[ScriptEntry] = [AudioDelta(index * len(SECOND), SECOND) for index in range(10)]


def state_with(max_audio_ahead_s: float | None, generator: FakeGenerator | None = None) -> ServerState:
    state = ServerState(generator)
    state.max_audio_ahead_s = max_audio_ahead_s
    return state


async def times(
    script: list[ScriptEntry], state: ServerState, speed: float = 1.0, heartbeat_s: float | None = None
) -> list[float]:
    """Seconds from the first event to each event and heartbeat, for a reader that takes everything at
    once."""
    came: list[float] = []
    pace = state.audio_pace(speed)
    async with answer_of(state, script) as answer, aclosing(answer.events(heartbeat_s, pace)) as events:
        async for _ in events:
            came.append(asyncio.get_running_loop().time())
    return [round(time - came[0], 3) for time in came]


def test_audio_beyond_the_limit_waits_until_enough_has_been_played() -> None:
    came = run(lambda: times([*SPEECH, finished()], state_with(3.0)))

    assert came == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 6]


def test_without_a_limit_nothing_waits() -> None:
    assert set(run(lambda: times([*SPEECH, finished()], state_with(None)))) == {0}


def test_audio_that_is_played_faster_is_sent_faster() -> None:
    came = run(lambda: times([*SPEECH, finished()], state_with(3.0), speed=2.0))

    assert came == [0, 0, 0, 0, 0, 0, 0, 0.5, 1, 1.5, 1.5]


def test_there_are_heartbeats_while_audio_waits() -> None:
    minute = AudioDelta(0, np.zeros(60 * 24_000, np.float32))
    came = run(lambda: times([minute, minute, finished()], state_with(5.0), heartbeat_s=15.0))

    assert came == [0, 15, 30, 45, 55, 55]


def test_text_keeps_its_place_behind_audio() -> None:
    script: list[ScriptEntry] = [TextDelta("a", (1,)), *SPEECH[:3], TextDelta("b", (2,)), finished()]

    assert run(lambda: times(script, state_with(1.0))) == [0, 0, 0, 1, 1, 1]


def test_playback_starts_again_after_a_pause() -> None:
    """A listener who has heard everything gets as much at once as at the beginning."""

    async def measure() -> list[float]:
        pace = AudioPace(2.0, asyncio.Event())
        loop = asyncio.get_running_loop()
        waited = []
        for pause_s in (0, 0, 0, 100, 0, 0, 0):
            await asyncio.sleep(pause_s)
            began = loop.time()
            await pace.wait(AudioDelta(0, SECOND))
            waited.append(round(loop.time() - began, 3))
        return waited

    assert run(measure) == [0, 0, 0, 0, 0, 0, 1]


def test_what_waits_counts_as_unsent_and_is_not_kept_beyond_that_limit() -> None:
    async def unsent() -> int:
        state = state_with(1.0)
        script: list[ScriptEntry] = [*SPEECH, finished()]
        async with (
            answer_of(state, script) as answer,
            aclosing(answer.events(None, state.audio_pace())) as events,
        ):
            for _ in range(3):
                await anext(events)
            return state.unsent.num_bytes

    assert run(unsent) > 6 * SECOND.nbytes


def test_an_aborted_answer_does_not_wait() -> None:
    error = OverloadedError("The server is shutting down.")

    async def abort() -> float:
        state = state_with(1.0)
        loop = asyncio.get_running_loop()
        script: list[ScriptEntry] = [AudioDelta(0, np.zeros(24_000 * 60, np.float32)), *SPEECH, finished()]
        async with (
            answer_of(state, script) as answer,
            aclosing(answer.events(None, state.audio_pace())) as events,
        ):
            await anext(events)
            loop.call_later(5, state.abort, error)
            began = loop.time()
            with pytest.raises(OverloadedError) as raised:
                await anext(events)
            assert raised.value is error
            return loop.time() - began

    assert run(abort) == pytest.approx(5)


def test_a_server_that_shuts_down_sends_what_it_holds_back_at_once() -> None:
    async def last_event_s() -> float:
        loop, state = asyncio.get_running_loop(), state_with(3.0)
        script: list[ScriptEntry] = [*SPEECH, *SPEECH, *SPEECH, finished()]
        async with (
            answer_of(state, script) as answer,
            aclosing(answer.events(None, state.audio_pace())) as events,
        ):
            loop.call_later(2.5, state.drain)
            assert [item and isinstance(item[1], Finished) async for item in events][-1]
        assert not state.on_abort
        assert state.audio_pace() is None
        return loop.time()

    assert run(last_event_s) == pytest.approx(2.5)


def test_the_passages_of_a_text_have_one_pace() -> None:
    async def last_event_s() -> float:
        generator = FakeGenerator(script=[*SPEECH, finished()])
        state = state_with(3.0, generator)
        requests = [OmniRequest(f"passage-{index}", (ChatMessage("user", ()),)) for index in range(2)]
        answer = AnswerStream(generator, state, "a", one_by_one=requests)
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with aclosing(answer), aclosing(answer.events(None, state.audio_pace())) as events:
            assert sum([item is not None and isinstance(item[1], Finished) async for item in events]) == 2
        return loop.time() - began

    assert run(last_event_s) == pytest.approx(20 - 1 - 3)


@pytest.mark.parametrize(
    ("url", "body", "expected_s"),
    [
        (URL, chat(**PCM, stream=True), 6.0),
        (URL, chat(**PCM), 0.0),
        (SPEECH_URL, {"model": "omni", "input": "a", "response_format": "pcm"}, 6.0),
        (SPEECH_URL, {"model": "omni", "input": "a", "response_format": "pcm", "stream_format": "sse"}, 6.0),
    ],
)
def test_streams_keep_the_pace_and_whole_answers_do_not(
    url: str, body: dict[str, Any], expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Callable[..., bytes], *arguments: object) -> bytes:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)  # a loop with simulated time never hears of threads

    async def answer_s() -> float:
        app = app_of(FakeGenerator(script=[*SPEECH, finished()]), ApiConfig(max_audio_ahead_s=3.0))
        async with http_client(app) as client:
            response = await client.post(url, json=body)
            assert response.status_code == 200
            return asyncio.get_running_loop().time()

    assert run(answer_s) == pytest.approx(expected_s)


def test_a_realtime_response_keeps_the_pace() -> None:
    async def answer_s() -> float:
        state = state_with(3.0, FakeGenerator(script=[*SPEECH, finished()]))
        async with RealtimeClient(state=state) as client:
            await client.opened()
            await client.answer()
            return asyncio.get_running_loop().time()

    assert run(answer_s) == pytest.approx(6)
