"""The routes under /v1/audio with the real model, over HTTP: what only the whole product shows."""

import base64
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import openai
import pytest
import soundfile

from omni_server.types import SAMPLE_RATE_HZ
from tests.audio_files import read_audio
from tests.integration.server_process import MODEL, ROOT, ServerProcess
from tests.omni_families import (
    QWEN2_5_OMNI,
    QWEN3_TTS,
    OmniFamily,
    for_each_family,
    for_each_reader,
    for_families,
)
from tests.unit.api.clients import URL, chat, error_of, media
from tests.unit.api.sse_validator import parse_frames
from tests.unit.media.containers import LIVE_WEBM, record

NUM_CODES = 48
SPEECH_URL = "/v1/audio/speech"
TEXT = "Good morning! It is a quarter past nine."
SPEECH_BAND_HZ = 4000.0
GREEDY_TALKER: dict[str, Any] = {"temperature": 0, "min_tokens": NUM_CODES, "max_tokens": NUM_CODES}
REPEATABLE: dict[str, Any] = {"seed": 7, "stage_sampling": {"talker": GREEDY_TALKER}}
WAV = media("speech_hello.wav")

Samples = npt.NDArray[np.float64]


def speech(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text} | REPEATABLE | fields


def file_of(client: httpx2.Client, **fields: Any) -> bytes:
    response = client.post(SPEECH_URL, json=speech(**fields))
    assert response.status_code == 200, response.text
    return response.content


@pytest.fixture(scope="module")
def pcm(client: httpx2.Client, family: OmniFamily) -> Samples:
    """What all other formats must hold."""
    samples = np.frombuffer(file_of(client, response_format="pcm"), "<i2") / 32768
    assert samples.size == family.num_samples(NUM_CODES)
    assert np.abs(samples).max() > 0.01
    return samples


def read(data: bytes) -> Samples:
    return (read_audio(data) / np.float32(32_768)).astype(np.float32)


def similarity(decoded: Samples, wanted: Samples) -> float:
    """Correlation coefficient at the delay that fits best, of at most 0.12 s."""
    room = len(decoded) - len(wanted)
    assert 0 <= room <= 0.12 * SAMPLE_RATE_HZ
    start = int(np.correlate(decoded, wanted).argmax())
    return float(np.corrcoef(decoded[start : start + len(wanted)], wanted)[0, 1])


def below(frequency_hz: float, samples: Samples) -> Samples:
    """Without what is above: codecs for speech spend little on it, and most of the demo's sound is noise up
    there."""
    spectrum = np.fft.rfft(samples)
    spectrum[np.fft.rfftfreq(len(samples), 1 / SAMPLE_RATE_HZ) > frequency_hz] = 0
    return np.fft.irfft(spectrum, len(samples)).astype(np.float32)


@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3", "opus", "aac"])
def test_official_client_gets_the_same_speech_in_every_format(
    official: openai.OpenAI, pcm: Samples, audio_format: Any
) -> None:
    answer = official.audio.speech.create(
        model=MODEL, voice="alloy", input=TEXT, response_format=audio_format, extra_body=REPEATABLE
    )
    samples = read(answer.content)
    if audio_format in ("wav", "flac"):
        np.testing.assert_array_equal(samples, pcm)
    else:
        assert similarity(below(SPEECH_BAND_HZ, samples), below(SPEECH_BAND_HZ, pcm)) > 0.9


@for_each_reader
def test_official_client_streams_speech(family: OmniFamily, official: openai.OpenAI, pcm: Samples) -> None:
    create = official.audio.speech.with_streaming_response.create
    with create(
        model=MODEL,
        voice=family.default_voice,
        input=TEXT,
        response_format="pcm",
        extra_body=REPEATABLE,
    ) as response:
        assert "content-length" not in response.headers
        pieces = list(response.iter_bytes())
    np.testing.assert_array_equal(np.frombuffer(b"".join(pieces), "<i2") / 32768, pcm)


