"""Requests whose answers of Qwen3-TTS's reference and of this project's engines are compared."""

from dataclasses import dataclass, replace

import numpy as np

from tests.checkpoints.codec_weights import CODEBOOKS, CODES
from tests.checkpoints.qwen3_tts.config import Kind
from tests.checkpoints.qwen3_tts.tokens import CAMEL_CASE


@dataclass(frozen=True)
class Clone:
    """A voice of a base checkpoint. Its numbers are random: comparisons do not depend on where they are
    from."""

    num_frames: int = 0
    """Of reference audio; 0: the voice is its vector only."""
    text: str = ""
    """What is said in it."""

    def vector(self, width: int) -> tuple[float, ...]:
        draw = np.random.default_rng(self.num_frames)
        return tuple(draw.standard_normal(width).astype(np.float32).tolist())

    def codes(self) -> tuple[tuple[int, ...], ...]:
        draw = np.random.default_rng(self.num_frames)
        frames = draw.integers(CODES, size=(self.num_frames, CODEBOOKS)).tolist()
        return tuple(tuple(frame) for frame in frames)


@dataclass(frozen=True)
class TTSCase:
    name: str
    kind: Kind
    text: str
    size: str = "tiny"
    """Of the demo checkpoint."""
    language: str = "auto"
    voice: str | None = None
    instructions: str | None = None
    clone: Clone | None = None
    streams_text: bool = False
    """Whether the prompt has only the first token of the text, and each frame adds another."""
    min_frames: int = 0
    """The end may not come before. The checkpoint itself does not end before two frames."""
    max_frames: int = 40

    @property
    def checkpoint(self) -> str:
        """Folder of its checkpoint in that of `write_checkpoints`."""
        return f"{self.size}.{self.kind}"


_WORD = "Hello"
_SHORT = "The river is long, and the sea is near."
_CAMEL = f"Please give the {CAMEL_CASE} to McDonald and not to eBay's boy."
# combining marks, with and without a composed sign
_MARKS = "हिन्दी में कैफ़े, a cafe\u0301 and a\u0323 q\u0302 👋🏽."
_LONG = (
    "Tell me about the house by the river, the old garden and the gentle horse. In the morning the sun is on "
    "the water, and the birds sing in the trees; in the evening it's 12 or 13 degrees.\n\n"
    "Then we sit at the fire, and grandmother reads a story of the wolf that wanted to be a lion!"
)
_CALM = "speak with a calm and gentle voice, not too fast"
_DESIGN = "a young girl with a bright voice"
_SAID = "the old house is by the sea"

_WHOLE = (
    TTSCase("word", "custom_voice", _WORD, language="english", voice="serena"),
    TTSCase("short", "custom_voice", _SHORT, language="english", voice="ryan"),
    TTSCase("no_language", "custom_voice", _SHORT, voice="vivian"),
    TTSCase("dialect", "custom_voice", _SHORT, voice="eric"),
    TTSCase("dialect_of_chinese", "custom_voice", _SHORT, language="chinese", voice="dylan"),
    TTSCase("dialect_in_portuguese", "custom_voice", _SHORT, language="portuguese", voice="eric"),
    TTSCase("camel_case", "custom_voice", _CAMEL, language="japanese", voice="aiden"),
    TTSCase("marks", "custom_voice", _MARKS, language="german", voice="ono_anna"),
    TTSCase("long", "custom_voice", _LONG, language="french", voice="uncle_fu", max_frames=90),
    TTSCase("instructed", "custom_voice", _SHORT, voice="ryan", instructions=_CALM),
    TTSCase("cut", "custom_voice", _LONG, language="spanish", voice="ryan", max_frames=7),
    TTSCase("one_frame", "custom_voice", _SHORT, language="russian", voice="ryan", max_frames=1),
    TTSCase("design", "voice_design", _SHORT, language="english", instructions=_DESIGN),
    TTSCase("undesigned", "voice_design", _CAMEL, language="korean"),
    TTSCase("x_vector", "base", _SHORT, language="english", clone=Clone()),
    TTSCase("continued_text_longer", "base", _SHORT, clone=Clone(8, _SAID)),
    TTSCase("continued_codes_longer", "base", _CAMEL, language="italian", clone=Clone(90, _SAID)),
)
_SMALL = (
    "word",
    "short",
    "dialect",
    "x_vector",
    "continued_text_longer",
    "continued_codes_longer",
)
"""Those that are also asked of the other size, which follows no instructions."""


def _with_streamed_text(case: TTSCase) -> TTSCase:
    return replace(case, name=f"{case.name}_streamed", streams_text=True)


_TINY = (*_WHOLE, *map(_with_streamed_text, _WHOLE))
_ENDS_AT_ONCE = TTSCase("ends_at_once", "custom_voice", "Morning.", language="english", voice="serena")
"""Behind the two frames without an end."""
_HALF_A_MINUTE = TTSCase(
    "half_a_minute",
    "custom_voice",
    _LONG,
    language="spanish",
    voice="ryan",
    streams_text=True,
    min_frames=375,
    max_frames=375,
)
"""By itself, the reference decodes 300 frames at a time."""
CASES = {
    case.name: case
    for case in (
        *_TINY,
        _ENDS_AT_ONCE,
        _HALF_A_MINUTE,
        *(
            replace(case, name=f"{case.name}_small", size="tiny-0.6b")
            for case in _TINY
            if case.name.removesuffix("_streamed") in _SMALL
        ),
    )
}
