"""Events of realtime sessions: wrong ones are told with an error, and the session goes on."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from omni_server.api.state import ServerState
from tests.fuzz.mutate import changed_bytes, changed_json
from tests.fuzz.oracle import check_log, watched_log
from tests.fuzz.target import Run, Target
from tests.unit.api.clients import data_url, media
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.realtime.realtime_client import Closed, RealtimeClient, base64_of, realtime_app

_PCM = base64_of(np.rint(8_000 * np.sin(np.arange(4_800) / 9)).astype("<i2").tobytes())
_SESSION = {
    "type": "realtime",
    "model": "omni",
    "output_modalities": ["audio"],
    "instructions": "be brief",
    "tools": [
        {
            "type": "function",
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        }
    ],
    "tool_choice": "auto",
    "max_output_tokens": 100,
    "truncation": {"type": "retention_ratio", "retention_ratio": 0.5},
    "tracing": "auto",
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "transcription": {"model": "whisper-1", "language": "en"},
            "turn_detection": {"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200},
        },
        "output": {"format": {"type": "audio/pcmu"}, "voice": "Ethan", "speed": 1},
    },
}
_ITEMS: tuple[dict[str, Any], ...] = (
    {
        "type": "message",
        "role": "user",
        "id": "item_1",
        "content": [
            {"type": "input_text", "text": "hi"},
            {"type": "input_audio", "audio": _PCM, "transcript": "t"},
            {"type": "input_image", "image_url": data_url(media("shapes.png"), "image/png")},
        ],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_audio", "transcript": "said"}]},
    {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "s"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
)
EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "session.update", "session": _SESSION},
    {"type": "input_audio_buffer.append", "audio": _PCM},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    *({"type": "conversation.item.create", "previous_item_id": "root", "item": item} for item in _ITEMS),
    {"type": "conversation.item.retrieve", "item_id": "item_1"},
    {"type": "conversation.item.delete", "item_id": "item_1"},
    {"type": "conversation.item.truncate", "item_id": "item_1", "content_index": 0, "audio_end_ms": 1},
    {
        "type": "response.create",
        "response": {
            "conversation": "none",
            "metadata": {"a": "b"},
            "input": [*_ITEMS, {"type": "item_reference", "id": "item_1"}],
            "output_modalities": ["text"],
            "instructions": "now",
            "tools": _SESSION["tools"],
            "tool_choice": {"type": "function", "name": "f"},
            "audio": {"output": {"voice": "Chelsie", "format": {"type": "audio/pcm", "rate": 24000}}},
        },
    },
    {"type": "response.create"},
    {"type": "response.cancel", "response_id": "r"},
)
_EVENTS_PER_SESSION = 12
DEADLINE_S = 60.0
"""For a whole session, on a machine that does other things too."""
_CHECK = "fuzz-check"


def _frame(rng: random.Random) -> str | bytes:
    event = rng.choice(EVENTS) | {"event_id": "e"}
    match rng.randrange(10):
        case 0:
            return changed_bytes(rng, json.dumps(event).encode()).decode("utf-8", "replace")
        case 1:
            return changed_bytes(rng, json.dumps(event).encode())  # a binary frame
        case 2 | 3:
            return json.dumps(event)
        case _:
            return json.dumps(changed_json(rng, event))


@asynccontextmanager
async def _open() -> AsyncIterator[Run]:
    state = ServerState(FakeGenerator())
    app = realtime_app(state)
    with watched_log() as log:

        async def run(rng: random.Random) -> str:
            """A whole session."""
            told_errors = 0
            frames = [_frame(rng) for _ in range(_EVENTS_PER_SESSION)]
            async with asyncio.timeout(DEADLINE_S):
                async with RealtimeClient(app=app, state=state) as client:
                    await client.opened()
                    for frame in frames:
                        await client.send_raw(frame)
                    # An answer to this comes behind all others.
                    await client.send("input_audio_buffer.clear", event_id=_CHECK)
                    try:
                        await client.until("input_audio_buffer.cleared")
                    except Closed as closed:
                        raise AssertionError(f"the session was closed: {closed}") from None
                    for event in client.of_type("error"):
                        told_errors += 1
                        assert event["error"]["type"] == "invalid_request_error", event
                        assert event["error"]["code"], event
            check_log(log)
            return "some refused" if told_errors else "all taken"

        yield run


REALTIME_EVENTS = Target(
    "realtime events",
    f"{len(EVENTS)} events with every field, {_EVENTS_PER_SESSION} in a session",
    _open,
    frozenset({"some refused"}),
    rounds=40,
)