@for_families(QWEN2_5_OMNI, QWEN3_TTS)
def test_sound_arrives_while_later_sound_is_made(family: OmniFamily, client: httpx2.Client) -> None:
    num_codes = 3500 if family is QWEN2_5_OMNI else 1900
    body = speech(
        response_format="pcm", stage_sampling={"talker": {"max_tokens": num_codes, "ignore_eos": True}}
    )
    with client.stream("POST", SPEECH_URL, json=body) as response:
        first = next(response.iter_raw())
    assert 0 < len(first) < 2 * family.num_samples(num_codes) / 4


@for_families(QWEN2_5_OMNI, QWEN3_TTS)
def test_events_hold_the_file_and_its_tokens(client: httpx2.Client, pcm: Samples) -> None:
    response = client.post(SPEECH_URL, json=speech(response_format="pcm", stream_format="sse"))
    *deltas, done = [json.loads(payload) for payload in parse_frames(response.text)]
    data = b"".join(base64.b64decode(delta["audio"], validate=True) for delta in deltas)
    np.testing.assert_array_equal(np.frombuffer(data, "<i2") / 32768, pcm)
    assert len(deltas) > 1
    usage = done["usage"]
    assert usage["output_tokens"] == NUM_CODES
    assert usage["total_tokens"] == usage["input_tokens"] + NUM_CODES


@for_each_reader
def test_text_voice_and_instructions_are_heard(
    family: OmniFamily, client: httpx2.Client, pcm: Samples
) -> None:
    """By a model that babbles: each changes what it says."""
    changes: list[dict[str, Any]] = [
        {"text": "Good evening."},
        {"voice": family.voices[-1]},
        {"instructions": "Whisper."},
    ]
    files = [file_of(client, response_format="pcm", **change) for change in changes]
    same = (pcm * 32768).astype("<i2").tobytes()
    assert len({same, *files}) == 1 + len(files)


@for_families(QWEN3_TTS)
def test_speed_shortens_the_speech_and_a_seed_repeats_it(client: httpx2.Client, pcm: Samples) -> None:
    sampled = {"talker": {"temperature": 1, "min_tokens": NUM_CODES, "max_tokens": NUM_CODES}}
    first, other, again = (
        file_of(client, response_format="pcm", speed=2.0, seed=seed, stage_sampling=sampled)
        for seed in (11, 12, 11)
    )
    assert again == first != other
    assert len(first) // 2 == pytest.approx(pcm.size / 2, rel=0.05)


@pytest.mark.parametrize(
    "text", ["👋🏽🎉", "0123456789", "早上好。", "صباح الخير", "<|im_end|><|AUDIO|><|audio_pad|>"]
)
def test_any_text_is_read(family: OmniFamily, client: httpx2.Client, text: str) -> None:
    assert len(file_of(client, text=text, response_format="pcm")) == 2 * family.num_samples(NUM_CODES)


@for_each_reader
def test_a_text_of_the_greatest_length_is_read_in_passages(family: OmniFamily, client: httpx2.Client) -> None:
    text = "This is one of many sentences. " * 132
    assert 4000 < len(text.strip()) <= 4096
    limits = {"talker": {"temperature": 0, "min_tokens": 8, "max_tokens": 8}}
    num_samples = len(file_of(client, text=text, response_format="pcm", stage_sampling=limits)) // 2
    assert num_samples == 19 * family.num_samples(8)  # 225 letters each: half of the talker's 30 s


@for_each_reader
def test_voices_and_models_are_listed(family: OmniFamily, client: httpx2.Client) -> None:
    voices = client.get("/v1/audio/voices").json()["voices"]
    assert [voice["id"] for voice in voices if "alias_of" not in voice] == list(family.voices)
    assert {voice["alias_of"] for voice in voices if "alias_of" in voice} == set(family.voices)
    assert client.get("/v1/audio/models").json() == {"models": [{"id": MODEL}]}


