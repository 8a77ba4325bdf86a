"""Rows S01 to S20: streamed answers of `POST /v1/chat/completions`."""

import base64
import io

import httpx2
import pytest
import soundfile

from tests.audio_files import read_audio
from tests.integration.checklist.curl import Curl
from tests.integration.checklist.test_chat import SHORT
from tests.integration.test_server import answer_to, spoken, text_of, written
from tests.unit.api.clients import URL
from tests.unit.api.sse_validator import StreamedAnswer, read_stream


@pytest.fixture(scope="module")
def text(curl: Curl) -> tuple[httpx2.Response, StreamedAnswer]:
    """S01 with curl; `read_stream` checks the frames, that there is one role, one finish and no usage."""
    response = curl.post(URL, written(stream=True), "--no-buffer", "--header", "Accept-Encoding: gzip, br")
    assert response.status_code == 200, response.text
    return response, read_stream(response.text)


def test_s01_frames_of_a_text(text: tuple[httpx2.Response, StreamedAnswer], client: httpx2.Client) -> None:
    response, streamed = text
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    assert streamed.text == text_of(answer_to(client, written()))


def test_s03_no_usage_unless_asked_for(text: tuple[httpx2.Response, StreamedAnswer]) -> None:
    assert all(chunk.get("usage") is None for chunk in text[1].chunks)


def test_s20_compression_is_offered_and_not_taken(text: tuple[httpx2.Response, StreamedAnswer]) -> None:
    assert "content-encoding" not in text[0].headers


def test_s08_streamed_wav_has_one_header_and_is_read_as_a_file(curl: Curl, client: httpx2.Client) -> None:
    body = spoken(audio_format="wav", **SHORT)
    streamed = read_stream(curl.post(URL, body | {"stream": True}, "--no-buffer").text)
    assert streamed.data.count(b"RIFF") == 1
    samples, rate = soundfile.read(io.BytesIO(streamed.data), dtype="int16")
    assert rate == 24_000
    whole = base64.b64decode(answer_to(client, body)["choices"][0]["message"]["audio"]["data"])
    assert samples.tobytes() == whole[44:] != b""


def test_s09_streamed_flac_is_the_whole_file_in_pieces(curl: Curl, client: httpx2.Client) -> None:
    body = spoken(audio_format="flac", **SHORT)
    streamed = read_stream(curl.post(URL, body | {"stream": True}, "--no-buffer").text)
    whole = base64.b64decode(answer_to(client, body)["choices"][0]["message"]["audio"]["data"])
    assert read_audio(streamed.data).tobytes() == read_audio(whole).tobytes() != b""
