"""Language models of two families, whose answers Qwen3-TTS reads aloud while they are written."""

import asyncio
import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.errors import InvalidRequestError
from omni_server.offline import OmniOutput
from omni_server.types import (
    AudioPart,
    ChatMessage,
    CodecDelta,
    ContentPart,
    ImagePart,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextDelta,
    TextPart,
)
from omni_server.verify.compare import signal_to_noise_db
from stages.spoken_llm.spoken_text_filter import SpokenTextFilter
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import LiveOmni
from tests.integration.parity import QWEN3_WAVEFORM_SNR_DB, STEP_OF_16_BITS
from tests.unit.api.clients import http_client
from tests.unit.api.realtime.realtime_client import Event, RealtimeClient, audio_of
from tests.unit.api.speech_client import SpeechClient, pcm_of
from tests.unit.api.sse_validator import read_stream

CONFIG = load_stage_config(find_shipped_config("spoken_llm.demo-cpu")).reduced_to({"text", "audio"})
QUESTIONS = ("Hello!", "What is a horse?", "Count to ten.", "你好，今天天气怎么样？")
VOICES = ("Serena", "Ryan", "Eric", "Vivian")
TALKER = SamplingConfig(temperature=0.0, repetition_penalty=1.05, max_tokens=24)
NUM_SESSIONS, NUM_AT_ONCE = 200, 16


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveOmni]:
    folder = tmp_path_factory.mktemp("spoken_llm") / "checkpoint"
    live = LiveOmni(make_demo_checkpoint(folder, family="spoken_llm", pipeline=request.param), CONFIG)
    yield live
    live.close()


with_text = pytest.mark.parametrize("live", ["text"], indirect=True)
with_both = pytest.mark.parametrize("live", ["text", "vision"], indirect=True)


def chat(
    number: int, *parts: ContentPart, max_tokens: int = 24, talker: SamplingConfig = TALKER, **sampling: Any
) -> OmniRequest:
    question = TextPart(QUESTIONS[number % len(QUESTIONS)])
    return OmniRequest(
        f"chat-{number}",
        (ChatMessage("user", (*parts, question)),),
        speech=SpeechOutput(voice=VOICES[number % len(VOICES)]),
        sampling={
            "thinker": SamplingConfig(temperature=0.0, max_tokens=max_tokens, **sampling),
            "talker": talker,
        },
    )


def spoken(text: str) -> str:
    text_filter = SpokenTextFilter()
    return (text_filter.push(text) + text_filter.finish()).strip()


def read_aloud(live: LiveOmni, text: str, voice: str | None) -> OmniOutput:
    """The same text, given, without the language model."""
    speech = SpeechOutput(voice=voice, text=text, text_first=False)
    return live.answer(OmniRequest("aloud", (), speech=speech, sampling={"talker": TALKER}))


def same_speech(answer: OmniOutput, wanted: OmniOutput) -> None:
    assert answer.codes == wanted.codes
    assert signal_to_noise_db(wanted.audio, answer.audio) > QWEN3_WAVEFORM_SNR_DB


@with_both
def test_answers_alone_and_at_once_are_spoken_as_their_texts_are_read_aloud(live: LiveOmni) -> None:
    requests = [chat(number) for number in range(8)]
    silent = [live.answer(replace(request, speech=None)) for request in requests[:4]]
    aloud = [
        read_aloud(live, spoken(answer.text), voice) for answer, voice in zip(silent, VOICES, strict=True)
    ]
    answers = [live.answer(requests[0]), *live.answers(requests)]
    for number, answer in enumerate(answers, -1):
        number = max(0, number) % 4
        assert answer.text == silent[number].text
        same_speech(answer, aloud[number])


@with_text
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_an_answer_that_ends_in_the_middle_is_spoken_to_its_end(live: LiveOmni, max_tokens: int) -> None:
    answer = live.answer(chat(0, max_tokens=max_tokens, ignore_eos=True))
    assert answer.finish_reason == "length"
    same_speech(answer, read_aloud(live, spoken(answer.text), VOICES[0]))


