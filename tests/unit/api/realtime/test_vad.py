"""The detector of speech, with the real network and real audio."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from omni_server.api.realtime.audio_format import decode_g711, encode_g711
from omni_server.api.realtime.input_buffer import InputBuffer, Started, Stopped
from omni_server.api.realtime.session_config import G711Format, PcmFormat, ServerVad
from omni_server.api.realtime.vad import FRAME_SAMPLES, SileroModel
from omni_server.audio.filters import Resampler
from tests.unit.api.clients import media

Samples = npt.NDArray[np.float32]
ROOT = Path(__file__).parents[4]
RECORDINGS = ("speech_hello.wav", "speech_count.wav", "speech_weather.wav")


def recording(name: str) -> Samples:
    """At 16 kHz."""
    samples, rate = soundfile.read(io.BytesIO(media(name)), dtype="float32")
    assert rate == 16_000
    return np.asarray(samples, dtype=np.float32)


def silence(seconds: float) -> Samples:
    return np.zeros(int(16_000 * seconds), dtype=np.float32)


def noise(seconds: float, level: float) -> Samples:
    return np.random.default_rng(0).normal(0, level, int(16_000 * seconds)).astype(np.float32)


def hum(seconds: float, hz: float) -> Samples:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(int(16_000 * seconds)) / 16_000)).astype(np.float32)


def probabilities(samples: Samples) -> npt.NDArray[np.float64]:
    model = SileroModel()
    frames = samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES].reshape(-1, FRAME_SAMPLES)
    return np.array([model.probability(frame) for frame in frames])


@pytest.mark.parametrize("name", RECORDINGS)
def test_speech_is_speech_and_the_silence_around_it_is_none(name: str) -> None:
    found = probabilities(np.concatenate([silence(1), recording(name), silence(1)]))
    frames_per_s = 16_000 // FRAME_SAMPLES
    assert found[:frames_per_s].max() < 0.1
    assert found[1 - frames_per_s :].max() < 0.1
    assert (found[frames_per_s:-frames_per_s] > 0.5).mean() > 0.6


@pytest.mark.parametrize("sound", [noise(3, 0.05), noise(3, 0.005), hum(3, 50), hum(3, 440)])
def test_noise_is_no_speech(sound: Samples) -> None:
    assert probabilities(sound).max() < 0.35


def test_speech_is_found_in_noise_and_when_it_is_quiet() -> None:
    speech = recording("speech_weather.wav")
    assert (probabilities(speech + noise(3, 0.01)[: len(speech)]) > 0.5).mean() > 0.6
    assert (probabilities(0.1 * speech) > 0.5).mean() > 0.6


def test_streams_do_not_disturb_each_other() -> None:
    speech = recording("speech_hello.wav")
    frames = speech[: len(speech) // FRAME_SAMPLES * FRAME_SAMPLES].reshape(-1, FRAME_SAMPLES)
    alone = probabilities(speech)
    model, other = SileroModel(), SileroModel()
    beside: list[float] = []
    for frame in frames:
        beside.append(model.probability(frame))
        other.probability(np.zeros(FRAME_SAMPLES, dtype=np.float32))
    assert np.array_equal(alone, beside)


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("is_telephone", [False, True])
def test_a_recording_between_silences_is_one_turn(name: str, is_telephone: bool) -> None:
    speech = recording(name)
    whole = np.concatenate([silence(1.5), speech, silence(1.5)])
    rate = 8_000 if is_telephone else 24_000
    pcm = np.rint(Resampler(16_000, rate).push(whole) * 32767).clip(-32768, 32767).astype(np.int16)
    if is_telephone:
        pcm = decode_g711(encode_g711(pcm, "ULAW"), "ULAW")
    buffer = InputBuffer(SileroModel, 300)
    buffer.configure(G711Format(type="audio/pcmu") if is_telephone else PcmFormat(), ServerVad())
    turns: list[Started | Stopped] = []
    for begin in range(0, len(pcm), rate // 50):
        turns += buffer.append(pcm[begin : begin + rate // 50])
    started, stopped = turns
    assert isinstance(started, Started)
    assert isinstance(stopped, Stopped)
    # The recordings begin at once and end with up to half a second of silence.
    assert 1200 <= started.audio_start_ms <= 1200 + 250
    end_ms = 1500 + 1000 * len(speech) / 16_000
    assert end_ms - 100 <= stopped.audio_end_ms <= end_ms + 600
    length_ms = 1000 * len(stopped.samples) / rate
    assert abs(length_ms - (stopped.audio_end_ms - started.audio_start_ms)) < 2


def test_the_detector_needs_no_torch() -> None:
    code = (
        "import sys; from omni_server.api.realtime.vad import SileroModel; "
        "SileroModel(); print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "False"


def test_onnx_runtime_reports_nothing_about_its_use(tmp_path: Path) -> None:
    """It would begin with an identifier in the home folder."""
    code = "from omni_server.api.realtime.vad import SileroModel; SileroModel()"
    # No more than this: it is silent by itself where variables tell of a CI system.
    environment = {
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)
    assert not list(tmp_path.rglob("*"))
