"""Voices that Qwen3-TTS makes of recordings equal the reference's, alone and beside others."""

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from fastapi import FastAPI

from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import MediaLoader
from omni_server.api.speech import speech_router
from omni_server.api.state import ServerState
from omni_server.api.voice_store import StoredVoice
from omni_server.api.voices_router import voices_router
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.offline import OmniOutput, collect
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioPart,
    ClonedVoice,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
)
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni
from tests.integration.parity import QWEN3_WAVEFORM_SNR_DB
from tests.integration.server_process import wait_until
from tests.reference.qwen3_tts import Floats, Qwen3TTSReference
from tests.unit.api.clients import http_client

CONFIG = load_stage_config(find_shipped_config("qwen3_tts.demo-cpu"))
CHECKPOINT = "tiny.base"
SECONDS = (0.5, 3.0, 5.555, 12.4)
NUM_VOICES, NUM_REQUESTS = 20, 100


def recording(seed: int, seconds: float) -> Floats:
    """Sounds like a voice: syllables of changing pitch and timbre, and breath."""
    random = np.random.default_rng(seed)
    num_samples = int(seconds * SAMPLE_RATE_HZ)
    t = np.arange(num_samples) / SAMPLE_RATE_HZ
    pitch_hz = random.uniform(90, 250) * (1 + 0.2 * np.sin(2 * np.pi * random.uniform(0.3, 1.5) * t))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE_HZ
    tilt = random.uniform(0.7, 1.6)
    voice = sum(np.sin(k * phase) / k**tilt for k in range(1, 24))
    voice *= 0.2 + np.sin(np.pi * random.uniform(2, 5) * t) ** 2
    sound = voice + random.normal(0, 0.05, num_samples)
    return (0.6 * sound / np.abs(sound).max()).astype(np.float32)


@pytest.fixture(scope="module")
def live(qwen3_tts_checkpoints: Path) -> Iterator[LiveOmni]:
    live = LiveOmni(qwen3_tts_checkpoints / CHECKPOINT, CONFIG)
    yield live
    live.close()


def voice_in(live: LiveOmni, samples: Floats, text: str = "") -> ClonedVoice:
    return live.run(live.omni.clone_voice(AudioPart(samples, SAMPLE_RATE_HZ), text))


def test_vector_and_codes_are_those_that_the_reference_hears(
    live: LiveOmni, qwen3_tts_reference: Qwen3TTSReference
) -> None:
    recordings = [recording(seed, seconds) for seed, seconds in enumerate(SECONDS)]
    heard = qwen3_tts_reference.voices_in(CHECKPOINT, recordings)
    for samples, want in zip(recordings, heard, strict=True):
        voice = voice_in(live, samples, "What is said.")
        np.testing.assert_allclose(np.frombuffer(voice.vector, np.float32), want.vector, atol=1e-4)
        np.testing.assert_array_equal(np.frombuffer(voice.frames, np.int16).reshape(-1, 16), want.codes)
        assert voice_in(live, samples) == ClonedVoice(voice.vector)
    assert len({want.vector.tobytes() for want in heard}) == len(SECONDS)


def test_a_hundred_requests_with_twenty_voices_speak_as_each_alone(live: LiveOmni) -> None:
    """Half of the voices continue their recording. Each is made while the requests wait for it."""
    recordings = [recording(100 + seed, 0.5 + 0.1 * seed) for seed in range(NUM_VOICES)]
    texts = ["How are you?" if number % 2 else "" for number in range(NUM_VOICES)]

    async def spoken(number: int) -> OmniOutput:
        index = number % NUM_VOICES
        voice = await live.omni.clone_voice(AudioPart(recordings[index], SAMPLE_RATE_HZ), texts[index])
        speech = SpeechOutput(text=f"This is what voice {index} says.", clone=voice)
        greedy = SamplingConfig(temperature=0.0, max_tokens=8)
        request = OmniRequest(f"clone-{number}", (), speech, {"talker": greedy})
        return await collect(live.omni, request)

    async def together() -> list[OmniOutput]:
        return await asyncio.gather(*map(spoken, range(NUM_REQUESTS)))

    at_once = live.run(together())
    alone = [live.run(spoken(number)) for number in range(NUM_VOICES)]
    for answer, wanted in zip(at_once, alone * (NUM_REQUESTS // NUM_VOICES), strict=True):
        assert answer.codes == wanted.codes
        assert signal_to_noise_db(wanted.audio, answer.audio) > QWEN3_WAVEFORM_SNR_DB
    assert len({tuple(answer.codes) for answer in alone}) == NUM_VOICES
    assert live.held_rows() == 0


@pytest.mark.parametrize("rate_hz", [16_000, 44_100])
def test_a_file_of_any_rate_is_heard_as_the_reference_resamples_it(live: LiveOmni, rate_hz: int) -> None:
    """Sent over HTTP. The reference resamples with librosa, whose default is this method of soxr."""
    samples = soxr.resample(recording(9, 2.0), SAMPLE_RATE_HZ, rate_hz) * np.float32(0.9)
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV", subtype="FLOAT")
    wanted = voice_in(live, soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ, quality="HQ"), "Hello there.")
    name = f"rate {rate_hz}"

    async def kept() -> StoredVoice | None:
        app = FastAPI()
        state, config = ServerState(live.omni), ApiConfig()
        media = MediaLoader(config)
        app.include_router(voices_router(state, config, media))
        app.include_router(speech_router(state, config, media))
        async with http_client(app) as client:
            fields = {"name": name, "consent": "It is no person.", "ref_text": "Hello there."}
            files = {"audio_sample": ("voice.wav", file.getvalue())}
            (await client.post("/v1/audio/voices", data=fields, files=files)).raise_for_status()
            body = {"model": CHECKPOINT, "input": "Hello.", "voice": name, "response_format": "pcm"}
            response = await client.post("/v1/audio/speech", json=body)
            assert response.status_code == 200
            assert np.frombuffer(response.content, "<i2").any()
        return state.voices.find(name)

    stored = live.run(kept())
    assert stored is not None
    assert stored.clone == wanted


def test_a_recording_is_audible_and_not_too_long(live: LiveOmni) -> None:
    with pytest.raises(InvalidRequestError, match="silent"):
        voice_in(live, np.zeros(SAMPLE_RATE_HZ, np.float32))
    with pytest.raises(InvalidRequestError, match="at most 30 s"):
        voice_in(live, np.tile(recording(0, 1.0), 31))


def test_voices_are_made_again_after_the_encoder_was_killed(live: LiveOmni) -> None:
    samples = recording(7, 1.0)
    before = voice_in(live, recording(8, 1.0), "Hello.")
    os.kill(live.omni.engine_pids()["voice_encoder"], signal.SIGKILL)
    with pytest.raises(OmniError, match="voice_encoder"):
        voice_in(live, samples)
    speech = SpeechOutput(text="The others speak on.", clone=before)
    limit = {"talker": SamplingConfig(temperature=0.0, max_tokens=8)}
    assert live.answer(OmniRequest("beside", (), speech, limit)).audio.size
    wait_until(lambda: live.omni.stage_down() is None, 60)
    assert voice_in(live, samples).vector
