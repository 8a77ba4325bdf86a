"""What several tests of responses expect and play."""

from typing import Any

from omni_server.types import AudioDelta, TextDelta
from tests.unit.api.fake_generator import SAMPLES, Hang, ScriptEntry

OPENING = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
]
CLOSING = [
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]
SPOKEN_CLOSING = ["response.output_audio.done", "response.output_audio_transcript.done", *CLOSING]
MANUAL: dict[str, Any] = {"input": {"turn_detection": None}}
# One delta of audio, and no more.
ENDLESS: list[ScriptEntry] = [TextDelta("Once upon a time", (1,)), AudioDelta(0, SAMPLES[:4000]), Hang()]
