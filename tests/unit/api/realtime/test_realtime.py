"""`/v1/realtime` with a scripted generator: the rows of the conformance checklist.

Every event that any of these tests reads is checked against the client's types, the list of known types (R20) and
for a fresh id (R21) by `RealtimeClient`.

| row | shown by |
|---|---|
| R01 | test_a_session_begins_with_its_full_object |
| R02 | test_a_browser_gets_its_subprotocol, test_socket.py::test_a_key_opens_the_session_in_a_header_or_a_subprotocol |
| R03 | test_socket.py::test_without_a_key_the_upgrade_is_a_401 |
| R04 | test_an_unknown_model_is_refused_at_the_upgrade |
| R05 | test_an_update_changes_only_what_it_names |
| R06 | test_a_bad_update_changes_nothing |
| R07 | test_a_text_response_comes_in_order |
| R08 | test_a_spoken_response_comes_in_order |
| R09 | test_audio_is_committed_by_hand_and_answered |
| R10 | test_committing_too_little_audio_is_refused |
| R11 | test_a_spoken_turn_is_found_committed_and_answered |
| R12 | test_speech_interrupts_the_response |
| R13 | test_a_response_is_cancelled_at_once |
| R14 | test_cancelling_nothing_is_a_harmless_error |
| R15 | test_only_one_response_of_the_conversation_at_a_time |
| R16 | test_truncating_cuts_what_the_model_reads_later |
| R17 | test_truncating_what_cannot_be_truncated |
| R18 | test_tools.py |
| R19 | test_metadata_is_echoed |
| R20, R21 | `check_event` for every event; test_errors_name_the_event_that_caused_them |
| R22 | test_a_malformed_frame_is_an_error_and_the_session_goes_on |
| R23 | test_socket.py::test_fifteen_mebibytes_in_one_event_are_taken_or_refused_with_an_error |
| R24 | test_a_client_that_leaves_frees_everything, test_socket.py::test_dropping_the_connection_frees_the_session |
| R25 | test_two_sessions_know_nothing_of_each_other |
| R26 | test_socket.py and tests/integration/test_realtime.py with the official client. Pipecat and LiveKit are |
|     | no dependencies of the tests: docs/realtime.md names the versions that were run against the server |
"""

import asyncio
import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError, OverloadedError, StageError
from omni_server.types import AudioDelta, AudioPart, ImagePart, TextDelta, TextDone, TextPart, Transcribe
from tests.unit.api.clients import data_url, media
from tests.unit.api.fake_generator import (
    MODEL,
    SAMPLES,
    TEXT,
    TEXT_ONLY_MODEL,
    FakeGenerator,
    Hang,
    ScriptEntry,
    Wait,
    finished,
    speech_script,
)
from tests.unit.api.realtime.realtime_client import (
    Closed,
    RealtimeClient,
    Refused,
    base64_of,
    realtime_app,
    silence,
    sound_of,
    voice,
)

TESTS = Path(__file__).parent
OPENING = ["response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added"]
CLOSING = ["response.content_part.done", "response.output_item.done", "conversation.item.done", "response.done"]
SPOKEN_CLOSING = ["response.output_audio.done", "response.output_audio_transcript.done", *CLOSING]
MANUAL: dict[str, Any] = {"input": {"turn_detection": None}}
# One delta of sound, and no more.
ENDLESS: list[ScriptEntry] = [TextDelta("Once upon a time", (1,)), AudioDelta(0, SAMPLES[:4000]), Hang()]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"test_\w+(?!\.py)\b(?!\.py)", __doc__ or ""))))
def test_every_test_in_the_table_exists(name: str) -> None:
    assert any(f"def {name}(" in file.read_text() for file in TESTS.glob("test_*.py"))


# -- connecting


