"""Pipecat's OpenAI services (`pipecat-ai[openai]`), run in pipelines of Pipecat's own, as
docs/recipes/pipecat.md sets them up."""

import pytest

from omni_server.types import SpeechOutput
from tests.browser.scripted_server import ScriptedServer
from tests.integration.consumers.conftest import READER_SAMPLES, Agent
from tests.integration.consumers.scripted_server import ANSWER
from tests.unit.api.speech_client import sound_of

NAME = "pipecat"


@pytest.mark.parametrize("mode", ["tool", "realtime-tool"])
def test_the_model_calls_its_functions(scripted_server: str, agent: Agent, mode: str) -> None:
    report = agent(NAME, mode, scripted_server, "omni")

    assert report["errors"] == []
    assert report["function_results"] == [{"weather": "sunny in Oslo"}]
    assert report["text"] == ANSWER


def test_all_that_is_said_arrives(scripted_server: str, agent: Agent) -> None:
    cascade = agent(NAME, "cascade", scripted_server, "omni")
    realtime = agent(NAME, "realtime", scripted_server, "omni")

    assert cascade["errors"] == []
    assert cascade["sample_rates"] == realtime["sample_rates"] == [24_000]
    assert (cascade["transcripts"], cascade["text"], cascade["samples"]) == ([ANSWER], ANSWER, 24_000)
    assert (realtime["spoken"], realtime["samples"], realtime["errors"]) == (2 * ANSWER, 2 * 24_000, [])


def test_a_model_that_only_reads_aloud_is_the_voice_of_an_agent(reader: ScriptedServer, agent: Agent) -> None:
    report = agent(NAME, "read", reader.url, "tts")

    assert (report["errors"], report["samples"], report["sample_rates"]) == ([], READER_SAMPLES, [24_000])
    assert reader.generator.last_request.speech == SpeechOutput(
        voice="ryan", text="Good morning!", instructions="Speak calmly."
    )


def test_an_answer_is_spoken_while_it_is_written(reader_of_pieces: ScriptedServer, agent: Agent) -> None:
    report = agent(NAME, "stream", reader_of_pieces.url, "tts")

    assert (report["errors"], report["samples"]) == ([], len(sound_of("Good morning!")))
    speech = reader_of_pieces.generator.last_request.speech
    assert speech is not None
    assert speech.voice == "ryan"
