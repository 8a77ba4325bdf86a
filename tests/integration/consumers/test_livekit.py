"""The OpenAI plugin of LiveKit Agents (`livekit-agents`, `livekit-plugins-openai`), called as an agent
session calls it, with the settings of docs/recipes/livekit.md."""

from omni_server.types import SpeechOutput
from tests.browser.scripted_server import ScriptedServer
from tests.integration.consumers.conftest import READER_SAMPLES, Agent
from tests.integration.consumers.scripted_server import ANSWER
from tests.unit.api.speech_client import sound_of

NAME = "livekit"
MP3_FRAME = 576  # samples of a frame at 24 kHz; the plugin asks for MP3, which is made of whole frames


def test_the_model_calls_its_functions(scripted_server: str, agent: Agent) -> None:
    call = ["weather", '{"place": "Oslo"}']

    assert agent(NAME, "tool", scripted_server, "omni") == {"calls": [call], "text": ANSWER}
    assert agent(NAME, "realtime-tool", scripted_server, "omni") == {
        "calls": [call],
        "text": ANSWER,
        "errors": [],
    }


def test_all_that_is_said_arrives(scripted_server: str, agent: Agent) -> None:
    cascade = agent(NAME, "cascade", scripted_server, "omni")
    realtime = agent(NAME, "realtime", scripted_server, "omni")

    assert cascade["final"] is True
    assert cascade["sample_rates"] == [24_000]
    assert (realtime["speech"], realtime["errors"]) == (["started", "stopped"], [])
    assert (cascade["transcript"], cascade["text"]) == (ANSWER, ANSWER)
    assert 24_000 <= cascade["samples"] < 24_000 + 4 * MP3_FRAME
    assert realtime["asked"] == realtime["spoken"] == {"text": ANSWER, "samples": 24_000}


def test_a_model_that_only_reads_aloud_is_the_voice_of_an_agent(reader: ScriptedServer, agent: Agent) -> None:
    report = agent(NAME, "read", reader.url, "tts")

    assert report["sample_rates"] == [24_000]
    assert READER_SAMPLES <= report["samples"] < READER_SAMPLES + 4 * MP3_FRAME
    assert reader.generator.last_request.speech == SpeechOutput(
        voice="ryan", text="Good morning!", instructions="Speak calmly."
    )


def test_an_answer_is_spoken_while_it_is_written(reader_of_pieces: ScriptedServer, agent: Agent) -> None:
    report = agent(NAME, "stream", reader_of_pieces.url, "tts")

    assert (report["samples"], report["sample_rates"]) == (len(sound_of("Good morning!")), [24_000])
    speech = reader_of_pieces.generator.last_request.speech
    assert speech is not None
    assert speech.voice == "ryan"
