"""The test cases: prompts of every kind, each answered in text and in every voice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omni_server.errors import ConfigError
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ClonedVoice,
    ContentPart,
    ImagePart,
    ReadAloud,
    Role,
    Task,
    TextPart,
    VideoPart,
)

MAX_TEXT_TOKENS = 48
MAX_CODES = 144
"""Few enough for the shipped stage configs to decode them in one window, too; 2.9 s of Qwen2.5-Omni's
speech."""
MAX_FRAMES = 72
"""Of a model that only reads aloud; 5.8 s of Qwen3-TTS's speech, which is slow to compare on a CPU."""
MAX_CODES_LONG = 480
"""Enough for their longest window."""
AUDIO_RATE_HZ = 16_000
"""The rate of the model's processor, so that neither side resamples."""

_PARAGRAPH = (
    "The river rises in the hills, runs past the mill and under the old bridge, and reaches the sea in the "
    "evening. Boats go down with the tide and come back with the next one. In spring the water is high and "
    "brown, in summer children wade across it, and in autumn leaves float on it until they sink. The miller "
    "says that no two days on the river are alike, and his daughter says that all of them are. "
)


@dataclass(frozen=True)
class Prompt:
    """A chat to answer. If `text` is given, it is spoken word for word instead."""

    name: str
    messages: tuple[ChatMessage, ...]
    text: str | None = None
    max_text_tokens: int = MAX_TEXT_TOKENS
    max_codes: int = MAX_CODES

    @property
    def has_media(self) -> bool:
        return any(not isinstance(part, TextPart) for part in self._parts)

    @property
    def has_track(self) -> bool:
        """Whether a video has sound."""
        return any(isinstance(part, VideoPart) and part.audio is not None for part in self._parts)

    @property
    def _parts(self) -> list[ContentPart]:
        return [part for message in self.messages for part in message.content]


@dataclass(frozen=True)
class Case:
    """One request; without a voice, the answer is text."""

    prompt: Prompt
    voice: str | None
    clone: ClonedVoice | None = None

    @property
    def name(self) -> str:
        return f"{self.prompt.name}, {self.voice or 'text only'}"


def all_prompts(
    task_messages: Callable[[Task], tuple[ChatMessage, ...]],
    *,
    with_chats: bool = True,
    with_media: bool = True,
    with_tracks: bool = True,
) -> tuple[Prompt, ...]:
    """Returns one prompt of each kind; audio, images and video only if `with_media`, and videos with sound
    only if `with_tracks` as well. Without chats, there are more texts to be read aloud. `task_messages` is
    the family's.

    Videos are sampled at 2 fps, unless their length allows only another rate. At 2 fps, the positions of
    frames are whole numbers in every model, at other rates in some.
    """
    sound, picture = rising_tone(1.5, 500), disc_on_tiles(168, 224)
    video = moving_disc(8, 112, 168, fps=2.0)
    heard = replace(moving_disc(8, 112, 168, fps=1.8), audio=rising_tone(4.2, 300))

    def aloud(name: str, text: str) -> Prompt:
        max_codes = MAX_CODES if with_chats else MAX_FRAMES
        return Prompt(name, task_messages(ReadAloud(text)), text, max_codes=max_codes)

    short = "Good morning. The train to the coast leaves at a quarter past nine, on platform four."
    read_aloud = aloud("read aloud", short)
    if not with_chats:
        marks = "McDonald's iPhone 12 is a cafe\u0301's, \u0939\u093f\u0928\u094d\u0926\u0940, \u4f60\u597d."
        return read_aloud, aloud("names and marks", marks), aloud("paragraph", _PARAGRAPH)
    prompts = (
        Prompt("text", _ask("Hello, how are you today?")),
        Prompt(
            "system prompt", (_say("system", "You answer in short sentences."), *_ask("What is a horse?"))
        ),
        Prompt(
            "several turns",
            (
                *_ask("What is a horse?"),
                _say("assistant", "A large animal with four legs and a mane."),
                *_ask("And what does it eat?"),
            ),
        ),
        Prompt("audio", _ask(sound, "What do you hear?")),
        Prompt("image", _ask(picture, "Describe the picture.")),
        Prompt("video", _ask(video, "What happens in the video?")),
        Prompt("audio and image", _ask("Here is a sound", sound, "and a picture", picture, "Describe both.")),
        Prompt("video at 1.5 fps", _ask(moving_disc(6, 112, 168, fps=1.5), "What happens in the video?")),
        Prompt("video with sound at 1.8 fps", _ask(heard, "What happens in the video?")),
        Prompt(
            "all media at 1.97 fps",
            _ask(sound, picture, moving_disc(6, 112, 168, fps=25 * 6 / 76), "What belongs together?"),
        ),
        Prompt(
            "several turns with video at 3 fps",
            (
                *_ask(moving_disc(10, 112, 168, fps=3.0), "What happens in the video?"),
                _say("assistant", "A red disc moves to the right."),
                *_ask("And what do you see here?", picture),
            ),
        ),
        Prompt(
            "long text",
            _ask("Say in your own words what this text tells.\n\n" + 3 * _PARAGRAPH),
            max_text_tokens=160,
            max_codes=MAX_CODES_LONG,
        ),
        read_aloud,
    )
    return tuple(
        prompt
        for prompt in prompts
        if (with_media or not prompt.has_media) and (with_tracks or not prompt.has_track)
    )


