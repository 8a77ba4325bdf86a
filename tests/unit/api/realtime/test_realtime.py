"""`/v1/realtime` with a scripted generator: the rows of the conformance checklist, and where
in this folder each is shown; here, connecting and the session object.

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

import re
from pathlib import Path
from typing import Any

import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.types import TextPart
from tests.unit.api.fake_generator import (
    MODEL,
    TEXT_ONLY_MODEL,
    FakeGenerator,
)
from tests.unit.api.realtime.answers import MANUAL
from tests.unit.api.realtime.realtime_client import (
    RealtimeClient,
    Refused,
    realtime_app,
)

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(set(re.findall(r"test_\w+(?!\.py)\b(?!\.py)", __doc__ or ""))))
def test_every_test_in_the_table_exists(name: str) -> None:
    assert any(f"def {name}(" in file.read_text() for file in TESTS.glob("test_*.py"))


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