async def test_a_session_begins_with_its_full_object() -> None:
    async with RealtimeClient() as client:
        event = await client.next()
        assert event["type"] == "session.created"
        session = event["session"]
        assert session["id"].startswith("sess_")
        assert session["expires_at"] > 1_780_000_000
        del session["id"], session["expires_at"]
        pcm = {"type": "audio/pcm", "rate": 24000}
        assert session == {
            "type": "realtime",
            "object": "realtime.session",
            "model": MODEL.name,
            "output_modalities": ["audio"],
            "instructions": "",
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            "truncation": "auto",
            "tracing": None,
            "prompt": None,
            "include": None,
            "audio": {
                "input": {
                    "format": pcm,
                    "transcription": None,
                    "noise_reduction": None,
                    "turn_detection": {
                        "type": "server_vad",
                        "threshold": 0.5,
                        "prefix_padding_ms": 300,
                        "silence_duration_ms": 500,
                        "idle_timeout_ms": None,
                        "create_response": True,
                        "interrupt_response": True,
                    },
                },
                "output": {"format": pcm, "voice": "Chelsie", "speed": 1.0},
            },
        }


async def test_a_model_without_a_voice_answers_in_text() -> None:
    async with RealtimeClient(FakeGenerator(TEXT_ONLY_MODEL)) as client:
        assert (await client.next())["session"]["output_modalities"] == ["text"]
        session = {"type": "realtime", "output_modalities": ["audio"]}
        assert (await client.refused("session.update", session=session))["param"] == "session.output_modalities"


async def test_a_browser_gets_its_subprotocol() -> None:
    async with RealtimeClient(subprotocols=("realtime", "openai-insecure-api-key.sk-1")) as client:
        assert client.subprotocol == "realtime"
        await client.opened()
    async with RealtimeClient() as client:
        assert client.subprotocol is None


@pytest.mark.parametrize("query", ["", "model=omni", "model=org%2Fomni-tiny"])
async def test_served_names_are_taken_and_none_means_the_model(query: str) -> None:
    async with RealtimeClient(query=query) as client:
        assert (await client.next())["session"]["model"] == MODEL.name


async def test_an_unknown_model_is_refused_at_the_upgrade() -> None:
    with pytest.raises(Refused) as refused:
        await RealtimeClient(query="model=gpt-realtime").__aenter__()
    assert refused.value.status == 404
    assert refused.value.body["error"]["code"] == "model_not_found"


async def test_a_server_that_is_not_ready_refuses_the_upgrade() -> None:
    with pytest.raises(Refused) as refused:
        await RealtimeClient(state=ServerState(None)).__aenter__()
    assert refused.value.status == 503
    assert refused.value.headers["retry-after"]
    assert refused.value.body["error"]["code"] == "model_not_ready"


async def test_one_session_too_many_is_refused_until_another_ends() -> None:
    generator = FakeGenerator()
    app = realtime_app(ServerState(generator), ApiConfig(realtime_max_sessions=1))
    async with RealtimeClient(generator, app=app) as first:
        await first.opened()
        with pytest.raises(Refused) as refused:
            await RealtimeClient(generator, app=app).__aenter__()
        assert refused.value.status == 503
    async with RealtimeClient(generator, app=app) as second:
        await second.opened()


# -- the session


async def test_an_update_changes_only_what_it_names() -> None:
    async with RealtimeClient() as client:
        before = (await client.next())["session"]
        audio = {"input": {"turn_detection": {"threshold": 0.8}}, "output": {"voice": "Ethan"}}
        await client.send("session.update", session={"type": "realtime", "instructions": "Be brief.", "audio": audio})
        after = (await client.next())["session"]
        assert after["instructions"] == "Be brief."
        assert after["audio"]["output"] == before["audio"]["output"] | {"voice": "Ethan"}
        changed = before["audio"]["input"]["turn_detection"] | {"threshold": 0.8}
        assert after["audio"]["input"] == before["audio"]["input"] | {"turn_detection": changed}
        await client.send("session.update", session={"type": "realtime", "audio": MANUAL})
        manual = (await client.next())["session"]
        assert manual["audio"]["input"]["turn_detection"] is None
        assert manual["audio"]["output"]["voice"] == "Ethan"
        assert manual["instructions"] == "Be brief."


