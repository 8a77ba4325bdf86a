"""Rows T01 to T17: `POST /v1/audio/speech` and the lists beside it."""

import io
from typing import Any

import av
import pytest

from tests.integration.checklist.curl import Curl
from tests.integration.server_process import MODEL
from tests.integration.test_server_audio import SPEECH_URL, TEXT
from tests.omni_families import OmniFamily
from tests.unit.api.clients import error_of

NUM_CODES = 40


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


def test_t10_unknown_voice_is_refused_with_the_known_ones(family: OmniFamily, curl: Curl) -> None:
    error = error_of(curl.post(SPEECH_URL, speech(voice="nobody")))
    assert error["param"] == "voice"
    assert ", ".join(family.voices) in error["message"]


def test_t12_unknown_model(curl: Curl) -> None:
    assert error_of(curl.post(SPEECH_URL, speech(model="tts-1")), 404)["code"] == "model_not_found"


def test_t13_any_accept_header(curl: Curl, mp3: bytes) -> None:
    response = curl.post(SPEECH_URL, speech(), "--header", "Accept: application/octet-stream")
    assert (response.status_code, response.content) == (200, mp3)
