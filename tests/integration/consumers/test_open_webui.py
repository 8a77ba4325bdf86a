"""The program Open WebUI itself, in its slim variant, set up as docs/recipes/open-webui.md says: what its web
page asks it for, it asks the demo server for."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
import soundfile

from omni_server.types import SpeechOutput
from tests.browser.scripted_server import ScriptedServer
from tests.integration.consumers.conftest import (
    WAV,
    outside_environment,
    recipe,
    wait_until_it_answers,
)
from tests.integration.server_process import MODEL, ROOT, ServerProcess, free_port
from tests.unit.media.containers import FRAGMENTED_MP4, LIVE_WEBM, record

VOICES = {"Chelsie", "Ethan", "alloy"}


@pytest.fixture(scope="module")
def open_webui(
    environments: Path, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    """A client that is signed in."""
    folder = tmp_path_factory.mktemp("open-webui")
    environment = outside_environment(
        USE_SLIM_DOCKER="true",
        DATA_DIR=str(folder),
        WEBUI_SECRET_KEY="secret",
        WEBUI_AUTH="False",
        OFFLINE_MODE="true",
    )
    (commands,) = recipe("open-webui", "bash", server.url, MODEL)
    port = free_port()
    environment["PATH"] = f"{environments / 'open-webui' / 'bin'}:{environment['PATH']}"
    commands = commands.replace("open-webui serve", f"exec open-webui serve --host 127.0.0.1 --port {port}")
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euc", commands],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(f"{url}/health", process, log)
        with httpx2.Client(base_url=url, timeout=120) as client:
            signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
            client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
            yield client
    finally:
        process.terminate()
        process.wait(60)


def test_the_model_can_be_chosen(open_webui: httpx2.Client) -> None:
    models = open_webui.get("/api/models").json()["data"]

    assert [model["id"] for model in models] == [MODEL]


def test_a_chat_streams(open_webui: httpx2.Client) -> None:
    chat = {"model": MODEL, "stream": True, "seed": 7, "messages": [{"role": "user", "content": "Hello!"}]}
    response = open_webui.post("/api/chat/completions", json=chat)

    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    assert "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
    ).strip()


def test_a_picture_is_shown_to_the_model(open_webui: httpx2.Client) -> None:
    picture = base64.b64encode((ROOT / "tests" / "data" / "media" / "shapes.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    content = [{"type": "text", "text": "What is this?"}, part]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    answer = open_webui.post("/api/chat/completions", json=chat).json()

    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def test_the_models_own_voices_can_be_chosen(open_webui: httpx2.Client) -> None:
    voices = open_webui.get("/api/v1/audio/voices").json()["voices"]
    models = open_webui.get("/api/v1/audio/models").json()["models"]

    # It offers six names of OpenAI's where it does not understand the server's list.
    assert {voice["id"] for voice in voices} >= VOICES
    assert models == [{"id": MODEL}]


def test_an_answer_is_read_aloud(open_webui: httpx2.Client) -> None:
    response = open_webui.post("/api/v1/audio/speech", json={"input": "Good morning!", "voice": "Ethan"})

    assert (response.status_code, response.headers["content-type"]) == (200, "audio/mpeg")
    assert response.content[0] == 0xFF  # a frame of MP3, without a tag before it
    assert len(response.content) > 1000


def test_an_answer_is_read_aloud_by_another_model_that_does_nothing_else(
    open_webui: httpx2.Client, reader: ScriptedServer
) -> None:
    """As set in its admin panel."""
    before = open_webui.get("/api/v1/audio/config").json()
    settings = {
        "OPENAI_API_BASE_URL": f"{reader.url}v1",
        "MODEL": "tts",
        "OPENAI_PARAMS": {"language": "german", "instructions": "Speak calmly."},
    }
    try:
        open_webui.post("/api/v1/audio/config/update", json=before | {"tts": before["tts"] | settings})
        voices = open_webui.get("/api/v1/audio/voices").json()["voices"]
        response = open_webui.post("/api/v1/audio/speech", json={"input": "Guten Tag!", "voice": "ryan"})
    finally:
        open_webui.post("/api/v1/audio/config/update", json=before)

    assert {"vivian", "ryan"} <= {voice["id"] for voice in voices}
    assert (response.status_code, response.headers["content-type"]) == (200, "audio/mpeg")
    assert len(response.content) > 1000
    assert reader.generator.last_request.speech == SpeechOutput(
        voice="ryan", text="Guten Tag!", language="german", instructions="Speak calmly."
    )


def test_a_recording_is_written_down(open_webui: httpx2.Client) -> None:
    files = {"file": ("recording.wav", WAV.read_bytes(), "audio/wav")}
    response = open_webui.post("/api/v1/audio/transcriptions", files=files, data={"language": "en"})

    assert response.status_code == 200, response.text
    assert response.json()["text"].strip()


def test_dictation_of_browsers_is_written_down(open_webui: httpx2.Client) -> None:
    """As they record it. Only the full variant of Open WebUI would turn it into MP3."""
    samples, rate = soundfile.read(WAV, dtype="float32")
    webm = record("webm", "libopus", np.repeat(samples[None], 3, axis=1), 3 * rate, options=LIVE_WEBM)
    mp4 = record("mp4", "aac", samples[None], rate, options=FRAGMENTED_MP4)
    for name, data, media_type in [("a.webm", webm, "audio/webm;codecs=opus"), ("a.mp4", mp4, "audio/mp4")]:
        response = open_webui.post("/api/v1/audio/transcriptions", files={"file": (name, data, media_type)})
        assert response.status_code == 200, response.text
        assert response.json()["text"].strip()
