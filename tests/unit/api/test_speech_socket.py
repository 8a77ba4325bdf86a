"""`/v1/audio/speech/stream`: texts that are spoken while they are written, with a scripted generator."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_server.api import speech_socket
from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.speech_socket import Words
from omni_server.api.state import ServerState
from omni_server.audio.encode import to_int16
from omni_server.errors import InvalidRequestError, OverloadedError, StageDeadError, StageDownError
from omni_server.types import AudioDelta, ClonedVoice, Flush
from tests.unit.api.fake_generator import CLONING_MODEL, MODEL, TEXT_ONLY_MODEL, Hang, ScriptEntry
from tests.unit.api.realtime.realtime_client import Closed, RealtimeClient, Refused, voice
from tests.unit.api.speech_client import ReadingGenerator, SpeechClient, pcm_of, sound_of
from tests.unit.api.test_auth import KEY, bearer

FIVE_MINUTES: list[ScriptEntry] = [*[AudioDelta(0, voice(60))] * 6, Hang()]


async def test_a_text_in_pieces_is_one_utterance() -> None:
    async with SpeechClient() as client:
        await client.configured()
        events = await client.speak("Hel", "lo", ", you.")
        assert pcm_of(events) == to_int16(sound_of("Hello, you.")).tobytes()
        others = [event for event in events if event["type"] != "binary"]
        assert others == [
            {
                "type": "audio.start",
                "utterance_index": 0,
                "format": "pcm",
                "sample_rate": 24_000,
                "channels": 1,
            },
            {
                "type": "audio.done",
                "utterance_index": 0,
                "finish_reason": "stop",
                "usage": {"input_tokens": 20, "output_tokens": 11, "total_tokens": 31},
            },
            {"type": "session.done", "utterance_index": 0, "status": "completed"},
        ]
        assert events[0]["type"] == "audio.start"


async def test_speech_begins_before_its_text_ends_and_utterances_follow_one_another() -> None:
    async with SpeechClient() as client:
        await client.configured()
        await client.send("input.text", text="One")
        await client.until("binary")
        await client.send("input.text", text=", two")
        await client.send("input.done")
        await client.send("input.text", text="Three")
        await client.send("input.done")
        await client.until("session.done")
        await client.until("session.done")
        assert pcm_of(client.events) == to_int16(sound_of("One, twoThree")).tobytes()
        indices = [event["utterance_index"] for event in client.events if "utterance_index" in event]
        assert indices == sorted(indices)
        assert set(indices) == {0, 1}


async def test_audio_is_sent_in_base64_on_request() -> None:
    async with SpeechClient() as client:
        await client.configured(audio="base64")
        events = await client.speak("Hel", "lo")
        chunks = [base64.b64decode(event["audio_b64"]) for event in events if event["type"] == "audio.chunk"]
        assert b"".join(chunks) == to_int16(sound_of("Hello")).tobytes()
        assert pcm_of(events) == b""


@pytest.mark.parametrize(
    ("response_format", "begin"), [("wav", b"RIFF"), ("flac", b"fLaC"), ("opus", b"OggS"), ("mp3", b"\xff")]
)
async def test_audio_has_the_format_of_the_configuration(response_format: str, begin: bytes) -> None:
    async with SpeechClient() as client:
        await client.configured(response_format=response_format)
        events = await client.speak("Hello")
        assert events[0]["format"] == response_format
        assert pcm_of(events).startswith(begin)


async def test_the_fields_of_a_speech_request_are_those_of_the_session() -> None:
    generator = ReadingGenerator()
    async with SpeechClient(generator) as client:
        await client.configured(
            model=generator.model_info.name,
            voice="Ethan",
            instructions=" Calm. ",
            language="de",
            seed=7,
            stage_sampling={"talker": {"max_tokens": 9}},
            alignment=True,
        )
        await client.speak("Hello")
        await client.send("session.config", voice="Chelsie")
        await client.speak("Hello")
    first, second = (request.speech for request in generator.requests)
    assert first is not None
    assert second is not None
    assert (first.voice, first.instructions, first.language, first.seed) == ("Ethan", "Calm.", "de", 7)
    assert (first.text, first.text_first, first.is_aligned) == (None, None, True)
    assert generator.requests[0].sampling["talker"].max_tokens == 9
    assert (second.voice, second.instructions, second.is_aligned) == ("Chelsie", None, False)


async def test_a_voice_is_cloned_once_for_all_utterances() -> None:
    generator = ReadingGenerator(CLONING_MODEL)
    async with SpeechClient(generator) as client:
        await client.configured(speaker_embedding=[0.5, 1.0])
        await client.speak("Hello")
        await client.speak("Hello")
        first, second = (request.speech for request in generator.requests)
        assert first is not None
        assert second is not None
        assert first.clone == ClonedVoice(np.array([0.5, 1.0], np.float32).tobytes())
        assert second.clone is first.clone
        await client.send("session.config")
        assert (await client.until("error"))["error"]["param"] == "voice"


async def test_a_flush_is_among_the_pieces() -> None:
    generator = ReadingGenerator()
    async with SpeechClient(generator) as client:
        await client.configured()
        await client.send("input.flush")  # of nothing
        await client.send("input.text", text="Hel")
        await client.send("input.flush")
        await client.speak("lo")
    assert generator.pieces == ["Hel", Flush.FLUSH, "lo"]


async def test_words_are_reported_with_the_times_at_which_the_model_got_them() -> None:
    async with SpeechClient() as client:
        await client.configured(alignment=True, speed=2.0)
        events = await client.speak("I am", " here. 你好。")
        words = [word for event in events if event["type"] == "alignment" for word in event["words"]]
    assert [(word["word"], word["end_ms"]) for word in words] == [
        ("I", 50),
        ("am", 200),
        ("here.", 500),
        ("你", 600),
        ("好。", 700),
    ]


def test_words_do_not_depend_on_how_their_text_is_split() -> None:
    words = Words()
    assert words.push("The quick bro", 80) == [{"word": "The", "end_ms": 80}, {"word": "quick", "end_ms": 80}]
    assert words.push("wn", 160) == []
    assert words.push(" ", 240) == [{"word": "brown", "end_ms": 160}]
    assert words.push("fox.", 320) == []
    assert words.finish() == [{"word": "fox.", "end_ms": 320}]


async def test_cancelled_utterances_end_at_once_and_the_next_one_is_spoken() -> None:
    generator = ReadingGenerator()
    generator.script = [AudioDelta(0, voice(0.1)), Hang()]
    async with SpeechClient(generator) as client:
        await client.configured()
        await client.send("input.cancel")  # nothing
        await client.send("input.text", text="One")
        await client.send("input.done")
        await client.send("input.text", text="Two")
        await client.until("binary")
        await client.send("input.cancel")
        ends = [await client.until("session.done") for _ in range(2)]
        assert [(end["utterance_index"], end["status"]) for end in ends] == [
            (0, "cancelled"),
            (1, "cancelled"),
        ]
        generator.script = None
        events = await client.speak("Three")
        assert (events[-1]["utterance_index"], events[-1]["status"]) == (2, "completed")
        assert pcm_of(events) == to_int16(sound_of("Three")).tobytes()
    assert [generation.num_closed for generation in generator.generations] == [1, 1]


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        (b"\0\1", "invalid_event", None),
        ("{", "invalid_event", None),
        ('{"type": "input.shout"}', "invalid_event", "type"),
        ('{"type": "input.text"}', "missing_required_parameter", "text"),
        ('{"type": "input.text", "text": 1}', "invalid_type", "text"),
        ('{"type": "session.config", "voice": "nobody"}', None, "voice"),
        ('{"type": "session.config", "model": "other"}', "model_not_found", "model"),
        ('{"type": "session.config", "response_format": "midi"}', "unsupported_value", "response_format"),
        ('{"type": "session.config", "speed": 9.5}', "decimal_above_max_value", "speed"),
        ('{"type": "session.config", "audio": "tape"}', "invalid_value", "audio"),
        ('{"type": "session.config", "ref_audio": "data:,"}', "unsupported_value", "ref_audio"),
        (
            '{"type": "session.config", "alignment": true, "non_streaming_mode": true}',
            "unsupported_value",
            "alignment",
        ),
    ],
)
async def test_a_bad_message_is_an_error_and_the_session_goes_on(
    message: str | bytes, code: str | None, param: str | None
) -> None:
    async with SpeechClient() as client:
        await client.configured()
        await client.send_raw(message)
        error = (await client.until("error"))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert code is None or error["code"] == code
        assert (await client.speak("Hello"))[-1]["status"] == "completed"


async def test_text_needs_a_configuration() -> None:
    async with SpeechClient() as client:
        await client.next()
        await client.send("input.text", text="Hello")
        assert (await client.next())["error"]["code"] == "invalid_event"
        await client.send("session.config")
        assert (await client.speak("Hello"))[-1]["status"] == "completed"


async def test_a_language_model_with_a_voice_reads_text_in_pieces_aloud() -> None:
    generator = ReadingGenerator(replace(MODEL, reads_text=True))
    async with SpeechClient(generator) as client:
        await client.configured(voice="Ethan")
        assert pcm_of(await client.speak("Hel", "lo")) == to_int16(sound_of("Hello")).tobytes()


@pytest.mark.parametrize("model", [MODEL, TEXT_ONLY_MODEL])
async def test_a_model_that_does_not_read_text_in_pieces_is_refused(model: Any) -> None:
    with pytest.raises(Refused) as refused:
        async with SpeechClient(ReadingGenerator(model)):
            pass
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == "model"


async def test_keys_and_the_limit_of_sessions_are_those_of_realtime_sessions() -> None:
    config = ApiConfig(api_keys=(KEY,), realtime_max_sessions=1)
    generator = ReadingGenerator()
    app = create_app(ServerState(generator), config)
    with pytest.raises(Refused) as stranger:
        async with SpeechClient(generator, app=app):
            pass
    assert stranger.value.status == 401
    headers = {name.lower(): value for name, value in bearer(KEY).items()}
    async with SpeechClient(generator, app=app, headers=headers) as first:
        await first.configured()
        with pytest.raises(Refused) as late:
            async with SpeechClient(generator, app=app, headers=headers):
                pass
        assert late.value.status == 503
        assert (await first.speak("Hello"))[-1]["status"] == "completed"
    async with SpeechClient(generator, app=app, headers=headers):
        pass


async def test_another_web_site_is_refused() -> None:
    headers = {"host": "localhost:8091", "origin": "https://evil.example"}
    with pytest.raises(Refused) as refused:
        async with SpeechClient(headers=headers):
            pass
    assert refused.value.status == 403


async def test_text_that_does_not_come_ends_its_utterance_and_no_other() -> None:
    generator = ReadingGenerator()
    async with SpeechClient(generator, ApiConfig(body_timeout_s=0.1)) as client:
        await client.configured()
        await client.send("input.text", text="Hel")
        error = await client.until("error")
        assert (error["error"]["code"], error["utterance_index"]) == ("text_timeout", 0)
        assert (await client.until("session.done"))["status"] == "failed"
        await client.send("input.text", text="lo")  # too late: ignored
        await client.send("input.done")
        assert (await client.speak("Hello"))[-1] == {
            "type": "session.done",
            "utterance_index": 1,
            "status": "completed",
        }
    assert generator.generations[0].num_closed == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StageDownError("talker"), "talker_down"),
        (InvalidRequestError("no", param="messages", code="odd"), "odd"),
        (RuntimeError("odd"), "internal_error"),
    ],
)
@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_failure_ends_its_utterance_and_no_other(
    error: Exception, code: str, *, is_admitted: bool
) -> None:
    generator = ReadingGenerator()
    async with SpeechClient(generator) as client:
        await client.configured()
        if is_admitted:
            generator.script = [AudioDelta(0, voice(0.1)), error]
        else:
            generator.submit_error = error
        events = await client.speak("Hello")
        (told,) = [event for event in events if event["type"] == "error"]
        assert (told["error"]["code"], told["utterance_index"]) == (code, 0)
        assert events[-1]["status"] == "failed"
        generator.script = generator.submit_error = None
        assert (await client.speak("Hello"))[-1]["status"] == "completed"


@pytest.mark.parametrize("pieces", [(), (" ", "\n\n")])
async def test_an_utterance_without_words_is_silent(pieces: tuple[str, ...]) -> None:
    async with SpeechClient() as client:
        await client.configured()
        (done,) = await client.speak(*pieces)
        assert (done["type"], done["status"]) == ("session.done", "completed")
        assert client.generator.requests == []
        assert (
            pcm_of(await client.speak(*pieces, "One"))
            == to_int16(sound_of("".join(pieces) + "One")).tobytes()
        )


async def test_an_utterance_that_waits_for_its_text_hears_of_the_end_of_the_server() -> None:
    async with SpeechClient() as client:
        await client.configured()
        await client.send("input.text", text=" ")
        for _ in range(10):
            await asyncio.sleep(0)
        assert client.state.on_abort
        client.state.abort(StageDeadError("talker", "it has died"))
        assert (await client.until("error"))["error"]["code"] == "engine_dead"
        assert (await client.until("session.done"))["status"] == "failed"


async def test_cancelling_twice_ends_an_utterance_once_and_drops_what_has_not_been_sent() -> None:
    async with SpeechClient() as client:
        await client.configured()
        client.reading.clear()
        for text in ("One", "Two"):
            await client.send("input.text", text=text)
            await client.send("input.done")
        await client.send("input.text", text="Three")
        await client.send("input.cancel")
        await client.send("input.cancel")
        client.reading.set()
        ends = [await client.until("session.done") for _ in range(3)]
        assert [end["utterance_index"] for end in ends] == [0, 1, 2]
        assert ends[-1]["status"] == "cancelled"
        assert len(pcm_of(client.events)) <= len(to_int16(sound_of("One")).tobytes())


async def before_configuration(client: SpeechClient) -> None:
    await client.next()


async def before_text(client: SpeechClient) -> None:
    await client.configured()


async def before_admission(client: SpeechClient) -> None:
    client.generator.submit_hangs = True
    client.generator.submit_error = OverloadedError("not reached")
    await client.configured()
    await client.send("input.text", text="Hello")
    await asyncio.wait_for(client.generator.submitted.wait(), 5)


async def while_it_speaks(client: SpeechClient) -> None:
    await client.configured()
    await client.send("input.text", text="Hello")
    await client.until("binary")


async def while_others_wait(client: SpeechClient) -> None:
    client.generator.script = [AudioDelta(0, voice(0.1)), Hang()]
    await client.configured()
    for _ in range(3):
        await client.send("input.text", text="Hello")
        await client.send("input.done")
    await client.until("binary")


async def behind_the_end(client: SpeechClient) -> None:
    await client.configured()
    await client.speak("Hello")


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize(
    "phase",
    [
        before_configuration,
        before_text,
        before_admission,
        while_it_speaks,
        while_others_wait,
        behind_the_end,
    ],
)
async def test_a_client_that_leaves_frees_everything(
    phase: Callable[[SpeechClient], Awaitable[None]], *, is_cancelled: bool
) -> None:
    async with SpeechClient() as client:
        await phase(client)
        if is_cancelled:
            await client.send("input.cancel")
    assert all(generation.num_closed == 1 for generation in client.generator.generations)
    await asyncio.wait_for(client.state.wait_idle(), 5)
    assert client.state.num_sessions == 0
    assert client.state.unsent.num_bytes == 0


async def test_the_texts_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_socket, "MAX_CHARS", speech_socket.UTTERANCE_CHARS + 10)
    generator = ReadingGenerator()
    generator.script = [AudioDelta(0, voice(0.1)), Hang()]
    async with SpeechClient(generator) as client:
        await client.configured()
        await client.send("input.text", text="0123456789")
        await client.until("binary")
        await client.send("input.flush")
        await client.send("input.text", text="a")
        for _ in range(2):
            assert (await client.until("error"))["error"]["code"] == "string_above_max_length"
        await client.send("input.done")
        await client.send("input.done")  # another one, without text
        assert (await client.until("error"))["error"]["code"] == "string_above_max_length"
        await client.send("input.cancel")
        assert (await client.until("session.done"))["status"] == "cancelled"
        generator.script = None
        await asyncio.wait_for(client.state.wait_idle(), 5)
        assert (await client.speak("Hello"))[-1]["status"] == "completed"


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    generator = ReadingGenerator()
    generator.script = FIVE_MINUTES
    async with SpeechClient(generator, ApiConfig(realtime_send_timeout_s=0.2)) as client:
        await client.configured()
        await client.send("input.text", text="Hello")
        client.reading.clear()
        await asyncio.wait_for(asyncio.wait({client.task}), 20)
    assert generator.generations[0].num_closed == 1


async def test_a_server_that_stops_finishes_the_utterance_and_says_goodbye() -> None:
    async with SpeechClient() as client:
        await client.configured()
        await client.send("input.text", text="Hel")
        await client.until("binary")
        client.state.draining.set()
        await client.speak("lo")
        assert client.events[-1]["status"] == "completed"
        assert (await client.until("error"))["error"]["code"] == "server_shutting_down"
        with pytest.raises(Closed) as closed:
            await client.next()
        assert closed.value.code == 1001


async def test_sessions_of_both_kinds_share_their_limit() -> None:
    generator = ReadingGenerator()
    state = ServerState(generator)
    app = create_app(state, ApiConfig(realtime_max_sessions=1))
    async with RealtimeClient(generator, app=app, state=state, query=""):
        with pytest.raises(Refused) as late:
            async with SpeechClient(generator, app=app):
                pass
        assert late.value.status == 503
