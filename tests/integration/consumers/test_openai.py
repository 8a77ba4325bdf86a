"""The official client with a model that only reads aloud. Its other calls are tested in `integration/`."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import soundfile

from omni_server.types import SpeechOutput
from tests.browser.scripted_server import ScriptedServer
from tests.integration.consumers.conftest import READER_SAMPLES, recipe
from tests.integration.server_process import ROOT
from tests.unit.api.fake_generator import CLONING_MODEL


@pytest.fixture
def client(reader: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{reader.url}v1", api_key="EMPTY", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("voice", ["ryan", {"id": "Ryan"}, "ash"])
def test_whole_speech_in_a_voice_by_name_by_id_and_by_openais_name(
    reader: ScriptedServer, client: openai.OpenAI, voice: Any
) -> None:
    answer = client.audio.speech.create(
        model="tts",
        voice=voice,
        input="Guten Tag!",
        instructions="Speak calmly.",
        response_format="wav",
        extra_body={"language": "german"},
    )

    assert soundfile.info(io.BytesIO(answer.content)).frames == READER_SAMPLES
    assert reader.generator.last_request.speech == SpeechOutput(
        voice="ryan", text="Guten Tag!", language="german", instructions="Speak calmly."
    )


def test_speech_is_streamed(client: openai.OpenAI) -> None:
    create = client.audio.speech.with_streaming_response.create
    with create(model="tts", voice="vivian", input="Hello!", response_format="pcm") as response:
        assert "content-length" not in response.headers
        assert len(b"".join(response.iter_bytes())) == 2 * READER_SAMPLES


def test_a_chat_is_refused_in_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not answer chats"):
        client.chat.completions.create(model="tts", messages=[{"role": "user", "content": "Hello!"}])


def test_the_page_makes_uses_and_deletes_a_voice(reader: ScriptedServer, tmp_path: Path) -> None:
    reader.generator.model_info = CLONING_MODEL
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    [program] = recipe("../speech", "python", reader.url, CLONING_MODEL.name)

    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)

    assert (tmp_path / "speech.pcm").stat().st_size == 2 * READER_SAMPLES
    speech = reader.generator.last_request.speech
    assert speech is not None
    assert speech.language == "en"
    assert speech.clone is not None
    assert speech.clone.text == "Hello, how are you today?"
    assert httpx2.get(f"{reader.url}v1/audio/voices").json() == {"voices": []}
