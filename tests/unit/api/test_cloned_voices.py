"""Voices that are made of recordings: sent and kept, or brought by a request for speech."""

import io
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
from fastapi import FastAPI

from omni_server.api.config import ApiConfig
from omni_server.errors import ConfigError, InvalidRequestError, StageDeadError
from omni_server.media.audio import decode_audio
from omni_server.media.limits import MediaLimits
from omni_server.types import SAMPLE_RATE_HZ, ClonedVoice
from tests.unit.api.clients import app_of, data_url, error_of, http_client, media, tone
from tests.unit.api.fake_generator import CLONING_CHAT_MODEL, CLONING_MODEL, MODEL, FakeGenerator

URL = "/v1/audio/voices"
WAV = media("speech_hello.wav")
SAMPLES = decode_audio(WAV, MediaLimits(), rate_hz=SAMPLE_RATE_HZ).samples
VECTOR = SAMPLES[:4].tobytes()
CODES = bytes(32)
FORM = {"name": "Ada", "consent": "Ada, by letter of 2026-11-28"}


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(CLONING_MODEL)


async def send(app: FastAPI, file: bytes | None = WAV, **fields: str) -> httpx2.Response:
    files = {"audio_sample": ("ada.wav", file, "audio/wav")} if file is not None else {"unused": (None, b"")}
    async with http_client(app) as client:
        return await client.post(URL, data=FORM | fields, files=files)


async def speak(app: FastAPI, **fields: Any) -> httpx2.Response:
    async with http_client(app) as client:
        return await client.post("/v1/audio/speech", json={"model": "omni", "input": "Hi."} | fields)


async def names(app: FastAPI) -> list[str]:
    async with http_client(app) as client:
        return [voice["id"] for voice in (await client.get(URL)).json()["voices"]]


def clone_of(generator: FakeGenerator, response: httpx2.Response) -> ClonedVoice | None:
    assert response.status_code == 200, response.text
    assert generator.last_request.speech is not None
    return generator.last_request.speech.clone


# -- voices that are kept


@pytest.mark.parametrize(("text", "codes"), [("", b""), (" Hello there. ", CODES)])
async def test_a_voice_that_was_sent_speaks_until_it_is_deleted(
    generator: FakeGenerator, text: str, codes: bytes
) -> None:
    app = app_of(generator)
    created = await send(app, ref_text=text)
    assert created.status_code == 200, created.text
    assert created.json() == {
        "object": "audio.voice",
        "id": "Ada",
        "name": "Ada",
        "created_at": created.json()["created_at"],
    }
    assert await names(app) == ["Ada"]
    for voice in ("Ada", "ADA", {"id": "ada"}):
        spoken = clone_of(generator, await speak(app, voice=voice))
        assert spoken == ClonedVoice(VECTOR, codes, text.strip())
    as_vector = clone_of(generator, await speak(app, voice="Ada", x_vector_only_mode=True))
    assert as_vector == ClonedVoice(VECTOR)
    assert len(generator.recordings) == 1  # it was encoded once, and not for each request
    async with http_client(app) as client:
        deleted = await client.delete(f"{URL}/ada")
        assert deleted.json() == {"object": "audio.voice.deleted", "id": "Ada", "deleted": True}
        assert error_of(await client.delete(f"{URL}/Ada"), 404)["code"] == "voice_not_found"
    assert error_of(await speak(app, voice="Ada"))["param"] == "voice"


async def test_the_model_hears_the_recording_at_24_khz(generator: FakeGenerator) -> None:
    await send(app_of(generator))
    (recording,) = generator.recordings
    assert recording.sample_rate_hz == SAMPLE_RATE_HZ
    np.testing.assert_array_equal(recording.samples, SAMPLES)


async def test_all_passages_of_a_long_text_have_the_same_voice(generator: FakeGenerator) -> None:
    app = app_of(generator)
    await send(app)
    await speak(app, voice="Ada", input="A sentence of some length. " * 140)
    voices = {request.speech.clone for request in generator.requests if request.speech is not None}
    assert voices == {ClonedVoice(VECTOR)}


