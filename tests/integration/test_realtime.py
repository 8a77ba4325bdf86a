"""`/v1/realtime` on the real server: the official client, real speech, all stages."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
from openai.resources.realtime.realtime import RealtimeConnection

from tests.integration.server_process import MODEL, ServerProcess
from tests.omni_families import QWEN3_TTS, OmniFamily, for_each_family, for_families
from tests.unit.api.clients import media
from tests.unit.api.realtime.realtime_client import Event, base64_of, check_event

pytestmark = pytest.mark.filterwarnings(
    "ignore:connect\\(\\) must be used as a context manager:DeprecationWarning"
)

ATTEMPTS = 4
"""Responses have no seed, and the demo model's talker begins one in a hundred with the end of speech."""


def check_talker_ended_at_once(response: Event) -> None:
    """Only then may a response have no audio."""
    assert response["usage"]["output_token_details"]["audio_tokens"] == 0, response


class Talk:
    """The official client's connection; every event is checked and kept."""

    def __init__(self, connection: RealtimeConnection) -> None:
        self.connection = connection
        self.events: list[Event] = []
        self._ids: set[str] = set()

    def until(self, *kinds: str) -> Event:
        while True:
            event: Event = json.loads(self.connection.recv_bytes())
            check_event(event, self._ids)
            self.events.append(event)
            if event["type"] in kinds:
                return event
            assert event["type"] != "error", event

    def heard(self) -> Event:
        """The end of the response that runs, if it is heard; of the next one otherwise."""
        for _ in range(ATTEMPTS):
            done: Event = self.until("response.done")["response"]
            if self.audio(done["id"]):
                return done
            check_talker_ended_at_once(done)
            self.connection.response.create()
        raise AssertionError(f"{ATTEMPTS} responses have no audio")

    def begin(self) -> str:
        """The id of a response of which the first audio has arrived."""
        for _ in range(ATTEMPTS):
            self.connection.response.create()
            event = self.until("response.output_audio.delta", "response.done")
            if event["type"] == "response.output_audio.delta":
                response_id: str = event["response_id"]
                return response_id
            check_talker_ended_at_once(event["response"])
        raise AssertionError(f"{ATTEMPTS} responses have no audio")

    def configure(self, **session: Any) -> None:
        self.connection.session.update(session={"type": "realtime", **session})  # type: ignore[arg-type]
        self.until("session.updated")

    def say(self, text: str) -> None:
        self.connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        )
        self.until("conversation.item.done")

    def play(self, samples: npt.NDArray[np.int16]) -> None:
        """At 24 kHz, in pieces of 100 ms."""
        for begin in range(0, len(samples), 2400):
            self.connection.input_audio_buffer.append(
                audio=base64_of(samples[begin : begin + 2400].tobytes())
            )

    def audio(self, response_id: str) -> bytes:
        return b"".join(
            base64.b64decode(event["delta"], validate=True)
            for event in self.events
            if event["type"] == "response.output_audio.delta" and event["response_id"] == response_id
        )


def speech(name: str) -> npt.NDArray[np.int16]:
    """A recording at 24 kHz."""
    samples = np.frombuffer(media(name)[44:], dtype="<i2")
    return np.interp(np.arange(0, len(samples), 2 / 3), np.arange(len(samples)), samples).astype(np.int16)


SILENCE = np.zeros(24_000, dtype=np.int16)


@contextmanager
def talking(server: ServerProcess) -> Iterator[Talk]:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        talk = Talk(connection)
        talk.until("session.created")
        yield talk


@for_each_family
def test_a_written_question_is_answered_by_voice_and_remembered(
    family: OmniFamily, server: ServerProcess
) -> None:
    with talking(server) as talk:
        talk.configure(instructions="Answer in one short sentence.", max_output_tokens=24)
        talk.say("Hello, who are you?")
        talk.connection.response.create()
        first = talk.heard()
        assert first["status"] in ("completed", "incomplete")
        usage = first["usage"]
        transcript = first["output"][0]["content"][0]["transcript"]
        assert transcript
        heard = talk.audio(first["id"])
        num_codes = usage["output_token_details"]["audio_tokens"]
        assert len(heard) == 2 * family.num_samples(num_codes) > 0
        assert np.abs(np.frombuffer(heard, dtype="<i2")).max() > 0
        talk.say("And what can you do?")
        talk.connection.response.create(response={"output_modalities": ["text"]})
        second = talk.until("response.done")["response"]
        assert second["output"][0]["content"][0]["type"] == "output_text"
        # The second prompt holds the first question and its answer.
        assert (
            second["usage"]["input_tokens"]
            > usage["input_tokens"] + usage["output_token_details"]["text_tokens"] // 2
        )


@for_families(QWEN3_TTS)
def test_a_model_that_only_reads_aloud_speaks_what_is_written(
    family: OmniFamily, server: ServerProcess
) -> None:
    with talking(server) as talk:
        talk.configure(instructions="Whisper.", max_output_tokens=24, audio={"output": {"voice": "Ryan"}})
        talk.say("Hello, who are you?")
        talk.connection.response.create()
        done = talk.heard()
        assert done["output"][0]["content"][0]["transcript"] == "Hello, who are you?"
        num_codes = done["usage"]["output_token_details"]["audio_tokens"]
        assert len(talk.audio(done["id"])) == 2 * family.num_samples(num_codes) > 0