@with_text
def test_a_text_in_pieces_is_read_aloud_without_the_language_model(live: LiveOmni) -> None:
    async def session() -> list[Event]:
        async with SpeechClient(app=create_app(ServerState(live.omni), ApiConfig())) as client:
            sampling = {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": 24}
            await client.configured(voice=VOICES[0], stage_sampling={"talker": sampling})
            return await client.speak("One, t", "wo, three", ".")

    wanted = read_aloud(live, "One, two, three.", VOICES[0])
    heard = np.frombuffer(pcm_of(live.run(session())), "<i2") / np.float32(32768)
    assert np.abs(heard - wanted.audio).max() <= STEP_OF_16_BITS


@with_text
def test_an_answer_without_words_is_silent(live: LiveOmni) -> None:
    whole = live.answer(chat(0)).text
    answer = live.answer(chat(0, stop=(whole.strip()[:1],)))
    assert answer.text.strip() == ""
    assert (answer.codes, answer.audio.size, answer.finish_reason) == ((), 0, "stop")


@with_text
def test_speech_begins_before_the_text_is_written_and_a_pause_changes_nothing(live: LiveOmni) -> None:
    request = chat(1, max_tokens=400, ignore_eos=True)
    wanted = live.answer(request)
    events = live.events_with_a_pause(request, 4)
    codes = [code for event in events if isinstance(event, CodecDelta) for code in event.codes]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == wanted.text
    assert tuple(codes) == wanted.codes


@with_text
@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_a_stage_that_dies_ends_the_answer_and_the_next_is_right(live: LiveOmni, stage: str) -> None:
    wanted = live.answer(chat(2))
    # All stages work on when the first audio comes.
    endless = replace(TALKER, max_tokens=1500, ignore_eos=True)
    live.kill_while_speaking(stage, chat(1, max_tokens=4000, ignore_eos=True, talker=endless))
    answer = live.answer(chat(2))
    assert answer.text == wanted.text
    same_speech(answer, wanted)
    assert (live.omni.num_running, live.held_rows()) == (0, 0)


@with_text
def test_of_many_answers_half_are_abandoned_and_the_others_are_right(live: LiveOmni) -> None:
    def brief(number: int) -> OmniRequest:
        return chat(number, max_tokens=8, talker=replace(TALKER, max_tokens=8))

    wanted = [live.answer(brief(number)) for number in range(len(QUESTIONS))]
    turn = asyncio.Semaphore(NUM_AT_ONCE)
    random = np.random.default_rng(0)

    async def session(number: int, num_events: int) -> tuple[str, tuple[int, ...]]:
        """Leaves after `num_events` if the number is odd."""
        request = replace(brief(number), request_id=f"session-{number}")
        text, codes = "", tuple[int, ...]()
        async with turn:
            events = live.omni.events(request)
            async for event in events:
                if number % 2 and not num_events:
                    break
                num_events -= 1
                text += event.text if isinstance(event, TextDelta) else ""
                codes += event.codes if isinstance(event, CodecDelta) else ()
            await events.aclose()
        return text, codes

    async def all_sessions() -> list[tuple[str, tuple[int, ...]]]:
        leaving = random.integers(0, 12, NUM_SESSIONS).tolist()
        return await asyncio.gather(*(session(*numbers) for numbers in enumerate(leaving)))

    for number, (text, codes) in enumerate(live.run(all_sessions())):
        if number % 2 == 0:
            answer = wanted[number % len(QUESTIONS)]
            assert (text, codes) == (answer.text, answer.codes)
    assert (live.omni.num_running, live.held_rows()) == (0, 0)
    same_speech(live.answer(brief(3)), wanted[3])


@with_both
def test_what_the_language_model_does_not_take_is_refused(live: LiveOmni) -> None:
    noise = np.zeros(24_000, np.float32)
    with pytest.raises(InvalidRequestError):
        live.answer(chat(0, AudioPart(noise, 24_000)))
    too_long = {"talker": SamplingConfig(max_tokens=9000)}
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        live.run(live.omni.submit(replace(chat(0), sampling=too_long), print))
    picture = ImagePart(np.full((56, 84, 3), 99, np.uint8))
    if "image" not in live.omni.model_info.input_modalities:
        with pytest.raises(InvalidRequestError):
            live.answer(chat(0, picture))
        return
    answer = live.answer(chat(0, picture))
    assert answer.usage.prompt.image == 6  # squares of 28
    same_speech(answer, read_aloud(live, spoken(answer.text), VOICES[0]))


# -- over HTTP


@with_both
def test_chats_have_the_whole_text_as_the_transcript(live: LiveOmni) -> None:
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    audio = {"voice": VOICES[1], "format": "wav"}
    sampling = {"talker": {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": 24}}
    body = {"model": live.omni.model_info.name, "messages": messages, "temperature": 0, "max_tokens": 24}
    body |= {"modalities": ["text", "audio"], "audio": audio, "stage_sampling": sampling}

    async def asked() -> list[httpx2.Response]:
        async with http_client(create_app(ServerState(live.omni), ApiConfig())) as client:
            whole = await client.post("/v1/chat/completions", json=body)
            text = spoken(whole.json()["choices"][0]["message"]["audio"]["transcript"])
            given = {"model": body["model"], "input": text, "voice": VOICES[1], "response_format": "wav"}
            given |= {"non_streaming_mode": False, "stage_sampling": sampling}
            heard = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
            return [
                whole,
                await client.post(
                    "/v1/chat/completions", json=body | {"stream": True, "audio": audio | {"format": "pcm16"}}
                ),
                await client.post("/v1/audio/speech", json=given),
                await client.post(
                    "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": [heard]}]}
                ),
            ]

    whole, streamed, aloud, refused = live.run(asked())
    message = whole.json()["choices"][0]["message"]
    wanted = live.answer(chat(1))
    assert message["audio"]["transcript"] == wanted.text
    assert read_stream(streamed.text).transcript == wanted.text
    waves = [base64.b64decode(message["audio"]["data"]), aloud.content]
    chatted, read = (soundfile.read(io.BytesIO(wave))[0] for wave in waves)
    assert np.abs(chatted - read).max() <= STEP_OF_16_BITS  # windows end where the text pauses
    assert refused.status_code == 400
    assert "audio" in refused.json()["error"]["message"]


