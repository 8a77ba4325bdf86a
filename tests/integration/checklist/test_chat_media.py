"""Rows C15 to C20: sound in chat."""

from typing import Any

import openai
import pytest

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.test_chat import SHORT, completion_of
from tests.integration.test_server import arguments, written
from tests.unit.api.clients import URL, base64_of, error_of, media, tone


def sound(data: bytes | str, audio_format: str = "wav") -> list[dict[str, Any]]:
    text = data if isinstance(data, str) else base64_of(data)
    return [{"type": "input_audio", "input_audio": {"data": text, "format": audio_format}}]


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