async def test_habits_of_clients_are_taken() -> None:
    async with RealtimeClient() as client:
        await client.opened(
            model="omni",
            tracing="auto",
            unknown_field=1,
            audio={
                "input": {
                    "turn_detection": {"type": "semantic_vad", "eagerness": "low"},
                    "noise_reduction": {"type": "near_field"},
                    "format": {"type": "audio/pcmu"},
                },
                "output": {"voice": {"id": "alloy"}, "format": {"type": "audio/pcma"}, "speed": 1},
            },
        )
        session = client.events[-1]["session"]
        assert session["audio"]["input"]["turn_detection"] == {
            "type": "semantic_vad",
            "eagerness": "low",
            "create_response": True,
            "interrupt_response": True,
        }
        assert session["audio"]["input"]["noise_reduction"] is None
        assert session["audio"]["output"]["voice"] == "Chelsie"
        assert session["tracing"] is None


async def test_null_is_what_clients_send_for_fields_that_they_do_not_set() -> None:
    async with RealtimeClient() as client:
        await client.opened(instructions="Be brief.")
        before = client.events[-1]["session"]
        nulls = dict.fromkeys(
            ("instructions", "tools", "tool_choice", "max_output_tokens", "output_modalities", "audio")
        )
        await client.send("session.update", session={"type": "realtime", **nulls})
        assert (await client.next())["session"] == before
        await client.send("response.create", response={**nulls, "metadata": None, "input": None, "conversation": None})
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert client.generator.last_request.messages[0].content == (TextPart("Be brief."),)
        semantic = {"type": "semantic_vad", "eagerness": None, "interrupt_response": None}
        audio = {"input": {"turn_detection": semantic}}
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        detection = (await client.next())["session"]["audio"]["input"]["turn_detection"]
        assert (detection["eagerness"], detection["interrupt_response"]) == ("auto", True)


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({}, "session.type"),
        ({"type": "transcription"}, "session.type"),
        ({"type": "realtime", "model": "other"}, "session.model"),
        ({"type": "realtime", "output_modalities": ["text", "audio"]}, "session.output_modalities"),
        ({"type": "realtime", "max_output_tokens": 0}, "session.max_output_tokens"),
        ({"type": "realtime", "instructions": 1}, "session.instructions"),
        (
            {"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            "session.audio.input.format.rate",
        ),
        ({"type": "realtime", "audio": {"input": {"format": {"type": "opus"}}}}, "session.audio.input.format.type"),
        (
            {"type": "realtime", "audio": {"input": {"turn_detection": {"threshold": 1.5}}}},
            "session.audio.input.turn_detection.threshold",
        ),
        (
            {"type": "realtime", "audio": {"input": {"turn_detection": {"idle_timeout_ms": 6000}}}},
            "session.audio.input.turn_detection.idle_timeout_ms",
        ),
        ({"type": "realtime", "audio": {"output": {"voice": "nobody"}}}, "session.audio.output.voice"),
        ({"type": "realtime", "audio": {"output": {"speed": 1.4}}}, "session.audio.output.speed"),
        ({"type": None}, "session.type"),
        ({"type": "realtime", "audio": []}, "session.audio"),
        ({"type": "realtime", "truncation": "sometimes"}, "session.truncation"),
        ({"type": "realtime", "tool_choice": "required"}, "session.tool_choice"),
    ],
)
async def test_a_bad_update_changes_nothing(session: dict[str, Any], param: str) -> None:
    async with RealtimeClient() as client:
        before = (await client.next())["session"]
        error = await client.refused("session.update", session={"tool_choice": "none"} | session)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        await client.send("session.update", session={"type": "realtime"})
        assert (await client.next())["session"] == before


