"""What the server speaks, it hears: its files, sent back as they are."""

import base64
import io
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr

from omni_server.audio.formats import AUDIO_FORMATS, AudioFormat
from omni_server.types import AudioDelta, AudioPart, Transcribe
from tests.unit.api.clients import SPEECH, app_of, base64_of, chat, http_client, media
from tests.unit.api.fake_generator import FakeGenerator, finished

RATE_HZ = 16_000
PIECE = 2_001
LOSSLESS = ("wav", "flac", "pcm16")

Samples = npt.NDArray[np.float32]

SAID: Samples = soundfile.read(io.BytesIO(media("speech_hello.wav")), dtype="float32")[0]
"""At 16 kHz; a model's waveform is at 24 kHz."""


async def _post(generator: FakeGenerator, url: str, **request: Any) -> httpx2.Response:
    async with http_client(app_of(generator)) as client:
        response = await client.post(url, **request)
    assert response.status_code == 200, response.text
    return response


async def _spoken(format: AudioFormat, *, is_streamed: bool) -> bytes:
    samples = soxr.resample(SAID, RATE_HZ, 24_000)
    pieces = [AudioDelta(at, samples[at : at + PIECE]) for at in range(0, len(samples), PIECE)]
    generator = FakeGenerator(script=[*pieces, finished()])
    if is_streamed:
        body = {"model": "omni", "input": "Hello.", "voice": "Ethan", "response_format": format} | {
            "stream": True
        }
        return (await _post(generator, "/v1/audio/speech", json=body)).content
    body = chat(**SPEECH | {"audio": {"voice": "Ethan", "format": format}})
    answer = await _post(generator, "/v1/chat/completions", json=body)
    return base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])


async def _transcribed(data: bytes) -> Samples:
    generator = FakeGenerator()
    await _post(generator, "/v1/audio/transcriptions", data={"model": "omni"}, files={"file": ("a", data)})
    (task,) = generator.tasks
    assert isinstance(task, Transcribe)
    return task.audio.samples


async def _heard_in_a_chat(data: bytes, format: AudioFormat) -> Samples:
    generator = FakeGenerator()
    audio = {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": format}}
    await _post(generator, "/v1/chat/completions", json=chat([audio]))
    (part,) = generator.last_request.messages[0].content
    assert isinstance(part, AudioPart)
    return part.samples


def _check(heard: Samples, format: AudioFormat) -> None:
    """Lossy encoders begin with up to 0.05 s of silence and fill their last frame, which the header of a
    whole file may tell."""
    surplus = len(heard) - len(SAID)
    if format in LOSSLESS:
        assert surplus == 0
        np.testing.assert_allclose(heard, SAID, atol=1e-2)
        return
    assert 0 <= surplus <= 0.12 * RATE_HZ
    delays = range(surplus + 1)
    similarities = [np.corrcoef(heard[delay : delay + len(SAID)], SAID)[0, 1] for delay in delays]
    assert max(similarities) > 0.98


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("format", AUDIO_FORMATS)
async def test_every_format_that_is_spoken_is_heard(format: AudioFormat, is_streamed: bool) -> None:
    data = await _spoken(format, is_streamed=is_streamed)
    heard = await _heard_in_a_chat(data, format)
    _check(heard, format)
    if format != "pcm16":  # which a form cannot declare
        np.testing.assert_array_equal(await _transcribed(data), heard)
