"""What Home Assistant, and the bridge that people put beside it, ask the server for, sent again with OpenAI's
client, which both of them use.

These are replays, not the programs: Home Assistant 2026.11.0 needs Python 3.14 and wyoming-openai 0.8.0 needs
3.12, while the tests run on 3.11 as well. Read in their sources:

- Home Assistant 2026.11.0, homeassistant/components: litellm/{config_flow,coordinator,entity,stt}.py and
  llama_cpp/{api,entity}.py,
- wyoming-openai 0.8.0: wyoming_openai/{compatibility,handler}.py.
"""

import io
import wave
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.integration.consumers.conftest import WAV
from tests.integration.server_process import MODEL, ServerProcess

KEY_OF_HOME_ASSISTANT = "sk-no-key-required"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "HassTurnOn",
            "description": "Turns on a device.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "area": {"type": "string"}},
                "required": [],
            },
        },
    }
]
CHAT: list[Any] = [
    {"role": "system", "content": "You are a voice assistant for Home Assistant."},
    {"role": "user", "content": "Turn on the light."},
]


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY_OF_HOME_ASSISTANT) as client:
        yield client


async def test_litellm_converses(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, user="conversation", tools=TOOLS, messages=CHAT
    )
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert isinstance(message.content, str)

    # The whole of the conversation is sent again with what the functions returned.
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "HassTurnOn", "arguments": '{"name":"light"}'},
    }
    turn: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"data":{"success":[]},"error":null}'},
    ]
    answer = await client.chat.completions.create(
        model=MODEL, user="conversation", tools=TOOLS, messages=CHAT + turn
    )
    assert isinstance(answer.choices[0].message.content, str)


async def test_litellm_recognises_speech(client: openai.AsyncOpenAI) -> None:
    for keywords in (openai.omit, ["kitchen", "light"]):
        transcription = await client.audio.transcriptions.create(
            model=MODEL,
            file=("audio.wav", WAV.read_bytes()),
            language="en",
            prompt=openai.omit,
            keywords=keywords,
        )
        assert transcription.text.strip()


@pytest.mark.parametrize("stream", [False, True])
async def test_llama_cpp_finds_that_the_server_knows_tools(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, max_tokens=3, stream=stream
    )
    if isinstance(answer, openai.AsyncStream):
        reason = [chunk.choices[0].finish_reason async for chunk in answer if chunk.choices][-1]
    else:
        reason = answer.choices[0].finish_reason
    assert reason in ("length", "stop")  # hardly ever does the demo model end so early


async def test_llama_cpp_converses(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        messages=CHAT,
        model=MODEL,
        tools=TOOLS,
        max_tokens=300,
        top_p=1.0,
        temperature=0.7,
        user="conversation",
        stream=True,
    )
    choices = [chunk.choices[0] async for chunk in stream if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert choices[-1].finish_reason in ("length", "stop")


async def test_wyoming_openai_takes_it_for_a_server_like_openais(client: openai.AsyncOpenAI) -> None:
    """Each of these probes would be a sign of another server, whose way to list voices it would then use."""
    http = client._client
    localai, speaches, kokoro = [await http.get(path) for path in ("/readyz", "../../health", "/test")]

    assert localai.status_code == 404
    assert speaches.url.path == "/health"
    assert speaches.text != "OK"
    assert kokoro.status_code == 404


async def test_wyoming_openai_speaks(client: openai.AsyncOpenAI) -> None:
    """It reads the rate from the header while the sound streams, and hands on what follows the header."""
    data = b""
    async with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="Ethan", input="Good morning!", response_format="wav"
    ) as response:
        async for chunk in response.iter_bytes(chunk_size=2048):
            data += chunk

    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
    assert len(data) > 44


@pytest.mark.parametrize("stream", [openai.omit, True])
async def test_wyoming_openai_recognises_speech(client: openai.AsyncOpenAI, stream: Any) -> None:
    recording = io.BytesIO(WAV.read_bytes())
    recording.name = "recording.wav"
    answer = await client.audio.transcriptions.create(
        model=MODEL, file=recording, language="en", response_format="json", stream=stream
    )
    if isinstance(answer, openai.AsyncStream):
        text = "".join([event.delta async for event in answer if event.type == "transcript.text.delta"])
    else:
        text = answer.text
    assert text.strip()
