"""Rows T01 to T17: `POST /v1/audio/speech` and the lists beside it."""

import io
from typing import Any

import av
import httpx2
import numpy as np
import pytest

from tests.audio_files import read_audio
from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import NAME_WITH_SLASH
from tests.integration.server_process import MODEL, ServerProcess
from tests.integration.test_server_audio import SPEECH_URL, TEXT
from tests.omni_families import OmniFamily
from tests.unit.api.clients import error_of

NUM_CODES = 40
MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def speech(**fields: Any) -> dict[str, Any]:
    talker = {"temperature": 0, "min_tokens": NUM_CODES, "max_tokens": NUM_CODES}
    body = {
        "model": MODEL,
        "voice": "Ethan",
        "input": TEXT,
        "seed": 7,
        "stage_sampling": {"talker": talker},
    } | fields
    return {name: value for name, value in body.items() if value is not ...}


def pcm_of(curl: Curl, family: OmniFamily, **fields: Any) -> bytes:
    response = curl.post(SPEECH_URL, speech(response_format="pcm", **fields))
    assert response.status_code == 200, response.text
    assert len(response.content) == 2 * family.num_samples(NUM_CODES)
    return response.content


def seconds(family: OmniFamily) -> float:
    """Of sound in `NUM_CODES` codec tokens."""
    return family.num_samples(NUM_CODES) / 24_000


@pytest.fixture(scope="module")
def mp3(curl: Curl) -> bytes:
    """Of a request with the required fields and the voice, apart from how long and how it is sampled."""
    response = curl.post(SPEECH_URL, speech())
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "audio/mpeg"
    return response.content


def decoded(file: bytes) -> float:
    """Seconds of sound, by FFmpeg's decoders."""
    with av.open(io.BytesIO(file), "r") as container:
        frames = list(container.decode(audio=0))
    return sum(frame.samples / frame.sample_rate for frame in frames)


def test_t01_mp3_is_the_default(family: OmniFamily, mp3: bytes) -> None:
    assert mp3[:3] == b"ID3" or (mp3[0] == 0xFF and mp3[1] >= 0xE0)
    assert decoded(mp3) == pytest.approx(seconds(family), abs=0.15)


@pytest.mark.parametrize("audio_format", MEDIA_TYPES, ids=[f"T02 {name}" for name in MEDIA_TYPES])
def test_format_has_its_media_type_and_can_be_read(family: OmniFamily, curl: Curl, audio_format: str) -> None:
    response = curl.post(SPEECH_URL, speech(response_format=audio_format))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].partition(";")[0] == MEDIA_TYPES[audio_format]
    if audio_format == "pcm":
        assert len(response.content) == 2 * family.num_samples(NUM_CODES)
        return
    samples = read_audio(response.content) / 32_768
    assert len(samples) / 24_000 == pytest.approx(seconds(family), abs=0.15)
    assert np.abs(samples).max() > 0.01


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "T06 stream_format": ({"stream_format": "x"}, "stream_format"),
    "T06 response_format": ({"response_format": "ogg"}, "response_format"),
    "T06 speed too low": ({"speed": 0.1}, "speed"),
    "T06 speed too high": ({"speed": 5}, "speed"),
    "T08 empty": ({"input": ""}, "input"),
    "T08 whitespace": ({"input": " \n\t"}, "input"),
    "T08 too long": ({"input": "a" * 4097}, "input"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_bad_field_is_refused_with_its_name(curl: Curl, row: str) -> None:
    fields, param = REFUSED[row]
    assert error_of(curl.post(SPEECH_URL, speech(**fields)))["param"] == param


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_t07_speech_is_as_fast_as_asked_for(family: OmniFamily, curl: Curl, speed: float) -> None:
    response = curl.post(SPEECH_URL, speech(response_format="pcm", speed=speed))
    assert response.status_code == 200, response.text
    assert len(response.content) / 48_000 == pytest.approx(seconds(family) / speed, abs=0.1)


def test_t09_voice_may_be_left_out(family: OmniFamily, curl: Curl) -> None:
    assert pcm_of(curl, family, voice=...) == pcm_of(curl, family, voice=family.default_voice)


def test_t10_unknown_voice_is_refused_with_the_known_ones(family: OmniFamily, curl: Curl) -> None:
    error = error_of(curl.post(SPEECH_URL, speech(voice="nobody")))
    assert error["param"] == "voice"
    assert ", ".join(family.voices) in error["message"]


def test_t11_instructions_are_heard_and_none_are_none(family: OmniFamily, curl: Curl) -> None:
    plain, none, whisper = (pcm_of(curl, family, instructions=text) for text in (..., "None", "Whisper."))
    assert plain == none != whisper


def test_t12_unknown_model(curl: Curl) -> None:
    assert error_of(curl.post(SPEECH_URL, speech(model="tts-1")), 404)["code"] == "model_not_found"


def test_t13_any_accept_header(curl: Curl, mp3: bytes) -> None:
    response = curl.post(SPEECH_URL, speech(), "--header", "Accept: application/octet-stream")
    assert (response.status_code, response.content) == (200, mp3)


def test_t15_lists_need_no_key(guarded: ServerProcess) -> None:
    voices, models = (Curl(guarded.url).get(f"/v1/audio/{name}") for name in ("voices", "models"))
    assert (voices.status_code, models.status_code) == (200, 200)
    assert all(voice.keys() >= {"id", "name"} for voice in voices.json()["voices"])
    assert models.json() == {"models": [{"id": MODEL}, {"id": NAME_WITH_SLASH}]}
    error_of(httpx2.get(f"{guarded.url}/v1/models"), 401)


def test_t17_two_mp3_in_one_file_are_both_played(mp3: bytes) -> None:
    assert decoded(mp3 + mp3) == pytest.approx(2 * decoded(mp3), abs=0.1)
