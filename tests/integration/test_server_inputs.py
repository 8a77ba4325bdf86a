"""What is sent to the server: media and conversations, which are answered, and mistakes, which are
refused."""

import io
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import soundfile

from tests.integration.test_server import (
    IMAGE_PART,
    KINDS,
    SPEECH_PART,
    VIDEO_PART,
    answer_to,
    arguments,
    message_of,
    num_tokens,
    outcome,
    spoken,
    stream_of,
    text_of,
    written,
)
from tests.omni_families import OmniFamily, for_each_family
from tests.unit.api.clients import URL, base64_of, chat, data_url, error_of, media
from tests.unit.api.test_bad_bodies import NOT_JSON
from tests.unit.api.test_bad_requests import REFUSED


@pytest.fixture(scope="module")
def hello(client: httpx2.Client) -> dict[str, Any]:
    """The answer to `spoken()`, before all mistakes."""
    return answer_to(client, spoken())


# -- media and conversations


@for_each_family
def test_speech_is_heard_in_every_spelling(family: OmniFamily, client: httpx2.Client) -> None:
    wav = media("speech_hello.wav")
    url = {"type": "audio_url", "audio_url": {"url": data_url(wav, "audio/wav")}}
    in_url = {"type": "input_audio", "input_audio": {"data": data_url(wav), "format": "wav"}}
    answers = [answer_to(client, spoken([part])) for part in (SPEECH_PART, url, in_url)]
    assert len({outcome(answer) for answer in answers}) == 1
    fewest, most = family.speech_tokens
    assert fewest <= answers[0]["usage"]["prompt_tokens_details"]["audio_tokens"] <= most


@for_each_family
def test_what_is_said_changes_the_answer(client: httpx2.Client) -> None:
    clips = [("speech_hello.wav", "wav"), ("speech_weather.wav", "wav"), ("speech_hello.mp3", "mp3")]
    parts = [
        {"type": "input_audio", "input_audio": {"data": base64_of(media(name)), "format": audio_format}}
        for name, audio_format in clips
    ]
    hello, weather, mp3 = (answer_to(client, written([part])) for part in parts)
    assert text_of(hello) != text_of(weather)
    assert mp3["usage"]["prompt_tokens_details"]["audio_tokens"] > 0


@for_each_family
def test_images_are_seen(family: OmniFamily, client: httpx2.Client) -> None:
    question = {"type": "text", "text": "What is this?"}
    gradient = {"type": "image_url", "image_url": {"url": data_url(media("gradient.png"), "image/png")}}
    shapes, other = (answer_to(client, written([question, part])) for part in (IMAGE_PART, gradient))
    counts = [answer["usage"]["prompt_tokens_details"]["image_tokens"] for answer in (shapes, other)]
    assert tuple(counts) == family.image_tokens
    assert text_of(shapes) != text_of(other)


@for_each_family
def test_video_is_seen(client: httpx2.Client) -> None:
    completion = answer_to(client, written([VIDEO_PART, {"type": "text", "text": "What moves?"}]))
    assert completion["usage"]["prompt_tokens_details"]["video_tokens"] > 0
    assert text_of(completion)


@for_each_family
def test_all_kinds_together_are_answered_by_voice(client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "Compare:"}, SPEECH_PART, IMAGE_PART, VIDEO_PART]
    whole = answer_to(client, spoken(parts))
    streamed = stream_of(client, spoken(parts))
    details = whole["usage"]["prompt_tokens_details"]
    assert all(details[f"{kind}_tokens"] > 0 for kind in KINDS)
    assert (streamed.transcript, streamed.data) == outcome(whole)


@for_each_family
def test_earlier_speech_is_referred_to_by_its_id(client: httpx2.Client, hello: dict[str, Any]) -> None:
    streamed = stream_of(client, spoken())
    assert streamed.audio_id is not None
    ids = (message_of(hello)["audio"]["id"], streamed.audio_id)
    assert ids[0] != ids[1]
    earlier = [{"role": "assistant", "audio": {"id": audio_id}} for audio_id in ids]
    earlier.append({"role": "assistant", "content": text_of(hello)})
    answers = []
    for message in earlier:
        body = spoken()
        body["messages"] += [message, {"role": "user", "content": "And then?"}]
        answers.append(answer_to(client, body))
    assert len({outcome(answer) for answer in answers}) == 1
    assert answers[0]["usage"]["prompt_tokens"] > hello["usage"]["prompt_tokens"]


# -- mistakes of the client


@pytest.mark.parametrize(("name", "body", "param", "code"), REFUSED, ids=[row[0] for row in REFUSED])
def test_bad_field_is_refused(
    client: httpx2.Client, name: str, body: Any, param: str | None, code: str
) -> None:
    error = error_of(client.post(URL, json=body))
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("body", [row[1] for row in NOT_JSON], ids=[row[0] for row in NOT_JSON])
def test_body_that_is_not_json_is_refused(client: httpx2.Client, body: bytes) -> None:
    response = client.post(URL, content=body, headers={"content-type": "application/json"})
    assert error_of(response)["code"] == "invalid_json"


def _media_part(kind: str, url: str) -> list[dict[str, Any]]:
    return [{"type": kind, kind: {"url": url}}]