# -- responses


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
            "input_token_details": {"text_tokens": 12, "audio_tokens": 5, "image_tokens": 2, "cached_tokens": 3},
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
        heard = np.frombuffer(sound_of(client.events), dtype="<i2")
        assert np.abs(heard / 32768 - SAMPLES).max() < 1 / 32768
        assert done["response"]["usage"]["output_token_details"]["audio_tokens"] > 0
        request = client.generator.last_request
        assert request.speech is not None
        assert request.speech.voice == "Chelsie"


async def test_telephone_formats_go_out_at_their_rate() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio={"output": {"format": {"type": "audio/pcmu"}}})
        await client.say("hi")
        await client.send("response.create")
        await client.until("response.done")
        deltas = [base64.b64decode(event["delta"]) for event in client.of_type("response.output_audio.delta")]
        assert len(b"".join(deltas)) == -(-len(SAMPLES) // 3)


async def test_long_sound_leaves_in_deltas_of_a_fifth_of_a_second() -> None:
    script: list[ScriptEntry] = [AudioDelta(0, voice(1.1)), TextDone("stop"), finished(codec_tokens=1)]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.done")
        sizes = [len(sound_of([event])) for event in client.of_type("response.output_audio.delta")]
        assert sizes == [9600] * 5 + [4800]


async def test_metadata_is_echoed() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.send("response.create", response={"metadata": {"client_event_id": "abc"}})
        await client.until("response.done")
        created, done = client.of_type("response.created")[0], client.of_type("response.done")[0]
        assert created["response"]["metadata"] == {"client_event_id": "abc"}
        assert done["response"]["metadata"] == {"client_event_id": "abc"}


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
        await client.send("response.create", response=overrides)
        response = (await client.until("response.done"))["response"]
        assert response["output_modalities"] == ["text"]
        assert response["max_output_tokens"] == 5
        assert response["audio"]["output"]["voice"] == "Ethan"
        request = client.generator.last_request
        assert request.messages[0].content == (TextPart("Be rude."),)
        assert request.sampling["thinker"].max_tokens == 5
        await client.send("response.create")
        await client.until("response.done")
        request = client.generator.last_request
        assert request.messages[0].content == (TextPart("Be kind."),)
        assert request.sampling["thinker"].max_tokens is None


async def test_an_answer_that_ran_into_its_limit_is_incomplete() -> None:
    script: list[ScriptEntry] = [TextDelta("a", (1,)), TextDone("length"), finished("length")]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened()
        await client.send("response.create")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "incomplete"
        assert response["status_details"]["reason"] == "max_output_tokens"
        assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("error", [StageError("talker", "broken"), RuntimeError("secret")])
async def test_a_response_that_fails_says_so_and_the_session_goes_on(error: Exception) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), error])
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.send("response.create")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["type"] == "server_error"
        assert "secret" not in json.dumps(response)
        assert response["usage"]["total_tokens"] == 0
        generator.script = None
        await client.send("response.create")
        assert (await client.until("response.done"))["response"]["status"] == "completed"
    assert all(generation.num_closed == 1 for generation in generator.generations)


@pytest.mark.parametrize("kind", ["audio/pcm", "audio/pcmu"])
async def test_sound_that_is_none_fails_the_response(kind: str) -> None:
    broken = np.array([np.nan], dtype=np.float32)
    script: list[ScriptEntry] = [AudioDelta(0, SAMPLES[:3000]), AudioDelta(3000, broken), TextDone("stop"), finished()]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened(audio={"output": {"format": {"type": kind}}})
        await client.send("response.create")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert "not finite" in response["status_details"]["error"]["message"]


async def test_a_request_that_is_not_admitted_is_a_failed_response() -> None:
    generator = FakeGenerator()
    generator.submit_error = OverloadedError("full")
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.send("response.create")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "server_overloaded"
        assert response["output"] == []
        assert client.types()[1:] == ["response.created", "response.done"]


