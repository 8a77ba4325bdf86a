"""Row M09: speech to text, as Open WebUI asks for it."""

from typing import Any

from tests.integration.checklist.curl import Curl
from tests.integration.server_process import MODEL
from tests.unit.api.clients import media

TRANSCRIBE = "/v1/audio/transcriptions"
WAV = media("speech_hello.wav")
FILE = "file=@-;filename=hello.wav"


def test_m09_form_of_open_webui(curl: Curl) -> None:
    response = curl.form(TRANSCRIBE, f"model={MODEL}", FILE, "language=en", file=WAV)
    body: Any = response.json()
    assert (response.status_code, bool(body["text"])) == (200, True)