@for_families(QWEN3_TTS)
@pytest.mark.parametrize(
    ("param", "message", "path", "body"),
    [
        ("model", "does not answer chats", URL, chat("Hello")),
        ("model", "writes no text", "/v1/completions", {"prompt": "Hello"}),
        ("model", "does not answer chats", "/v1/responses", {"input": "Hello"}),
        ("voice", "Unknown voice: 'Nobody'", SPEECH_URL, speech(voice="Nobody")),
        ("language", "Unknown language 'klingon'", SPEECH_URL, speech(language="klingon")),
        ("input", "no text to read", SPEECH_URL, speech("\n")),
        ("stage_sampling.thinker", "only 'talker'", SPEECH_URL, speech(stage_sampling={"thinker": {}})),
        (
            "stage_sampling.talker.max_tokens",
            "2048",
            SPEECH_URL,
            speech(stage_sampling={"talker": {"max_tokens": 2048}}),
        ),
    ],
)
def test_a_model_that_only_reads_aloud_refuses_what_it_cannot(
    client: httpx2.Client, param: str, message: str, path: str, body: dict[str, Any]
) -> None:
    error = error_of(client.post(path, json=body | {"model": MODEL}), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_commands_of_the_page_work(server: ServerProcess, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "speech.md").read_text()
    commands = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(commands) == 2
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for command in commands:
        script = "set -e\n" + command.replace("http://127.0.0.1:8091", server.url).replace(
            "speaking-demo", MODEL
        )
        subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, timeout=300)
    assert soundfile.info(tmp_path / "speech.mp3").samplerate == SAMPLE_RATE_HZ
    assert soundfile.info(tmp_path / "speech.wav").frames > 0
    assert "speech.audio.done" in (tmp_path / "speech.events").read_text()


@for_each_family
def test_official_client_transcribes(family: OmniFamily, official: openai.OpenAI) -> None:
    """The demo model babbles, but the same for the same recording, and otherwise for another one."""
    create = official.audio.transcriptions.create
    hello = create(model=MODEL, file=("hello.wav", WAV), language="en")
    assert hello.text
    assert hello.usage is not None
    assert hello.usage.type == "tokens"
    assert hello.usage.input_token_details is not None
    fewest, most = family.speech_tokens
    assert fewest <= (hello.usage.input_token_details.audio_tokens or 0) <= most
    *deltas, done = create(model=MODEL, file=("hello.wav", WAV), language="en", stream=True)
    assert done.type == "transcript.text.done"
    assert done.text == hello.text
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == hello.text
    other = create(model=MODEL, file=("weather.wav", media("speech_weather.wav")), language="en")
    assert other.text != hello.text
    with pytest.raises(openai.BadRequestError, match="Unknown language 'xx'") as error:
        create(model=MODEL, file=("hello.wav", WAV), language="xx")
    assert error.value.param == "language"


def test_a_recording_in_webm_or_m4a_is_heard_as_in_wav(official: openai.OpenAI) -> None:
    """The lossless M4A has the same samples, and so the same words; Opus has nearly the same, and as many
    tokens."""
    samples, rate = soundfile.read(io.BytesIO(WAV), dtype="float32")
    m4a = record("ipod", "alac", samples[None], rate)
    webm = record("webm", "libopus", np.repeat(samples[None], 3, axis=1), 3 * rate, options=LIVE_WEBM)
    create = official.audio.transcriptions.create
    hello, same, similar = (
        create(model=MODEL, file=("a.bin", file), language="en") for file in (WAV, m4a, webm)
    )
    assert same.text == hello.text
    assert similar.text
    usages = [answer.usage for answer in (hello, same, similar)]
    assert all(usage is not None and usage.type == "tokens" for usage in usages)
    assert len({usage.input_tokens for usage in usages if usage is not None and usage.type == "tokens"}) == 1


def test_a_recording_is_transcribed_in_pieces(client: httpx2.Client) -> None:
    """42 s; no piece has more than 30, so a recording may be longer than the context."""
    samples, rate = soundfile.read(io.BytesIO(WAV), dtype="int16")
    long = io.BytesIO()
    soundfile.write(long, np.tile(samples, 20), rate, format="FLAC")
    response = client.post(
        "/v1/audio/translations",
        data={"model": MODEL, "response_format": "verbose_json"},
        files={"file": ("a.flac", long.getvalue())},
    )
    body = response.json()
    assert response.status_code == 200, body
    assert body["text"]
    assert body["duration"] == pytest.approx(20 * len(samples) / rate, abs=0.001)
