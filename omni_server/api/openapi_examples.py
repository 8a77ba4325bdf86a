"""Requests that `/openapi.json` shows."""

from typing import Any

from pydantic import BaseModel

from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.speech_schemas import SpeechRequest

EXAMPLE_MODEL = "Qwen/Qwen2.5-Omni-7B"


def _chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": text}], **fields}


_CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}

_CHAT: dict[str, dict[str, object]] = {
    "text": _chat("What is the capital of France?", max_completion_tokens=64),
    "speech": _chat(
        "What is the capital of France?",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    ),
    "streamed speech": _chat(
        "What is the capital of France?",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
    ),
    "JSON": _chat(
        "What is the capital of France?",
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
    ),
    "tool": _chat(
        "What is the weather in Paris?",
        tools=[{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
    ),
    "log-probabilities": _chat("Say yes or no.", logprobs=True, top_logprobs=2, temperature=0, n=2),
}

_SPEECH: dict[str, dict[str, object]] = {
    "file": {"model": EXAMPLE_MODEL, "input": "Hello, world.", "voice": "alloy", "response_format": "wav"},
    "events": {"model": EXAMPLE_MODEL, "input": "Hello, world.", "stream_format": "sse", "response_format": "pcm"},
}


def _examples(values: dict[str, dict[str, object]]) -> dict[str, Any]:
    return {name: {"value": value} for name, value in values.items()}


EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: _examples(_CHAT),
    SpeechRequest: _examples(_SPEECH),
}
"""By the schema of the body."""