def chosen(prompts: Sequence[Prompt], wanted: str | None) -> tuple[Prompt, ...]:
    """Selects the prompts in --cases, by comma-separated names or count. Raises `ConfigError`."""
    if wanted is None:
        return tuple(prompts)
    if wanted.isdecimal():
        if int(wanted) == 0:
            raise ConfigError("--cases 0 compares nothing")
        return tuple(prompts[: int(wanted)])
    names = [name.strip() for name in wanted.split(",")]
    known = {prompt.name: prompt for prompt in prompts}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--cases: there is no '{unknown[0]}'; prompts are {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def cases_of(
    prompts: Sequence[Prompt],
    voices: Sequence[str],
    *,
    in_text: bool = True,
    clone: ClonedVoice | None = None,
) -> tuple[Case, ...]:
    """Combines each prompt with each voice, and with text if the deployment writes and the prompt is not read
    aloud. Raises `ConfigError` if no case is left."""
    cases = []
    for prompt in prompts:
        if in_text and prompt.text is None:
            cases.append(Case(prompt, None))
        cases += [Case(prompt, voice, clone) for voice in voices]
    if not cases:
        raise ConfigError("--cases names texts to be read aloud only, and this deployment does not speak")
    return tuple(cases)


def _say(role: Role, *parts: ContentPart | str) -> ChatMessage:
    return ChatMessage(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def _ask(*parts: ContentPart | str) -> tuple[ChatMessage, ...]:
    return (_say("user", *parts),)


# Audio, images and videos computed from formulas: equal on every machine, free of copyright.


def rising_tone(seconds: float, start_hz: float) -> AudioPart:
    """Rises by 400 Hz per second, with a tremolo; float32 [16000 * seconds]."""
    t = np.arange(int(AUDIO_RATE_HZ * seconds)) / AUDIO_RATE_HZ
    tone = np.sin(2 * np.pi * (start_hz * t + 200 * t * t))
    return AudioPart((0.5 * tone * (0.6 + 0.4 * np.sin(6 * np.pi * t))).astype(np.float32), AUDIO_RATE_HZ)


def disc_on_tiles(height: int, width: int, *, offset: int = 0) -> ImagePart:
    """A red disc on a checkerboard, shifted right by `offset` pixels; uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    tile = ((x // 28 + y // 28) % 2).astype(bool)
    pixels = np.where(tile[..., None], (60, 90, 200), (180, 180, 180))
    disc = (y - height // 2) ** 2 + (x - width // 4 - offset) ** 2 < (height // 4) ** 2
    return ImagePart(np.where(disc[..., None], (220, 30, 30), pixels).astype(np.uint8))


def moving_disc(num_frames: int, height: int, width: int, fps: float) -> VideoPart:
    """The disc moving to the right; uint8 [num_frames, height, width, 3]."""
    step = width // (2 * num_frames)
    frames = [disc_on_tiles(height, width, offset=step * i).pixels for i in range(num_frames)]
    return VideoPart(np.stack(frames), fps)
