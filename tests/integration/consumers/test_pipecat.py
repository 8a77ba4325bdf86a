"""Pipecat's OpenAI services (`pipecat-ai[openai]`), run in pipelines of Pipecat's own, as
docs/recipes/pipecat.md sets them up."""

import pytest

from tests.integration.consumers.conftest import Agent
from tests.integration.consumers.scripted_server import ANSWER
from tests.integration.server_process import MODEL, ServerProcess

NAME = "pipecat"


def test_its_three_services_make_a_cascade_on_the_demo_server(server: ServerProcess, agent: Agent) -> None:
    report = agent(NAME, "cascade", server.url, MODEL)

    assert report["errors"] == []
    assert len(report["transcripts"]) == 1
    assert report["transcripts"][0].strip()
    assert report["text"].strip()
    assert report["samples"] > 0
    assert report["sample_rates"] == [24_000]


def test_its_realtime_service_talks_with_the_demo_server(server: ServerProcess, agent: Agent) -> None:
    report = agent(NAME, "realtime", server.url, MODEL)

    assert report["errors"] == []
    assert report["num_answers"] == 2  # one to a text, one to speech whose end the server found
    assert report["spoken"].strip()
    assert report["samples"] > 0
    assert report["sample_rates"] == [24_000]


@pytest.mark.parametrize("mode", ["tool", "realtime-tool"])
def test_the_model_calls_its_functions(scripted_server: str, agent: Agent, mode: str) -> None:
    report = agent(NAME, mode, scripted_server, "omni")

    assert report["errors"] == []
    assert report["function_results"] == [{"weather": "sunny in Oslo"}]
    assert report["text"] == ANSWER


def test_all_that_is_said_arrives(scripted_server: str, agent: Agent) -> None:
    cascade = agent(NAME, "cascade", scripted_server, "omni")
    realtime = agent(NAME, "realtime", scripted_server, "omni")

    assert (cascade["transcripts"], cascade["text"], cascade["samples"]) == ([ANSWER], ANSWER, 24_000)
    assert (realtime["spoken"], realtime["samples"], realtime["errors"]) == (2 * ANSWER, 2 * 24_000, [])