async def test_a_response_is_cancelled_at_once() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        await client.send("response.cancel")
        done = await client.until("response.done")
        assert client.types()[-6:] == SPOKEN_CLOSING
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["status_details"] == {"type": "cancelled", "reason": "client_cancelled", "error": None}
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
        await client.send("response.create")
        await client.until("response.output_audio.delta")
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
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        generator.script = None
        first = len(client.events)
        given = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "something else"}]}
        overrides = {"conversation": "none", "output_modalities": ["text"], "input": [given], "metadata": {"a": "b"}}
        await client.send("response.create", response=overrides)
        done = await client.until("response.done")
        assert done["response"]["conversation_id"] is None
        assert done["response"]["metadata"] == {"a": "b"}
        assert done["response"]["status"] == "completed"
        assert not [event for event in client.events[first:] if event["type"].startswith("conversation.")]
        assert [message.content for message in generator.last_request.messages] == [(TextPart("something else"),)]
        await client.send("response.cancel")
        assert (await client.until("response.done"))["response"]["status"] == "cancelled"


async def test_a_response_may_refer_to_items() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        first = await client.say("one")
        await client.say("two")
        await client.send("response.create", response={"input": [{"type": "item_reference", "id": first}]})
        await client.until("response.done")
        assert [m.content for m in client.generator.last_request.messages] == [(TextPart("one"),)]
        reference = [{"type": "item_reference", "id": "nothing"}]
        error = await client.refused("response.create", response={"input": reference})
        assert error["param"] == "response.input[0].id"


async def test_too_many_responses_beside_the_conversation_are_refused() -> None:
    async with RealtimeClient(FakeGenerator(script=ENDLESS)) as client:
        await client.opened()
        for _ in range(5):
            await client.send("response.create", response={"conversation": "none"})
            await client.until("response.output_audio.delta")
        error = await client.refused("response.create", response={"conversation": "none"})
        assert error["code"] == "too_many_responses"


# -- history


async def test_the_conversation_becomes_the_prompt() -> None:
    async with RealtimeClient() as client:
        await client.opened(instructions="Be brief.", audio=MANUAL)
        system = [{"type": "input_text", "text": "It is Monday."}]
        await client.send("conversation.item.create", item={"type": "message", "role": "system", "content": system})
        await client.append(voice(0.5))
        await client.send("input_audio_buffer.commit")
        await client.send("response.create")
        await client.until("response.done")
        await client.say("And now?")
        await client.send("response.create", response={"output_modalities": ["text"]})
        await client.until("response.done")
        messages = client.generator.last_request.messages
        assert [message.role for message in messages] == ["system", "system", "user", "assistant", "user"]
        assert messages[0].content == (TextPart("Be brief."),)
        heard = messages[2].content[0]
        assert isinstance(heard, AudioPart)
        assert heard.sample_rate_hz == 24_000
        assert np.abs(heard.samples - voice(0.5)).max() < 1e-4
        assert messages[3].content == (TextPart(TEXT),)
        assert messages[4].content == (TextPart("And now?"),)


async def test_items_of_all_kinds_can_be_written_by_the_client() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        picture = {"type": "input_image", "image_url": data_url(media("shapes.png"), "image/png")}
        pcm = np.rint(voice(0.2) * 32767).astype("<i2").tobytes()
        sound = {"type": "input_audio", "audio": base64_of(pcm), "transcript": "hum"}
        await client.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": [picture, sound]}
        )
        await client.until("conversation.item.done")
        said = [{"type": "output_text", "text": "A hum."}, {"type": "output_audio", "transcript": "I hear."}]
        await client.send("conversation.item.create", item={"type": "message", "role": "assistant", "content": said})
        await client.until("conversation.item.done")
        await client.send("response.create")
        await client.until("response.done")
        user, assistant = client.generator.last_request.messages
        assert isinstance(user.content[0], ImagePart)
        assert isinstance(user.content[1], AudioPart)
        assert assistant.content == (TextPart("A hum."), TextPart("I hear."))


