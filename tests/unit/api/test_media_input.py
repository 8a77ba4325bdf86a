"""Sound, pictures and videos in requests."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from omni_server.api.config import ApiConfig
from omni_server.media.limits import MediaLimits
from omni_server.types import AudioPart, ImagePart, VideoPart
from tests.unit.api.clients import app_of, base64_of, chat, data_url, error_of, media, post, request_for, tone
from tests.unit.api.fake_generator import MODEL, FakeGenerator
from tests.unit.media.containers import LIVE_WEBM, record

WAV = media("speech_hello.wav")
SECOND = np.zeros((1, 48_000), dtype=np.float32)
WEBM = record("webm", "libopus", SECOND, 48_000, options=LIVE_WEBM)
M4A = record("ipod", "aac", SECOND, 48_000)
FILM = record("mp4", "aac", SECOND, 48_000, has_video=True)
PNG = media("gradient.png")
MP4 = media("ball.mp4")


def heic() -> bytes:
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.open(io.BytesIO(PNG))).save(file)
    return file.getvalue()


def input_audio(data: str, audio_format: str | None = "wav") -> dict[str, Any]:
    audio = {"data": data} if audio_format is None else {"data": data, "format": audio_format}
    return {"type": "input_audio", "input_audio": audio}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


HEARD = {"mm_processor_kwargs": {"use_audio_in_video": True}}


async def media_error(*content: dict[str, Any], config: ApiConfig | None = None) -> dict[str, Any]:
    generator = FakeGenerator()
    error = error_of(await post(app_of(generator, config), chat(list(content))))
    assert generator.requests == []
    return error


@pytest.mark.parametrize(
    "part",
    [
        input_audio(base64_of(tone())),
        input_audio(base64_of(tone("FLAC")), "flac"),
        input_audio(base64_of(tone("OGG", "OPUS")), "ogg"),
        input_audio(base64_of(tone("MP3")), "mp3"),
        input_audio(base64_of(WEBM), "webm"),
        input_audio(base64_of(M4A), "m4a"),
        input_audio(base64_of(FILM), "mp4"),
        input_audio(base64_of(WEBM), None),
        input_audio(data_url(WEBM, "audio/webm;codecs=opus")),
        {"type": "audio_url", "audio_url": {"url": data_url(M4A, "audio/mp4")}},
        {"type": "audio_url", "audio_url": {"url": data_url(WEBM, "audio/webm;codecs=opus")}},
        input_audio(base64_of(tone()), None),
        input_audio(data_url(tone(), "audio/wav")),
        input_audio(data_url(tone())),
        input_audio(base64_of(bytes(24_000)), "pcm16"),
        {"type": "audio_url", "audio_url": {"url": data_url(tone(), "audio/wav")}},
        {"type": "audio_url", "audio_url": data_url(tone())},
        {"audio_url": {"url": data_url(tone())}},
    ],
)
async def test_sound_is_accepted_in_every_spelling(part: dict[str, Any]) -> None:
    (audio,) = (await request_for([part])).messages[0].content
    assert isinstance(audio, AudioPart)
    assert audio.samples.size >= 8_000


async def test_bytes_overrule_the_declared_audio_format() -> None:
    (audio,) = (await request_for([input_audio(base64_of(tone()), "mp3")])).messages[0].content
    assert audio.samples.size == 8_000


@pytest.mark.parametrize(
    "part",
    [
        image(data_url(PNG, "image/png")),
        {"type": "image_url", "image_url": data_url(PNG)},
        {"image_url": data_url(PNG)},
        {"type": "input_image", "image_url": data_url(PNG)},
        image(data_url(heic(), "application/octet-stream")),
    ],
)
async def test_pictures_are_accepted_in_every_spelling(part: dict[str, Any]) -> None:
    (picture,) = (await request_for([part])).messages[0].content
    assert isinstance(picture, ImagePart)


@pytest.mark.parametrize(
    ("data", "fields", "num_samples"),
    [
        (FILM, HEARD, 16_000),
        (FILM, {}, None),
        (FILM, {"mm_processor_kwargs": {"use_audio_in_video": False}}, None),
        (MP4, HEARD, None),
    ],
    ids=["heard", "not asked for", "refused", "without a track"],
)
async def test_the_audio_of_a_video_is_heard_where_the_request_says_so(
    data: bytes, fields: dict[str, Any], num_samples: int | None
) -> None:
    generator = FakeGenerator()
    response = await post(app_of(generator), chat([video(data)], **fields))
    assert response.status_code == 200, response.text
    (part,) = generator.last_request.messages[0].content
    assert isinstance(part, VideoPart)
    assert (None if part.audio is None else len(part.audio.samples)) == num_samples


async def test_a_model_that_hears_no_videos_refuses_to() -> None:
    generator = FakeGenerator(replace(MODEL, hears_videos=False))
    error = error_of(await post(app_of(generator), chat([video(FILM)], **HEARD)))
    assert (error["param"], error["code"]) == ("mm_processor_kwargs.use_audio_in_video", "unsupported_value")
    assert "does not hear the audio track" in error["message"]


async def test_the_audio_of_a_video_counts_as_audio_and_has_its_limits() -> None:
    sounds = [input_audio(base64_of(WAV))] * 2
    generator = FakeGenerator()
    assert (await post(app_of(generator), chat([*sounds, video(FILM)]))).status_code == 200
    error = error_of(await post(app_of(generator), chat([*sounds, video(FILM)], **HEARD)))
    assert (error["param"], error["code"]) == ("messages", "too_many_media")
    config = ApiConfig(media_limits=MediaLimits(max_audio_seconds=0.5))
    error = error_of(await post(app_of(FakeGenerator(), config), chat([video(FILM)], **HEARD)))
    assert (error["param"], error["code"]) == ("messages[0].content[0].video_url.url", "invalid_audio")
    assert error["message"] == "The audio is longer than 0.5 s."


async def test_tool_results_may_hold_media() -> None:
    generator = FakeGenerator()
    body = chat()
    body["messages"] += [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [image(data_url(PNG))]},
    ]
    assert (await post(app_of(generator), body)).status_code == 200
    assert isinstance(generator.last_request.messages[-1].content[0], ImagePart)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("!!!", "invalid_base64"),
        ("", "invalid_base64"),
        ("AAA", "invalid_base64"),
        (base64_of(bytes(range(256))), "invalid_audio"),
        (base64_of(tone(num_samples=0)), "invalid_audio"),
        (base64_of(PNG), "invalid_audio"),
        ("data:audio/wav;base64,!!!", "invalid_base64"),
        ("http://127.0.0.1:1/a.wav", "media_not_allowed"),
    ],
)
async def test_bad_sound_is_refused_with_the_part_that_holds_it(data: str, code: str) -> None:
    error = await media_error({"type": "text", "text": "a"}, input_audio(data))
    assert (error["param"], error["code"]) == ("messages[0].content[1].input_audio.data", code)


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://127.0.0.1:1/",
        "http://169.254.169.254/latest/meta-data",
        "https://example.com/x",
        "/etc/passwd",
        "",
        "data:;base64,AAAA",
        "data:;base64,%%%",
    ],
)
async def test_bad_url_is_refused_with_the_part_that_holds_it(kind: str, url: str) -> None:
    error = await media_error({"type": kind, kind: {"url": url}})
    assert error["param"] == f"messages[0].content[0].{kind}.url"
    assert "root:" not in error["message"]


async def test_picture_and_video_cut_short_are_refused() -> None:
    assert (await media_error(image(data_url(PNG[:60]))))["code"] == "invalid_image"
    video = {"type": "video_url", "video_url": {"url": data_url(MP4[:500])}}
    assert (await media_error(video))["code"] == "invalid_video"


async def test_more_media_than_the_model_takes_are_refused_before_any_is_read() -> None:
    body = chat([image("data:,broken"), image("data:,broken")])
    body["messages"].append({"role": "user", "content": [image("data:,broken")]})
    error = error_of(await post(app_of(FakeGenerator()), body))
    assert (error["param"], error["code"]) == ("messages", "too_many_media")
    assert error["message"] == "At most 2 image(s) may be provided in one prompt."


async def test_kind_that_the_model_lacks_is_refused() -> None:
    generator = FakeGenerator()
    generator.model_info = type(generator.model_info)(
        **vars(generator.model_info) | {"input_modalities": ("audio",)}
    )
    error = error_of(await post(app_of(generator), chat([image(data_url(PNG))])))
    assert (error["param"], error["code"]) == ("messages[0].content[0].type", "unsupported_value")


async def test_item_above_the_size_limit_is_refused() -> None:
    config = ApiConfig(media_limits=MediaLimits(max_bytes=1000))
    error = await media_error(input_audio(base64_of(tone())), config=config)
    assert error["param"] == "messages[0].content[0].input_audio.data"


async def test_a_webm_cut_short_is_refused_as_other_sound_is() -> None:
    webm = record("webm", "libopus", SECOND, 48_000)
    cut = [await media_error(input_audio(base64_of(data[: len(data) // 2]))) for data in (webm, tone("FLAC"))]
    assert cut[0] == cut[1]
    assert cut[0]["code"] == "invalid_audio"


async def test_the_time_for_decoding_ends_the_reading_of_a_webm() -> None:
    error = await media_error(input_audio(base64_of(WEBM)), config=ApiConfig(media_decode_timeout_s=0.001))
    assert "could not be decoded within 0.001 s" in error["message"]
