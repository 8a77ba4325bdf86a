"""Clients of the Responses API, with their defaults, get what they get from chats."""

import shutil
from pathlib import Path

from tests.integration.consumers.conftest import PROGRAMS, report_of
from tests.integration.consumers.scripted_server import ANSWER

CALL = ["weather", {"place": "Oslo"}]


def test_python_clients_get_the_answers_of_chats(scripted_server: str, environments: Path) -> None:
    python = environments / "agents" / "bin" / "python"

    report = report_of([python, PROGRAMS / "responses_clients.py", scripted_server, "omni"])

    assert report["openai"] == {
        "parsed": "Oslo",
        "streamed": ANSWER,
        "last_event": "response.completed",
        "call": CALL,
        "by_id": ANSWER,
        "by_input": ANSWER,
        "is_kept": True,
        "chat": ANSWER,
    }
    assert report["openai-agents"] == {
        "whole": ANSWER,
        "streamed": ANSWER,
        "last_agent": "Expert",
        "items": ["tool_called", "tool_output"] * 2
        + ["handoff_requested", "handoff_occured", "message_output_created"],
    }
    assert report["openai-agents by chats"] == report["openai-agents"]
    assert report["langchain"] == {"call": CALL, "answer": ANSWER, "streamed": ANSWER}
    assert report["langchain by chats"] == report["langchain"]
    assert report["litellm"] == {"whole": ANSWER, "streamed": ANSWER, "completion": ANSWER}
    assert report["pydantic-ai"] == {"whole": ANSWER, "streamed": ANSWER}


def test_vercel_ai_sdk_gets_the_answers_of_chats(scripted_server: str, environments: Path) -> None:
    # Node looks for packages in the folder of the program.
    program = shutil.copy(PROGRAMS / "ai_sdk.mjs", environments / "node")

    report = report_of(["node", program, scripted_server, "omni"])

    expected = {"whole": ANSWER, "streamed": ANSWER, "called": ANSWER, "results": ["sunny in Oslo"]}
    assert report == {"responses": expected, "chats": expected}