async def test_items_are_put_found_and_deleted_by_id() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        last = await client.say("last")
        content = [{"type": "input_text", "text": "first"}]
        item = {"type": "message", "role": "user", "id": "first", "content": content}
        await client.send("conversation.item.create", item=item, previous_item_id="root")
        assert (await client.next())["previous_item_id"] is None
        await client.next()
        await client.send("conversation.item.create", item=item | {"id": "second"}, previous_item_id="first")
        assert (await client.next())["previous_item_id"] == "first"
        await client.next()
        assert (await client.refused("conversation.item.create", item=item))["param"] == "item.id"
        error = await client.refused("conversation.item.create", item=item | {"id": "x"}, previous_item_id="nothing")
        assert error["param"] == "previous_item_id"
        await client.send("conversation.item.retrieve", item_id="first")
        assert (await client.next())["item"]["content"][0]["text"] == "first"
        await client.send("conversation.item.delete", item_id="second")
        assert (await client.next())["item_id"] == "second"
        for kind, code in (("retrieve", "item_retrieve_invalid_item_id"), ("delete", "item_delete_invalid_item_id")):
            error = await client.refused(f"conversation.item.{kind}", item_id="second")
            assert error["code"] == code
        await client.send("response.create")
        await client.until("response.done")
        texts = [message.content for message in client.generator.last_request.messages]
        assert texts == [(TextPart("first"),), (TextPart("last"),)]
        assert last != "first"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "mcp_approval_response"}, "item.type"),
        ({"type": "function_call_output", "output": ""}, "item.call_id"),
        ({"type": "message", "role": "tool", "content": []}, "item.role"),
        ({"type": "message", "role": "user", "content": []}, "item.content"),
        ({"type": "message", "role": "user", "content": [{"type": "text", "text": ""}]}, "item.content[0].type"),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]},
            "item.content[0].audio",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "ftp://x"}]},
            "item.content[0].image_url.url",
        ),
    ],
)
async def test_a_bad_item_is_refused(item: dict[str, Any], param: str) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        assert (await client.refused("conversation.item.create", item=item))["param"] == param


async def test_truncating_cuts_what_the_model_reads_later() -> None:
    script: list[ScriptEntry] = [TextDelta("one two three four", (1,)), AudioDelta(0, voice(1)), TextDone("stop")]
    async with RealtimeClient(FakeGenerator(script=[*script, finished(codec_tokens=1)])) as client:
        await client.opened()
        await client.send("response.create")
        item_id = (await client.until("response.done"))["response"]["output"][0]["id"]
        await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=500)
        event = await client.next()
        assert event["type"] == "conversation.item.truncated"
        assert (event["item_id"], event["content_index"], event["audio_end_ms"]) == (item_id, 0, 500)
        await client.send("response.create")
        await client.until("response.done")
        assert client.generator.last_request.messages[0].content == (TextPart("one two"),)


async def test_truncating_what_cannot_be_truncated() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        user_id = await client.say("hi")
        await client.send("response.create")
        item_id = (await client.until("response.done"))["response"]["output"][0]["id"]
        truncate: dict[str, Any] = {"type": "conversation.item.truncate", "content_index": 0}
        error = await client.refused(**truncate, item_id="nothing", audio_end_ms=1)
        assert error["code"] == "item_truncate_invalid_item_id"
        assert (await client.refused(**truncate, item_id=user_id, audio_end_ms=1))["param"] == "content_index"
        error = await client.refused(**truncate, item_id=item_id, audio_end_ms=5000)
        assert error["message"] == "Audio content of 292ms is already shorter than 5000ms"
        assert error["param"] == "audio_end_ms"
        await client.send(**truncate, item_id=item_id, audio_end_ms=300)  # a player's rounding
        assert (await client.next())["type"] == "conversation.item.truncated"
        error = await client.refused(**truncate, item_id=item_id, audio_end_ms=100)
        assert error["code"] == "item_already_truncated"


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns() -> None:
    class Small(FakeGenerator):
        async def submit(self, request: Any) -> Any:
            if len(request.messages) > 4:
                self.requests.append(request)
                raise InvalidRequestError("too long", code="context_length_exceeded")
            return await super().submit(request)

    async with RealtimeClient(Small()) as client:
        await client.opened(instructions="Be brief.")
        for number in range(8):
            await client.say(str(number))
        await client.send("response.create")
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        texts = [message.content for message in client.generator.last_request.messages]
        assert texts[0] == (TextPart("Be brief."),)
        assert texts[-1] == (TextPart("7"),)
        await client.send("session.update", session={"type": "realtime", "truncation": "disabled"})
        await client.send("response.create")
        details = (await client.until("response.done"))["response"]["status_details"]
        assert details["error"]["code"] == "context_length_exceeded"


