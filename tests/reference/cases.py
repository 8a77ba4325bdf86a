"""Requests whose answers of the reference and of this project's engines are compared."""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from omni_server.types import AudioPart, ChatMessage, ContentPart, ImagePart, Role, TextPart
from omni_server.verify.cases import rising_tone
from tests.reference.synthetic_media import heard, sliding_tiles, tiles

MEDIA = Path(__file__).resolve().parent.parent / "data" / "media"
SPEECH_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
NOISE_SEED = 7


@dataclass(frozen=True)
class Case:
    """One request. Greedy in both stages, repetition penalty 1.05 in the talker."""

    name: str
    messages: tuple[ChatMessage, ...]
    voice: str = "Chelsie"
    thinker_max_tokens: int = 40
    talker_max_tokens: int = 60
    stop_at: int | None = None
    """The sampled token of this index, as it comes out without it, is made a stop token as well."""
    ignore_eos: bool = False
    """The thinker's end token is an ordinary one."""


def say(role: Role, *parts: ContentPart | str) -> ChatMessage:
    return ChatMessage(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def ask(*parts: ContentPart | str) -> tuple[ChatMessage, ...]:
    return (say("system", SPEECH_SYSTEM_PROMPT), say("user", *parts))


def recording(name: str) -> AudioPart:
    """A 16 kHz mono wav of 16-bit samples out of tests/data/media."""
    with wave.open(str(MEDIA / name)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return AudioPart(np.divide(samples, 32768, dtype=np.float32), file.getframerate())


def drawing(name: str) -> ImagePart:
    """An RGB picture out of tests/data/media."""
    with Image.open(MEDIA / name) as picture:
        return ImagePart(np.array(picture.convert("RGB")))


_HELLO = ask("Hello, how are you today?")
_COUNT = ask("Count from one to ten.")
_TELL = (say("user", "Tell me about the river and the sea."),)  # the template adds its own system turn
_TWO_TURNS = (
    say("system", SPEECH_SYSTEM_PROMPT),
    say("user", "What is a horse?"),
    say("assistant", " a gentle animal, strong and quick."),
    say("user", "And what does it eat?"),
)
_SPEECH = ask(recording("speech_hello.wav"))
_SPEECH_2 = ask(recording("speech_count.wav"), "Please answer in one sentence.")
_SPEECH_3 = (say("user", "Hello, this is my question:", recording("speech_weather.wav")),)
_CHIRP = ask("What is this?", rising_tone(1.0, 700))
_IMAGE = ask(drawing("shapes.png"), "Describe the picture.")
_IMAGE_2 = ask("Describe this: ", tiles(84, 84, inverted=True), " and also ", tiles(56, 112))
_VIDEO = ask(sliding_tiles(8, 84, 112), "What happens in the video?")
_MIXED = ask(
    recording("speech_hello.wav"),
    drawing("gradient.png"),
    sliding_tiles(4, 84, 112),
    "Say it in one sentence.",
)
_HEARD_MIXED = ask(
    rising_tone(0.6, 400),
    heard(sliding_tiles(6, 84, 112), recording("speech_count.wav")),
    drawing("gradient.png"),
    "What is said in it?",
)

_VIDEO_AT_1_2 = ask(sliding_tiles(10, 56, 84, 1.2), "What happens in the video?")
# Its columns reach further than its frames and its track in time. The text behind it does not.
_WIDE_HEARD = (say("user", "Look:", heard(sliding_tiles(2, 56, 2240), rising_tone(1.0, 300)), "What?"),)

CASES = {
    case.name: case
    for case in (
        Case("hello", _HELLO, thinker_max_tokens=150, talker_max_tokens=200),
        Case("count", _COUNT, thinker_max_tokens=150, talker_max_tokens=200),
        Case("tell", _TELL),
        Case("two_turns", _TWO_TURNS, talker_max_tokens=120),
        Case("speech", _SPEECH),
        Case("speech_and_text", _SPEECH_2),
        Case("speech_behind_text", _SPEECH_3),
        Case("chirp", _CHIRP),
        Case("image", _IMAGE, thinker_max_tokens=150, talker_max_tokens=200),
        Case("two_images", _IMAGE_2),
        Case("video", _VIDEO),
        Case("mixed", _MIXED),
        Case("heard_mixed", _HEARD_MIXED),
        Case("video_at_1_2", _VIDEO_AT_1_2, thinker_max_tokens=16, talker_max_tokens=30),
        Case("wide_heard", _WIDE_HEARD, thinker_max_tokens=16, talker_max_tokens=30),
        Case("hello_ethan", _HELLO, "Ethan"),
        Case("two_turns_ethan", _TWO_TURNS, "Ethan"),
        Case("speech_ethan", _SPEECH, "Ethan"),
        Case("image_ethan", _IMAGE, "Ethan"),
        Case("one_token", _HELLO, thinker_max_tokens=1),
        Case("two_tokens", _HELLO, thinker_max_tokens=2),
        Case("three_tokens", _COUNT, thinker_max_tokens=3),
        Case("stop_at_second", _SPEECH, stop_at=1),
        Case("stop_early", _COUNT, stop_at=4),
        Case("stop_early_image", _IMAGE, stop_at=6),
        Case("long_reply", _TELL, thinker_max_tokens=220, talker_max_tokens=240, ignore_eos=True),
    )
}