async def test_a_folder_keeps_voices_when_the_server_starts_again(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    config = ApiConfig(voices_folder=tmp_path / "voices")
    app = app_of(generator, config)
    for name in ("Ada", "../Bob", "Cay"):
        response = await send(app, name=name, ref_text="Hello.")
        assert (response.status_code == 200) == (name != "../Bob")
    async with http_client(app) as client:
        await client.delete(f"{URL}/Cay")
    (file,) = (tmp_path / "voices").iterdir()
    assert json.loads(file.read_text())["consent"] == FORM["consent"]
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "voices" / "note.json").write_text("{}")  # not the file of a voice
    (tmp_path / "voices" / "copy.json").write_text(file.read_text().replace("Ada", "Dan"))
    again = app_of(generator, config)
    assert await names(again) == ["Ada"]
    assert clone_of(generator, await speak(again, voice="Ada")) == ClonedVoice(VECTOR, CODES, "Hello.")


def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder of voices"):
        app_of(None, ApiConfig(voices_folder=tmp_path / "file"))


@pytest.mark.parametrize(
    "name",
    ["", "../x", ".hidden", "a/b", "a\nb", "x" * 65, "Default", "ada", " Ada ", "A\u200dda", "A\u0308da"],
)
async def test_names_are_new_and_plain(generator: FakeGenerator, name: str) -> None:
    app = app_of(generator)
    for kept in ("Ada", "\u00c4da"):
        await send(app, name=kept)
    assert error_of(await send(app, name=name))["param"] == "name"
    assert await names(app) == ["Ada", "\u00c4da"]


async def test_the_consent_is_required(generator: FakeGenerator) -> None:
    app = app_of(generator)
    for consent in ("", "   "):
        assert error_of(await send(app, consent=consent))["param"] == "consent"
    assert generator.recordings == []


@pytest.mark.parametrize(
    "file", [None, b"", b"not audio", media("shapes.png"), WAV[:40], tone(num_samples=40)]
)
async def test_a_file_that_is_no_recording_is_refused(generator: FakeGenerator, file: bytes | None) -> None:
    assert error_of(await send(app_of(generator), file))["param"] == "audio_sample"


async def test_recordings_are_no_longer_than_the_server_allows(generator: FakeGenerator) -> None:
    app = app_of(generator, ApiConfig(media_limits=MediaLimits(max_audio_seconds=1.0)))
    assert "longer than 1 s" in error_of(await send(app))["message"]
    assert "longer than 1 s" in error_of(await speak(app, ref_audio=data_url(WAV, "audio/wav")))["message"]