# -- the user's voice


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
        await client.send("response.create")
        await client.until("response.done")
        part = client.generator.last_request.messages[0].content[0]
        assert isinstance(part, AudioPart)
        assert len(part.samples) == 0.7 * 24_000


async def test_telephone_audio_comes_in_at_its_rate() -> None:
    async with RealtimeClient() as client:
        await client.opened(audio={"input": {"turn_detection": None, "format": {"type": "audio/pcma"}}})
        await client.send("input_audio_buffer.append", audio=base64_of(b"\xd5" * 4000))
        await client.send("input_audio_buffer.commit")
        await client.send("response.create")
        await client.until("response.done")
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


async def test_sound_that_was_not_sent_yet_is_dropped_by_an_interruption() -> None:
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
    assert sound_of(client.events) == b""


async def test_a_turn_beside_an_uninterruptible_response_is_answered_after_it() -> None:
    go_on = asyncio.Event()
    script: list[ScriptEntry] = [TextDelta("a", (1,)), Wait(go_on), TextDone("stop"), finished()]
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


async def test_what_the_user_says_is_written_down_if_asked() -> None:
    async with RealtimeClient() as client:
        await client.opened(
            audio={"input": {"turn_detection": None, "transcription": {"model": "whisper-1", "language": "en"}}}
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
        await client.send("response.create")
        assert (await client.until("response.done"))["response"]["status"] == "completed"


# -- errors and ends


@pytest.mark.parametrize(
    "frame", ["", "{", "[]", "NaN", '"text"', "{}", '{"type": 1}', '{"type": "output_audio_buffer.clear"}', b"\0\1"]
)
async def test_a_malformed_frame_is_an_error_and_the_session_goes_on(frame: str | bytes) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.send_raw(frame)
        error = (await client.until("error"))["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_event")
        await client.say("hi")


async def test_errors_name_the_event_that_caused_them() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        assert (await client.refused("no.such.event"))["event_id"] == "mine"
        assert (await client.refused("conversation.item.retrieve"))["param"] == "item_id"
        await client.send_raw("{")
        assert (await client.next())["error"]["event_id"] is None


async def test_a_client_that_leaves_frees_everything() -> None:
    generator = FakeGenerator(script=ENDLESS)
    client = RealtimeClient(generator)
    async with client:
        await client.opened()
        await client.send("response.create")
        await client.send("response.create", response={"conversation": "none"})
        await client.until("response.output_audio.delta")
    assert len(generator.generations) == 2
    assert all(generation.num_closed == 1 for generation in generator.generations)
    await asyncio.wait_for(client.state.wait_idle(), 1)


async def test_two_sessions_know_nothing_of_each_other() -> None:
    generator = FakeGenerator(script=ENDLESS)
    app = realtime_app(ServerState(generator))
    async with RealtimeClient(generator, app=app) as one, RealtimeClient(generator, app=app) as other:
        await one.opened(instructions="one")
        await other.opened(instructions="other")
        await one.send("response.create")
        await one.until("response.output_audio.delta")
        generator.script = None
        await other.say("from the other")
        await other.send("response.create")
        await other.until("response.done")
        roles = [message.role for message in generator.last_request.messages]
        assert roles == ["system", "user"]
        assert generator.last_request.messages[0].content == (TextPart("other"),)
        await one.nothing_comes()
        await one.send("response.cancel")
        await one.until("response.done")


async def test_a_session_that_has_lasted_its_time_is_closed() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator, config=ApiConfig(realtime_session_timeout_s=0.3)) as client:
        await client.opened()
        await client.send("response.create")
        assert (await client.until("error"))["error"]["code"] == "session_expired"
        with pytest.raises(Closed) as closed:
            await client.next()
        assert closed.value.code == 1000
    assert generator.generations[0].num_closed == 1


