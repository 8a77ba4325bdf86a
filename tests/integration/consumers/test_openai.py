"""The official client with a model that only reads aloud. Its other calls are tested in `integration/`."""

import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import soundfile

from omni_server.types import SpeechOutput
from tests.browser.scripted_server import ScriptedServer
from tests.integration.consumers.conftest import READER_SAMPLES


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
