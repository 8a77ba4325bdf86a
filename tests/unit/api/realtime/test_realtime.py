"""`/v1/realtime` with a scripted generator: connecting and the session object.

Every event that any test of this folder reads is checked against the client's types, the list of known types
and for a fresh id by `RealtimeClient`.
"""

from typing import Any

import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.types import TextPart
from tests.unit.api.fake_generator import (
    IMAGE_MODEL,
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
        assert (await client.refused("session.update", session=session))[
            "param"
        ] == "session.output_modalities"


@pytest.mark.parametrize("query", ["", "model=omni", "model=org%2Fomni-tiny"])
async def test_served_names_are_taken_and_none_means_the_model(query: str) -> None:
    async with RealtimeClient(query=query) as client:
        assert (await client.next())["session"]["model"] == MODEL.name


async def test_a_model_without_text_and_voices_is_refused_at_the_upgrade() -> None:
    with pytest.raises(Refused) as refused:
        await RealtimeClient(state=ServerState(FakeGenerator(IMAGE_MODEL))).__aenter__()
    assert refused.value.status == 400
    assert refused.value.body["error"]["message"] == f"The model '{IMAGE_MODEL.name}' holds no conversations."


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
        await client.send(
            "session.update", session={"type": "realtime", "instructions": "Be brief.", "audio": audio}
        )
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
            reasoning={"effort": "low"},
            truncation={
                "type": "retention_ratio",
                "retention_ratio": 0.8,
                "token_limits": {"post_instructions": 9},
            },
            audio={
                "input": {
                    "turn_detection": {"type": "semantic_vad", "eagerness": "low"},
                    "noise_reduction": {"type": "near_field"},
                    "format": {"type": "audio/pcmu"},
                    "transcription": {
                        "model": "whisper-1",
                        "delay": "low",
                        "keywords": ["a"],
                        "languages": ["en"],
                    },
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
        assert session["audio"]["input"]["transcription"] == {
            "model": "whisper-1",
            "language": None,
            "prompt": None,
        }
        assert session["truncation"] == {"type": "retention_ratio", "retention_ratio": 0.8}
        assert session["tracing"] is None
        assert "reasoning" not in session


async def test_null_is_what_clients_send_for_fields_that_they_do_not_set() -> None:
    async with RealtimeClient() as client:
        await client.opened(instructions="Be brief.")
        before = client.events[-1]["session"]
        nulls = dict.fromkeys(
            ("instructions", "tools", "tool_choice", "max_output_tokens", "output_modalities", "audio")
        )
        await client.send("session.update", session={"type": "realtime", **nulls})
        assert (await client.next())["session"] == before
        await client.send(
            "response.create", response={**nulls, "metadata": None, "input": None, "conversation": None}
        )
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert client.generator.last_request.messages[0].content == (TextPart("Be brief."),)
        semantic = {"type": "semantic_vad", "eagerness": None, "interrupt_response": None}
        audio = {"input": {"turn_detection": semantic}}
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        detection = (await client.next())["session"]["audio"]["input"]["turn_detection"]
        assert (detection["eagerness"], detection["interrupt_response"]) == ("auto", True)


WEATHER = {"type": "function", "name": "weather"}
TIME = {"type": "function", "name": "time"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"voice": "Ethan"}, "voice", "unknown_parameter"),
    ({"turn_detection": {"type": "server_vad"}}, "turn_detection", "unknown_parameter"),
    ({"audio": {"voice": "Ethan"}}, "audio.voice", "unknown_parameter"),
    (
        {"audio": {"input": {"turn_detection": {"treshold": 0.5}}}},
        "audio.input.turn_detection.treshold",
        "unknown_parameter",
    ),
    (
        {"audio": {"input": {"transcription": {"modl": "x"}}}},
        "audio.input.transcription.modl",
        "unknown_parameter",
    ),
    (
        {"audio": {"input": {"format": {"type": "audio/pcmu", "rate": 8000}}}},
        "audio.input.format.rate",
        "unknown_parameter",
    ),
    ({"tools": [WEATHER | {"strict": True}]}, "tools[0].strict", "unknown_parameter"),
    ({"type": None}, "type", "missing_required_parameter"),
    ({"type": "transcription"}, "type", "invalid_value"),
    ({"model": "other"}, "model", "invalid_value"),
    ({"output_modalities": ["text", "audio"]}, "output_modalities", "array_above_max_length"),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"audio": []}, "audio", "invalid_type"),
    ({"audio": {"input": {"format": {"type": "opus"}}}}, "audio.input.format.type", "invalid_value"),
    (
        {"audio": {"input": {"turn_detection": {"threshold": 1.5}}}},
        "audio.input.turn_detection.threshold",
        "decimal_above_max_value",
    ),
    (
        {"audio": {"input": {"turn_detection": {"idle_timeout_ms": 6000}}}},
        "audio.input.turn_detection.idle_timeout_ms",
        "invalid_value",
    ),
    ({"audio": {"output": {"voice": "nobody"}}}, "audio.output.voice", "invalid_value"),
    ({"audio": {"output": {"speed": 1.4}}}, "audio.output.speed", "decimal_above_max_value"),
    ({"truncation": "sometimes"}, "truncation", "invalid_value"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "nested"}}]},
        "tools[0].name",
        "missing_required_parameter",
    ),
    ({"tools": [{"type": "mcp", "name": "a"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "invalid_value"),
    (
        {"tools": [WEATHER, TIME | {"parameters": {"type": "string"}}]},
        "tools[1].parameters",
        "invalid_function_parameters",
    ),
    (
        {"tools": [{**tool, "description": "x" * 2**17} for tool in (WEATHER, TIME)]},
        "tools",
        "value_above_max_size",
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
]


@pytest.mark.parametrize(("session", "param", "code"), REFUSED, ids=[row[1] for row in REFUSED])
async def test_a_bad_update_is_refused_with_its_name_and_changes_nothing(
    session: dict[str, Any], param: str, code: str
) -> None:
    async with RealtimeClient() as client:
        before = (await client.next())["session"]
        changes = {"type": "realtime", "instructions": "x"} | session
        error = await client.refused("session.update", session=changes)
        assert (error["type"], error["param"]) == ("invalid_request_error", f"session.{param}")
        assert error["code"] == code
        await client.send("session.update", session={"type": "realtime"})
        assert (await client.next())["session"] == before


@pytest.mark.parametrize(("rate", "shown"), [(16000, "16000"), ({}, "an object")])
async def test_another_sample_rate_is_answered_with_the_supported_one(rate: object, shown: str) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        audio = {"input": {"format": {"type": "audio/pcm", "rate": rate}}}
        error = await client.refused("session.update", session={"type": "realtime", "audio": audio})
        assert error["message"] == f"Invalid value: {shown}. Supported values are: 24000."
        assert error["param"] == "session.audio.input.format.rate"
