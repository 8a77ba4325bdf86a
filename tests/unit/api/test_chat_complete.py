"""Answers that are not streamed."""

import base64
import io
import re
import time
import wave

import pytest

from omni_server.api.config import ApiConfig
from omni_server.types import TextPart
from tests.unit.api.clients import SPEECH, app_of, chat, error_of, http_client, openai_client, post
from tests.unit.api.fake_generator import SAMPLES, TEXT, FakeGenerator, finished, text_script
from tests.unit.api.schema import check_completion


async def test_text_answer_has_content_and_no_audio() -> None:
    generator = FakeGenerator()
    response = await post(app_of(generator), chat())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    check_completion(body)
    message = body["choices"][0]["message"]
    assert (message["content"], message["audio"]) == (TEXT, None)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["model"] == "org/omni-tiny"
    assert body["system_fingerprint"] == "fp_0123456789"
    assert generator.last_request.speech is None
    assert generator.last_request.request_id == body["id"]


async def test_usage_adds_up_per_modality() -> None:
    usage = (await post(app_of(FakeGenerator()), chat(**SPEECH))).json()["usage"]
    assert usage == {
        "prompt_tokens": 20,
        "completion_tokens": 11,
        "total_tokens": 31,
        "prompt_tokens_details": {
            "text_tokens": 12,
            "audio_tokens": 5,
            "image_tokens": 2,
            "video_tokens": 1,
            "cached_tokens": 3,
        },
        "completion_tokens_details": {
            "text_tokens": 6,
            "audio_tokens": 5,
            "image_tokens": 0,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_spoken_answer_has_audio_with_transcript_and_null_content() -> None:
    response = await post(app_of(FakeGenerator()), chat(**SPEECH))
    body = response.json()
    check_completion(body)
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["audio"]["transcript"] == TEXT
    assert message["audio"]["expires_at"] > time.time()
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"], validate=True))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() == SAMPLES.size


@pytest.mark.parametrize("audio", [SPEECH["audio"], {}, {"voice": "nobody", "format": "webm"}])
async def test_audio_object_without_the_modality_is_ignored(audio: dict[str, str]) -> None:
    body = (await post(app_of(FakeGenerator()), chat(audio=audio))).json()
    assert body["choices"][0]["message"]["content"] == TEXT
    assert body["choices"][0]["message"]["audio"] is None


async def test_length_is_reported_as_finish_reason() -> None:
    body = (await post(app_of(FakeGenerator(script=text_script("length"))), chat())).json()
    assert body["choices"][0]["finish_reason"] == "length"


async def test_answer_without_any_sound_is_a_valid_empty_file() -> None:
    generator = FakeGenerator(script=[*text_script()[:-1], finished()])
    body = (await post(app_of(generator), chat(**SPEECH))).json()
    check_completion(body)
    with wave.open(io.BytesIO(base64.b64decode(body["choices"][0]["message"]["audio"]["data"]))) as file:
        assert file.getnframes() == 0


async def test_generation_is_closed_after_the_answer() -> None:
    generator = FakeGenerator()
    await post(app_of(generator), chat())
    assert generator.generations[0].num_closed == 1


async def test_message_of_the_official_client_can_be_sent_back_whole() -> None:
    generator = FakeGenerator()
    async with openai_client(app_of(generator)) as client:
        user = {"role": "user", "content": "hi"}
        first = await client.chat.completions.create(model="omni", messages=[user], **SPEECH)  # type: ignore[list-item]
        again = first.choices[0].message
        await client.chat.completions.create(model="omni", messages=[user, again, user])  # type: ignore[list-item]
    # Known to this server or not: an echoed transcript serves as well.
    other = FakeGenerator()
    async with openai_client(app_of(other)) as client:
        await client.chat.completions.create(model="omni", messages=[user, again, user])  # type: ignore[list-item]
    for request in (generator.last_request, other.last_request):
        assert [message.role for message in request.messages] == ["user", "assistant", "user"]
        assert request.messages[1].content == (TextPart(TEXT),)


async def test_content_of_an_assistant_turn_comes_before_its_audio() -> None:
    generator = FakeGenerator()
    body = chat()
    body["messages"].insert(0, {"role": "assistant", "content": "said", "audio": {"id": "audio_unknown"}})
    assert (await post(app_of(generator), body)).status_code == 200
    assert generator.last_request.messages[0].content == (TextPart("said"),)


async def test_expired_audio_id_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(FakeGenerator())
    audio = (await post(app, chat(**SPEECH))).json()["choices"][0]["message"]["audio"]
    monkeypatch.setattr("omni_server.api.answer_store.time.time", lambda: audio["expires_at"])
    body = chat()
    body["messages"].append({"role": "assistant", "audio": {"id": audio["id"]}})
    assert error_of(await post(app, body))["code"] == "audio_not_found"


async def test_roles_and_text_parts_reach_the_generator_in_order() -> None:
    generator = FakeGenerator()
    messages = [
        {"role": "developer", "content": "rules", "name": "ops"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"text": "c"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}], "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": "no"},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "never"}],
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "user", "content": ""},
    ]
    assert (await post(app_of(generator), {"model": "omni", "messages": messages})).status_code == 200
    assert [
        (m.role, *(part.text for part in m.content if isinstance(part, TextPart)))
        for m in generator.last_request.messages
    ] == [
        ("system", "rules"),
        ("user", "a", "b", "c"),
        ("assistant", "d"),
        ("assistant", "no"),
        ("assistant", "never"),
        ("tool", "42"),
        ("user", ""),
    ]


async def test_unknown_and_bookkeeping_fields_are_ignored() -> None:
    fields = {
        "vendor_key": {"a": [1]},
        "user": "u",
        "metadata": {str(i): "v" for i in range(16)},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "logprobs": False,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "stream": None,
        "stop": None,
        "n": 1,
    }
    assert (await post(app_of(FakeGenerator()), chat(**fields))).status_code == 200


async def test_charset_in_the_content_type_is_accepted() -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        headers = {"content-type": "application/json; charset=utf-8"}
        response = await client.post(
            "/v1/chat/completions",
            content='{"model":"omni","messages":[{"role":"user","content":"é"}]}',
            headers=headers,
        )
    assert response.status_code == 200


async def test_large_body_is_parsed_like_a_small_one() -> None:
    generator = FakeGenerator()
    assert (await post(app_of(generator), chat("x" * 100_000))).status_code == 200
    assert generator.last_request.messages[0].content == (TextPart("x" * 100_000),)


@pytest.mark.parametrize("stream", [False, True])
async def test_audio_id_is_worth_nothing_to_another_key(stream: bool) -> None:
    app = app_of(FakeGenerator(), ApiConfig(api_keys=("mine", "yours")))
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    fields = SPEECH | {"audio": {"voice": "Ethan", "format": "pcm16"}, "stream": stream}
    text = (await post(app, chat(**fields), mine)).text
    body = chat()
    body["messages"].append(
        {"role": "assistant", "audio": {"id": re.findall(r"audio_[0-9a-f]{32}", text)[0]}}
    )
    assert (await post(app, body, mine)).status_code == 200
    error = error_of(await post(app, body, yours))
    assert (error["param"], error["code"]) == ("messages[1].audio.id", "audio_not_found")
