"""Rows S01 to S20: streamed answers of `POST /v1/chat/completions`."""

import base64
import io
import json
from contextlib import ExitStack
from typing import Any

import httpx2
import openai
import pytest
import soundfile

from tests.audio_files import read_audio
from tests.integration.checklist.curl import Curl
from tests.integration.checklist.test_chat import SHORT
from tests.integration.server_process import ServerProcess
from tests.integration.test_server import ENDLESS, answer_to, arguments, spoken, text_of, written
from tests.integration.test_server_structure import LONG, TRIP, calls_of
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


def test_s02_role_is_in_the_first_chunk_only(text: tuple[httpx2.Response, StreamedAnswer]) -> None:
    roles = ["role" in chunk["choices"][0]["delta"] for chunk in text[1].chunks]
    assert roles == [True] + [False] * (len(roles) - 1)


def test_s03_no_usage_unless_asked_for(text: tuple[httpx2.Response, StreamedAnswer]) -> None:
    assert all(chunk.get("usage") is None for chunk in text[1].chunks)


def test_s15_one_finish(text: tuple[httpx2.Response, StreamedAnswer]) -> None:
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in text[1].chunks]
    assert [reason for reason in reasons if reason is not None] == [text[1].finish_reason]


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


def test_s10_first_frame_comes_while_the_request_waits_for_others(server: ServerProcess) -> None:
    """Eight are computed at a time, and each has 3500 tokens before it. The last ones begin nevertheless."""
    body = written(**ENDLESS, stream=True)
    with server.client() as client, ExitStack() as streams:
        for _ in range(12):
            response = streams.enter_context(client.stream("POST", URL, json=body))
            frame = next(line for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(frame.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    server.wait_until_idle()


@pytest.mark.parametrize("make", [written, spoken], ids=["S12 in text", "S13 by voice"])
def test_streamed_call(official: openai.OpenAI, client: httpx2.Client, make: Any) -> None:
    body = make(**LONG, tools=[TRIP], tool_choice="required", parallel_tool_calls=False, seed=1)
    chunks = list(official.chat.completions.create(**arguments(body), stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    assert [bool(piece.id) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.function.name for piece in pieces if piece.function and piece.function.name] == [
        "plan_trip"
    ]
    joined = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert [("plan_trip", json.loads(joined))] == calls_of(answer_to(client, body))
    assert [choice.finish_reason for choice in chunks[-1].choices] == ["tool_calls"]
    assert not any(delta.content or "audio" in delta.to_dict() for delta in deltas)
