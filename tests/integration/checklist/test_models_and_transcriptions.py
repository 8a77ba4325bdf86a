"""Rows M01 to M09: the list of models, and speech to text."""

import json
from typing import Any

import openai
import pytest

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import KEY, NAME_WITH_SLASH
from tests.integration.server_process import MODEL, ServerProcess
from tests.unit.api.clients import error_of, media
from tests.unit.api.schema import check_model
from tests.unit.api.sse_validator import parse_frames

TRANSCRIBE = "/v1/audio/transcriptions"
WAV = media("speech_hello.wav")
FILE = "file=@-;filename=hello.wav"


def test_m01_list_stays_the_same(official: openai.OpenAI, curl: Curl) -> None:
    first, again = (list(official.models.list()) for _ in range(2))
    assert first == again
    assert isinstance(first[0].created, int)
    listed = curl.get("/v1/models").json()
    assert listed["object"] == "list"
    check_model(listed["data"][0])


def test_m02_name_with_a_slash(guarded: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        listed = {model.id: model for model in client.models.list()}
        assert client.models.retrieve(NAME_WITH_SLASH) == listed[NAME_WITH_SLASH]
    plain = Curl(guarded.url, KEY).get(f"/v1/models/{NAME_WITH_SLASH}")
    assert plain.json()["id"] == NAME_WITH_SLASH


def test_m03_unknown_model(official: openai.OpenAI, curl: Curl) -> None:
    assert error_of(curl.get("/v1/models/no-such-model"), 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        official.models.retrieve("no/such/model")


@pytest.fixture(scope="module")
def transcript(curl: Curl) -> str:
    """M04: what the demo model, which babbles, always writes for this recording."""
    response = curl.form(TRANSCRIBE, f"model={MODEL}", FILE, file=WAV)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    text: str = response.json()["text"]
    return text


def test_m04_json(transcript: str) -> None:
    assert transcript.strip()


def test_m05_text(curl: Curl, transcript: str) -> None:
    response = curl.form(TRANSCRIBE, f"model={MODEL}", FILE, "response_format=text", file=WAV)
    assert response.headers["content-type"].partition(";")[0] == "text/plain"
    assert response.text == transcript + "\n"


def test_m06_stream(curl: Curl, transcript: str) -> None:
    response = curl.form(TRANSCRIBE, f"model={MODEL}", FILE, "stream=true", file=WAV)
    *deltas, done = [json.loads(payload) for payload in parse_frames(response.text)]
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == transcript
    assert (done["type"], done["text"]) == ("transcript.text.done", transcript)


BAD_FORMS: dict[str, tuple[tuple[str, ...], bytes, int, str]] = {
    "M07 no file": ((), b"", 400, "file"),
    "M07 file a string": (("file=hello.wav",), b"", 400, "file"),
    "M07 empty file": ((FILE,), b"", 400, "file"),
    "M07 26 MB": ((FILE,), WAV + bytes(26_000_000), 413, "file"),
    "M08 granularity": ((FILE, "timestamp_granularities[]=word"), WAV, 400, "timestamp_granularities[]"),
}


@pytest.mark.parametrize("row", BAD_FORMS)
def test_bad_form_is_refused(curl: Curl, row: str) -> None:
    fields, file, status, param = BAD_FORMS[row]
    error = error_of(curl.form(TRANSCRIBE, f"model={MODEL}", *fields, file=file), status)
    assert error["param"] == param


def test_m09_form_of_open_webui(curl: Curl) -> None:
    response = curl.form(TRANSCRIBE, f"model={MODEL}", FILE, "language=en", file=WAV)
    body: Any = response.json()
    assert (response.status_code, bool(body["text"])) == (200, True)