async def test_an_idle_session_is_closed_but_not_while_it_is_answered() -> None:
    go_on = asyncio.Event()
    script: list[ScriptEntry] = [TextDelta("a", (1,)), Wait(go_on), TextDone("stop"), finished()]
    async with RealtimeClient(FakeGenerator(script=script), config=ApiConfig(realtime_idle_timeout_s=0.05)) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        await asyncio.sleep(0.2)
        go_on.set()
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert (await client.until("error"))["error"]["code"] == "session_expired"
        with pytest.raises(Closed):
            await client.next()


async def test_a_server_that_stops_finishes_the_answer_and_says_goodbye() -> None:
    go_on = asyncio.Event()
    script: list[ScriptEntry] = [TextDelta("a", (1,)), Wait(go_on), TextDone("stop"), finished()]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        client.state.draining = True
        error = await client.refused("response.create", response={"conversation": "none"})
        assert error["code"] == "server_shutting_down"
        idle = asyncio.create_task(client.state.wait_idle())
        await asyncio.sleep(0.05)
        assert not idle.done()
        go_on.set()
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        error = (await client.next())["error"]
        assert (error["code"], error["type"]) == ("server_shutting_down", "server_error")
        with pytest.raises(Closed) as closed:
            await client.next()
        assert closed.value.code == 1001
        await asyncio.wait_for(idle, 5)


async def test_a_server_that_aborts_fails_the_answer_and_says_goodbye() -> None:
    async with RealtimeClient(FakeGenerator(script=ENDLESS)) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        client.state.draining = True
        client.state.abort(OverloadedError("The server is shutting down.", code="server_shutting_down"))
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "server_shutting_down"
        with pytest.raises(Closed):
            await client.until("nothing")


async def test_a_client_that_does_not_read_is_cut_off_and_nobody_else_waits() -> None:
    minutes: list[ScriptEntry] = [AudioDelta(0, voice(60))] * 6
    generator = FakeGenerator(script=[*minutes, Hang()])
    app = realtime_app(ServerState(generator), ApiConfig(realtime_send_timeout_s=0.2))
    async with RealtimeClient(generator, app=app) as slow, RealtimeClient(generator, app=app) as other:
        await slow.opened()
        await other.opened()
        slow.reading.clear()
        await slow.send("response.create")
        await asyncio.wait_for(generator.submitted.wait(), 5)
        await other.say("hi")
        await asyncio.wait_for(asyncio.wait({slow.task}), 20)
        assert generator.generations[0].num_closed == 1
        await other.say("still here")


async def test_only_the_latest_sounds_fit_into_a_prompt() -> None:
    model = replace(MODEL, max_media_per_prompt={"audio": 2, "image": 1, "video": 0})
    async with RealtimeClient(FakeGenerator(model)) as client:
        await client.opened(audio=MANUAL)
        for seconds in (0.2, 0.3, 0.4):
            await client.append(voice(seconds))
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.done")
        await client.send("response.create")
        await client.until("response.done")
        parts = [message.content[0] for message in client.generator.last_request.messages]
        assert [len(part.samples) for part in parts if isinstance(part, AudioPart)] == [7200, 9600]
