"""Rows C01 to C61 that need no media: whole answers of `POST /v1/chat/completions`."""

import base64
import io
import time
from typing import Any

import httpx2
import openai
import pytest
import soundfile

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import KEY, OTHER_KEY
from tests.integration.server_process import ServerProcess
from tests.integration.test_server import (
    answer_to,
    arguments,
    message_of,
    num_tokens,
    sound_of,
    spoken,
    text_of,
    written,
)
from tests.unit.api.clients import URL, error_of
from tests.unit.api.schema import check_completion

SHORT: dict[str, Any] = {"max_tokens": 8, "stage_sampling": {"talker": {"temperature": 0, "max_tokens": 24}}}


def completion_of(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    completion: dict[str, Any] = response.json()
    check_completion(completion)
    return completion


@pytest.fixture(scope="module")
def wav(client: httpx2.Client) -> dict[str, Any]:
    return answer_to(client, spoken(audio_format="wav"))


def test_c02_wav_has_true_sizes_and_expires_later(wav: dict[str, Any]) -> None:
    audio = message_of(wav)["audio"]
    assert audio.keys() == {"id", "data", "expires_at", "transcript"}
    assert audio["expires_at"] > time.time()
    data = sound_of(wav)
    assert (data[:4], data[8:16], data[36:40]) == (b"RIFF", b"WAVEfmt ", b"data")
    assert [int.from_bytes(data[at : at + 4], "little") for at in (4, 40)] == [len(data) - 8, len(data) - 44]
    info = soundfile.info(io.BytesIO(data))
    assert (info.samplerate, info.channels, info.subtype) == (24_000, 1, "PCM_16")
    assert info.duration > 0.2


def test_c13_modalities_of_audio_alone(official: openai.OpenAI, wav: dict[str, Any]) -> None:
    completion = official.chat.completions.create(
        **arguments(spoken(audio_format="wav", modalities=["audio"]))
    )
    message = completion.choices[0].message
    assert message.content is None
    assert message.audio is not None
    assert (message.audio.transcript, base64.b64decode(message.audio.data)) == (text_of(wav), sound_of(wav))


def test_c39_max_completion_tokens_before_max_tokens(curl: Curl) -> None:
    completion = completion_of(curl.post(URL, written(max_tokens=50, max_completion_tokens=1)))
    assert num_tokens(completion) == (1, 0)


def test_c57_unknown_audio_id(curl: Curl) -> None:
    body = written()
    body["messages"] += [
        {"role": "assistant", "audio": {"id": "audio_none"}},
        {"role": "user", "content": "Again."},
    ]
    error = error_of(curl.post(URL, body))
    assert (error["param"], error["code"]) == ("messages[1].audio.id", "audio_not_found")


def test_c58_audio_id_of_another_key(guarded: ServerProcess) -> None:
    first, other = (Curl(guarded.url, key) for key in (KEY, OTHER_KEY))
    audio_id = message_of(completion_of(first.post(URL, spoken(**SHORT))))["audio"]["id"]
    body = written(**SHORT)
    body["messages"] += [
        {"role": "assistant", "audio": {"id": audio_id}},
        {"role": "user", "content": "Again."},
    ]
    error = error_of(other.post(URL, body))
    assert (error["param"], error["code"]) == ("messages[1].audio.id", "audio_not_found")
    assert completion_of(first.post(URL, body))