BAD_MEDIA = [
    (
        "base64 malformed",
        [{"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}],
        "invalid_base64",
    ),
    ("audio undecodable", _media_part("audio_url", data_url(bytes(999))), "invalid_audio"),
    (
        "audio cut in its header",
        _media_part("audio_url", data_url(media("speech_hello.wav")[:20])),
        "invalid_audio",
    ),
    ("image undecodable", _media_part("image_url", data_url(bytes(999))), "invalid_image"),
    ("image cut short", _media_part("image_url", data_url(media("shapes.png")[:100])), "invalid_image"),
    ("video undecodable", _media_part("video_url", data_url(bytes(999))), "invalid_video"),
    ("video cut short", _media_part("video_url", data_url(media("ball.mp4")[:500])), "invalid_video"),
    ("host not allowed", _media_part("image_url", "http://127.0.0.1:1/x.png"), "media_not_allowed"),
    ("file", _media_part("image_url", "file:///etc/passwd"), None),
    ("too many images", [IMAGE_PART] * 5, "too_many_media"),
]


@pytest.mark.parametrize(("name", "content", "code"), BAD_MEDIA, ids=[row[0] for row in BAD_MEDIA])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_media_are_refused(
    client: httpx2.Client, name: str, content: Any, code: str | None, stream: bool
) -> None:
    error = error_of(client.post(URL, json=spoken(content, stream=stream)))
    assert error["param"].startswith("messages")
    assert code is None or error["code"] == code


@for_each_family
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_is_too_long_is_refused(client: httpx2.Client, stream: bool) -> None:
    # 8192 tokens fit: the first has too many for the tokenizer's limit, the second together with its answer.
    error = error_of(client.post(URL, json=spoken("word " * 20_000, stream=stream)))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    for name in ("max_tokens", "max_completion_tokens"):
        error = error_of(client.post(URL, json=spoken("hi", stream=stream) | {name: 8191}))
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


@for_each_family
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
def test_speech_limit_that_does_not_fit_the_talkers_context_is_refused(
    client: httpx2.Client, name: str
) -> None:
    error = error_of(
        client.post(URL, json=spoken(stage_sampling={"talker": {"max_tokens": 10240, name: 10240}}))
    )
    assert error["param"] == "stage_sampling.talker.max_tokens"
    assert error["code"] == "context_length_exceeded"


def test_prompt_that_leaves_less_room_than_the_default_limit_is_answered_within_it(
    client: httpx2.Client,
) -> None:
    num_others = answer_to(client, written("word"))["usage"]["prompt_tokens"] - 1
    longest = " ".join(["word"] * (8191 - num_others))
    answer = answer_to(client, written(longest, max_tokens=None, ignore_eos=True))
    assert answer["usage"]["prompt_tokens"] == 8191
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


@for_each_family
def test_audio_of_the_longest_duration_allowed_is_heard(family: OmniFamily, client: httpx2.Client) -> None:
    samples, rate = soundfile.read(io.BytesIO(media("speech_hello.wav")), dtype="int16")
    file = io.BytesIO()
    soundfile.write(file, np.resize(samples, 300 * rate), rate, format="FLAC")
    part = {"type": "input_audio", "input_audio": {"data": base64_of(file.getvalue()), "format": "flac"}}
    answer = answer_to(client, spoken([part]))
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == family.longest_audio_tokens
    assert num_tokens(answer)[1] > 0


def test_min_tokens_above_the_limit_of_the_stage_config_are_refused(client: httpx2.Client) -> None:
    for body in (
        written(max_tokens=None, min_tokens=2000),
        spoken(stage_sampling={"talker": {"min_tokens": 2000}}),
    ):
        assert error_of(client.post(URL, json=body))["code"] == "invalid_value"


def test_unknown_model_is_not_found(client: httpx2.Client) -> None:
    error = error_of(client.post(URL, json=chat() | {"model": "no-such-model"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_audio_id_that_nobody_was_given_is_refused(client: httpx2.Client) -> None:
    body = spoken()
    body["messages"] += [
        {"role": "assistant", "audio": {"id": "audio_0"}},
        {"role": "user", "content": "And?"},
    ]
    assert error_of(client.post(URL, json=body))["code"] == "audio_not_found"


def test_audio_object_without_the_modality_is_ignored(client: httpx2.Client) -> None:
    with_object = answer_to(client, written(audio={"voice": "Ethan", "format": "wav"}))
    assert outcome(with_object) == outcome(answer_to(client, written()))


def test_official_client_raises_the_class_of_each_mistake(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        official.chat.completions.create(**arguments(written() | {"model": "no-such-model"}))
    with pytest.raises(openai.BadRequestError) as failure:
        official.chat.completions.create(**arguments(spoken(voice="nobody")))
    assert failure.value.param == "audio.voice"
    assert "Chelsie, Ethan" in failure.value.message


def test_requests_after_all_these_mistakes_are_answered_as_before(
    client: httpx2.Client, hello: dict[str, Any]
) -> None:
    assert outcome(answer_to(client, spoken())) == outcome(hello)
    assert client.get("/health").status_code == 200