@with_text
def test_answers_beside_tools_are_spoken_and_calls_are_not(live: LiveOmni) -> None:
    parameters = {"type": "object", "properties": {"place": {"type": "string", "enum": ["Oslo"]}}}
    parameters |= {"required": ["place"], "additionalProperties": False}
    body = {
        "model": live.omni.model_info.name,
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "modalities": ["text", "audio"],
        "audio": {"voice": VOICES[0], "format": "wav"},
        "temperature": 0,
        "stage_sampling": {"talker": {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": 24}},
    }

    called = {"tool_choice": "required", "parallel_tool_calls": False}

    async def asked() -> list[Any]:
        async with http_client(create_app(ServerState(live.omni), ApiConfig())) as client:
            free = await client.post("/v1/chat/completions", json=body | {"max_tokens": 8})
            calling = await client.post("/v1/chat/completions", json=body | called)
            return [response.json()["choices"][0] for response in (free, calling)]

    free, calling = live.run(asked())
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(free["message"]["audio"]["data"])))
    aloud = read_aloud(live, spoken(free["message"]["audio"]["transcript"]), VOICES[0])
    assert len(samples) == len(aloud.audio)
    assert (calling["finish_reason"], calling["message"].get("audio")) == ("tool_calls", None)
    assert calling["message"]["tool_calls"][0]["function"]["name"] == "weather"


@with_text
def test_a_realtime_answer_is_interrupted_and_the_next_is_whole(live: LiveOmni) -> None:
    async def session() -> list[dict[str, Any]]:
        async with RealtimeClient(state=ServerState(live.omni), query="") as client:
            await client.opened(audio={"output": {"voice": VOICES[0]}})
            await client.say(QUESTIONS[1])
            await client.begin()
            await client.send("response.cancel")
            cancelled = (await client.until("response.done"))["response"]
            item = cancelled["output"][0]["id"]
            await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=80)
            await client.until("conversation.item.truncated")
            await client.say(QUESTIONS[0])
            answered = await client.answer()
            assert audio_of(client.events)
            return [cancelled, answered]

    for _ in range(4):  # some answers of a random model are over before they can be cancelled
        cancelled, answered = live.run(session())
        if cancelled["status"] == "cancelled":
            break
    assert cancelled["status"] == "cancelled"
    # What follows depends on how much was said until then, and a random model may speak to a limit.
    if answered["status"] != "completed":
        assert answered["status_details"]["reason"] == "max_output_tokens"
    assert answered["output"][0]["content"][0]["transcript"]
    assert live.held_rows() == 0
