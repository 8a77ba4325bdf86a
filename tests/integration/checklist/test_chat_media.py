"""Rows C15 to C30: sound, pictures and videos in chat, and where they may come from."""

import io
import json
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest
import soundfile

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import KEY, MediaHost
from tests.integration.checklist.test_chat import SHORT, completion_of
from tests.integration.server_process import ServerProcess
from tests.integration.test_server import IMAGE_PART, arguments, written
from tests.omni_families import OmniFamily
from tests.unit.api.clients import URL, base64_of, data_url, error_of, media, tone
from tests.unit.media.containers import record


def sound(data: bytes | str, audio_format: str = "wav") -> list[dict[str, Any]]:
    text = data if isinstance(data, str) else base64_of(data)
    return [{"type": "input_audio", "input_audio": {"data": text, "format": audio_format}}]


def picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


SOUNDS = {
    "C15 wav": ("wav", media("speech_hello.wav")),
    "C16 mp3": ("mp3", media("speech_hello.mp3")),
    "C16 flac": ("flac", tone("FLAC")),
    "C16 ogg": ("ogg", tone("OGG", "VORBIS")),
}


@pytest.mark.parametrize("row", SOUNDS)
def test_sound_is_heard(official: openai.OpenAI, row: str) -> None:
    audio_format, data = SOUNDS[row]
    completion = official.chat.completions.create(**arguments(written(sound(data, audio_format), **SHORT)))
    assert completion.choices[0].message.content
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert (completion.usage.prompt_tokens_details.audio_tokens or 0) > 0


@pytest.mark.parametrize("row", ["C17 data:audio/wav", "C17 data:"])
def test_sound_in_a_data_url_is_heard(curl: Curl, row: str) -> None:
    url = f"{row.removeprefix('C17 ')};base64,{base64_of(tone())}"
    completion = completion_of(curl.post(URL, written(sound(url), **SHORT)))
    assert completion["usage"]["prompt_tokens_details"]["audio_tokens"] > 0


NO_SOUNDS = {
    "C18 no base64": "!!!",
    "C18 empty": "",
    "C18 random bytes": base64_of(bytes(range(1, 256)) * 20),
    "C19 wav of no samples": base64_of(tone(num_samples=0)),
}


@pytest.mark.parametrize("row", NO_SOUNDS)
def test_what_is_no_sound_is_refused(curl: Curl, row: str) -> None:
    error = error_of(curl.post(URL, written(sound(NO_SOUNDS[row]))))
    assert error["param"].startswith("messages[0].content[0]")


def test_c20_wav_that_is_declared_as_mp3(curl: Curl) -> None:
    assert completion_of(curl.post(URL, written(sound(tone(), "mp3"), **SHORT)))


def test_c26_too_many_pictures(curl: Curl) -> None:
    error = error_of(curl.post(URL, written([IMAGE_PART] * 5)))
    assert error["message"].startswith("At most 4 image(s)")


def test_c27_file_url(curl: Curl) -> None:
    response = curl.post(URL, written(picture("file:///etc/passwd")))
    error_of(response)
    assert "root:" not in response.text


REFUSED_URLS = {
    "C28 loopback": "http://127.0.0.1:1/x.png",
    "C28 metadata of a cloud": "http://169.254.169.254/latest/meta-data",
}


@pytest.mark.parametrize("row", REFUSED_URLS)
def test_no_host_is_asked_unless_it_is_allowed(curl: Curl, row: str) -> None:
    assert error_of(curl.post(URL, written(picture(REFUSED_URLS[row]))))["code"] == "media_not_allowed"


def fetched(server: ServerProcess, url: str) -> httpx2.Response:
    return Curl(server.url, KEY).post(URL, written(picture(url)))


def test_c28_hosts_beside_the_allowed_one_are_not_asked(
    guarded: ServerProcess, media_host: MediaHost
) -> None:
    asked = len(media_host.paths)
    for url in ("http://169.254.169.254/latest/meta-data", media_host.url("/x.png", "localhost")):
        assert error_of(fetched(guarded, url))["code"] == "media_not_allowed"
    assert len(media_host.paths) == asked
    # The allowed host is asked; what it says is no picture, and not repeated.
    response = fetched(guarded, media_host.url("/x.png"))
    assert error_of(response)["code"] == "invalid_image"
    assert media_host.paths[asked:] == ["/x.png"]
    assert MediaHost.SECRET not in response.text


@pytest.mark.parametrize("row", ["C29 to an address", "C29 to a name of a private address"])
def test_redirect_to_a_private_address_is_not_followed(
    guarded: ServerProcess, media_host: MediaHost, row: str
) -> None:
    asked = len(media_host.paths)
    target = (
        "http://169.254.169.254/latest"
        if row == "C29 to an address"
        else media_host.url("/y.png", "localhost")
    )
    response = fetched(guarded, media_host.url(f"/?to={quote(target, safe='/:')}"))
    assert error_of(response)["code"] == "media_not_allowed"
    assert len(media_host.paths) == asked + 1
    assert MediaHost.SECRET not in json.dumps(response.json())


def test_c30_host_that_never_answers_is_given_up(guarded: ServerProcess, media_host: MediaHost) -> None:
    assert error_of(fetched(guarded, media_host.url("/never")))["code"] == "media_fetch_failed"


def test_c59_sound_of_a_video_is_heard_where_it_is_asked_for(family: OmniFamily, curl: Curl) -> None:
    samples, rate = soundfile.read(io.BytesIO(media("speech_hello.wav")), dtype="float32", always_2d=True)
    url = data_url(record("mp4", "aac", samples.T, rate, has_video=True), "video/mp4")
    body = written([{"type": "video_url", "video_url": {"url": url}}], **SHORT)
    silent, heard = (
        completion_of(curl.post(URL, body | {"mm_processor_kwargs": {"use_audio_in_video": is_heard}}))
        for is_heard in (False, True)
    )
    counts = [answer["usage"]["prompt_tokens_details"] for answer in (silent, heard)]
    assert counts[0]["audio_tokens"] == 0
    assert counts[1]["audio_tokens"] >= family.speech_tokens[0]
    assert counts[0]["video_tokens"] == counts[1]["video_tokens"] > 0