async def test_ten_minutes_are_refused(generator: FakeGenerator) -> None:
    """600 s in a file of 100 kB."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(600 * 8000, np.int16), 8000, format="FLAC")
    assert len(file.getvalue()) < 100_000
    assert "longer than 300 s" in error_of(await send(app_of(generator), file.getvalue()))["message"]


async def test_names_of_people_are_not_listed_without_a_key(generator: FakeGenerator) -> None:
    app = app_of(generator, ApiConfig(api_keys=("secret",)))
    headers = {"Authorization": "Bearer secret"}
    async with http_client(app) as client:
        files = {"audio_sample": ("ada.wav", WAV, "audio/wav")}
        assert (await client.post(URL, data=FORM, files=files)).status_code == 401
        await client.post(URL, data=FORM, files=files, headers=headers)
        assert (await client.get(URL)).json() == {"voices": []}
        assert [voice["id"] for voice in (await client.get(URL, headers=headers)).json()["voices"]] == ["Ada"]
        assert (await client.delete(f"{URL}/Ada")).status_code == 401


@pytest.mark.parametrize(
    "fields", [{"response_format": "xyz"}, {"input": " "}, {"model": "other"}, {"instructions": "x" * 5000}]
)
async def test_a_request_is_checked_before_its_recording_is_read(
    generator: FakeGenerator, fields: dict[str, Any]
) -> None:
    response = await speak(app_of(generator), ref_audio=data_url(WAV), **fields)
    assert response.status_code in (400, 404)
    assert generator.recordings == []


async def test_what_the_encoder_refuses_is_told_with_the_field(generator: FakeGenerator) -> None:
    generator.voice_error = InvalidRequestError("the recording is silent")
    app = app_of(generator)
    assert error_of(await send(app))["param"] == "audio_sample"
    assert error_of(await speak(app, ref_audio=data_url(WAV, "audio/wav")))["param"] == "ref_audio"
    generator.voice_error = StageDeadError("voice_encoder", "it was killed")
    assert error_of(await send(app), 503)["param"] is None
    assert await names(app) == []


async def test_models_without_an_encoder_clone_nothing() -> None:
    app = app_of(FakeGenerator(MODEL))
    assert error_of(await send(app))["param"] == "model"
    for field, value in (("ref_audio", data_url(WAV)), ("ref_text", "Hi"), ("speaker_embedding", [0.5])):
        assert error_of(await speak(app, **{field: value}))["param"] == field
    async with http_client(app) as client:
        assert error_of(await client.delete(f"{URL}/Ethan"), 404)["param"] == "name"
        assert (await client.get("/v1/models/omni")).json()["clones_voices"] is False


async def test_the_model_lists_the_voices_that_were_sent(generator: FakeGenerator) -> None:
    app = app_of(generator)
    await send(app)
    async with http_client(app) as client:
        model = (await client.get("/v1/models/omni")).json()
    assert model["clones_voices"] is True
    assert model["voices"] == ["Ada"]


async def test_chats_are_answered_in_a_voice_that_was_sent() -> None:
    generator = FakeGenerator(CLONING_CHAT_MODEL)
    app = app_of(generator)
    await send(app)

    async def chat(voice: object) -> httpx2.Response:
        audio = {"voice": voice, "format": "wav"}
        messages = [{"role": "user", "content": "Hi."}]
        body = {"model": "omni", "messages": messages, "modalities": ["text", "audio"], "audio": audio}
        async with http_client(app) as client:
            return await client.post("/v1/chat/completions", json=body)

    assert clone_of(generator, await chat({"id": "ada"})) == ClonedVoice(VECTOR)
    error = error_of(await chat("alloy"))
    assert error["param"] == "audio.voice"
    assert "/v1/audio/voices" in error["message"]


# -- voices that a request brings


async def test_a_request_brings_its_recording(generator: FakeGenerator) -> None:
    app, url = app_of(generator), data_url(WAV, "audio/wav")
    peers = {"task_type": "Base", "ref_audio": url}  # as vLLM-Omni's clients send it
    assert clone_of(generator, await speak(app, **peers)) == ClonedVoice(VECTOR)
    with_text = peers | {"ref_text": "Hello."}
    assert clone_of(generator, await speak(app, **with_text)) == ClonedVoice(VECTOR, CODES, "Hello.")
    as_vector = await speak(app, **with_text, x_vector_only_mode=True, voice="alloy")
    assert clone_of(generator, as_vector) == ClonedVoice(VECTOR)
    assert await names(app) == []


async def test_a_request_brings_the_vector_itself(generator: FakeGenerator) -> None:
    response = await speak(app_of(generator), speaker_embedding=[0.5, -1, 2e-3])
    assert clone_of(generator, response) == ClonedVoice(np.array([0.5, -1, 2e-3], np.float32).tobytes())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ref_text": "Hello."}, "ref_text"),
        ({"ref_audio": "https://elsewhere.example/a.wav"}, "ref_audio"),
        ({"ref_audio": "file:///etc/passwd"}, "ref_audio"),
        ({"ref_audio": "AAAA"}, "ref_audio"),
        ({"ref_audio": data_url(WAV), "speaker_embedding": [1.0]}, "ref_audio"),
        ({"speaker_embedding": [1.0], "ref_text": "Hello."}, "speaker_embedding"),
        ({"speaker_embedding": ["a"]}, "speaker_embedding[0]"),
        ({"speaker_embedding": [0.0] * 8193}, "speaker_embedding"),
    ],
)
async def test_what_is_no_voice_is_refused(generator: FakeGenerator, fields: Any, param: str) -> None:
    assert error_of(await speak(app_of(generator), **fields))["param"] == param
    assert generator.requests == []