def is_cancelled(talk: Talk) -> bool:
    """Whether a response is cancelled by the client; False if it ended before."""
    talk.say("Tell me a long story. " * 8)
    response_id = talk.begin()
    talk.connection.response.cancel(response_id=response_id)
    done = talk.until("response.done")["response"]
    assert done["id"] == response_id
    return bool(done["status"] == "cancelled")


@for_each_family
def test_speech_is_found_heard_and_answered(family: OmniFamily, server: ServerProcess) -> None:
    with talking(server) as talk:
        talk.configure(max_output_tokens=12)
        talk.play(np.concatenate([SILENCE, speech("speech_weather.wav"), SILENCE]))
        done = talk.heard()
        kinds = [event["type"] for event in talk.events]
        assert kinds.index("input_audio_buffer.speech_started") < kinds.index(
            "input_audio_buffer.speech_stopped"
        )
        # At least half of a question of 2 s.
        assert done["usage"]["input_token_details"]["audio_tokens"] > family.speech_tokens[0] // 2
        assert talk.audio(done["id"])


@for_each_family
@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
def test_a_telephone_call_is_answered_in_its_own_format(
    family: OmniFamily, server: ServerProcess, kind: str
) -> None:
    with talking(server) as talk:
        audio = {
            "input": {"format": {"type": kind}, "turn_detection": None},
            "output": {"format": {"type": kind}},
        }
        talk.configure(audio=audio, max_output_tokens=8)
        talk.connection.input_audio_buffer.append(audio=base64_of(bytes(range(256)) * 40))
        talk.connection.input_audio_buffer.commit()
        talk.connection.response.create()
        done = talk.heard()
        codes = done["usage"]["output_token_details"]["audio_tokens"]
        assert len(talk.audio(done["id"])) == family.num_samples(codes) // 3 > 0  # at 8 kHz, a byte a sample


def is_interrupted(talk: Talk) -> bool:
    """Whether a response is cancelled by speech, after all that must hold then; False if it ended before."""
    talk.say("Tell me a long story.")
    response_id = talk.begin()
    talk.play(speech("speech_count.wav"))
    done = talk.until("response.done")["response"]
    assert done["id"] == response_id
    if done["status"] != "cancelled":
        return False
    assert done["status_details"]["reason"] == "turn_detected"
    talk.connection.conversation.item.truncate(
        item_id=done["output"][0]["id"], content_index=0, audio_end_ms=100
    )
    talk.until("conversation.item.truncated")
    last = len(talk.events)
    talk.configure(max_output_tokens=8)
    talk.play(SILENCE)
    assert talk.until("response.done")["response"]["status"] in ("completed", "incomplete")
    assert not [event for event in talk.events[last:] if event.get("response_id") == response_id]
    return True


def in_one_of_several_sessions(server: ServerProcess, is_as_wanted: Callable[[Talk], bool]) -> None:
    """Some stories of the demo model are short."""
    for _ in range(ATTEMPTS):
        with talking(server) as talk:
            if is_as_wanted(talk):
                return
    raise AssertionError(f"{ATTEMPTS} responses came to their own end")


@for_each_family
def test_speaking_interrupts_the_answer_in_all_stages(server: ServerProcess) -> None:
    in_one_of_several_sessions(server, is_interrupted)


@for_families(QWEN3_TTS)
def test_a_model_that_only_reads_aloud_is_cancelled(server: ServerProcess) -> None:
    in_one_of_several_sessions(server, is_cancelled)
    server.wait_until_idle()


@for_each_family
def test_a_function_is_called_and_its_result_spoken_about(server: ServerProcess) -> None:
    parameters = {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]}
    with talking(server) as talk:
        talk.configure(tools=[{"type": "function", "name": "weather", "parameters": parameters}])
        talk.say("Is it hot?")
        # One call after the other fits into the answer of a model that was never trained to stop.
        named = {"type": "function", "name": "weather"}
        talk.connection.response.create(response={"tool_choice": named, "max_output_tokens": 200})  # type: ignore[arg-type]
        done = talk.until("response.done")["response"]
        assert done["status"] == "completed"
        (call,) = (item for item in done["output"] if item["type"] == "function_call")
        assert isinstance(json.loads(call["arguments"])["hot"], bool)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is."}
        talk.connection.conversation.item.create(item=result)  # type: ignore[arg-type]
        talk.until("conversation.item.done")
        talk.configure(tool_choice="none", max_output_tokens=12)
        talk.connection.response.create()
        assert talk.heard()["status"] in ("completed", "incomplete")


def test_a_dropped_connection_frees_all_stages(server: ServerProcess) -> None:
    with talking(server) as talk:
        talk.say("Tell me a long story.")
        talk.begin()
    server.wait_until_idle()


@for_each_family
def test_what_the_user_said_is_transcribed(server: ServerProcess) -> None:
    with talking(server) as talk:
        talk.configure(audio={"input": {"turn_detection": None, "transcription": {"model": MODEL}}})
        talk.play(speech("speech_hello.wav"))
        talk.connection.input_audio_buffer.commit()
        completed = talk.until("conversation.item.input_audio_transcription.completed")
        assert completed["usage"]["input_token_details"]["audio_tokens"] > 0
