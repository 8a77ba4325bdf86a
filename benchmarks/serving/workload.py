"""The workloads, and their turns."""

import io
from typing import Literal

import numpy as np
import soundfile
from pydantic import BaseModel, ConfigDict

WorkloadName = Literal["W1", "W2", "W3", "tts", "images"]
Modalities = Literal["text", "text,audio", "audio", "image"]

SAMPLES_PER_CODEC_TOKEN = 480
"""In Qwen2.5-Omni's code2wav: two mel frames per codec token, 240 samples per mel frame."""
QUESTION_SAMPLE_RATE = 16_000
"""Rate of question audio in Hz."""
SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving "
    "auditory and visual inputs, as well as generating text and speech."
)
_FIXED_PROMPT_TOKENS = 52
"""Approximate tokens of the system prompt, the words before it and the chat template; the rest is the
sentence."""
_COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact"
)
_WORDS = _COMMON_WORDS.split()


class Workload(BaseModel):
    """One kind of request, with exact answer lengths."""

    model_config = ConfigDict(frozen=True)

    name: WorkloadName
    modalities: Modalities
    prompt_tokens: int
    """Approximate tokens of the text: most words are one token."""
    audio_seconds: float
    """Audio in the question; 0 for none."""
    text_tokens: int
    codec_tokens: int
    """0 if no speech is requested. Where a frame has several codes, it counts as one token."""
    min_codec_tokens: int | None = None
    """If set, each answer has between these and `codec_tokens`, and its text is as long in proportion."""
    samples_per_codec_token: int = SAMPLES_PER_CODEC_TOKEN
    """At 24 kHz."""
    size: str | None = None
    """Of the image, as in "1024x1024"; None for the model's default."""
    steps: int | None = None
    """Denoising steps; None for the pipeline's default."""
    partial_images: int = 0
    """Previews to ask for; a stream may have fewer."""

    @property
    def makes_images(self) -> bool:
        return self.modalities == "image"

    @property
    def reads_aloud(self) -> bool:
        return self.modalities == "audio"

    @property
    def expected_samples(self) -> int:
        """Samples of the answer's speech, at 24 kHz."""
        return self.codec_tokens * self.samples_per_codec_token


class Turn(BaseModel):
    """The content of one request."""

    model_config = ConfigDict(frozen=True)

    system: str
    text: str
    """"" if the question is spoken."""
    wav: bytes | None


_W1 = Workload(
    name="W1", modalities="text,audio", prompt_tokens=60, audio_seconds=0, text_tokens=64, codec_tokens=250
)
WORKLOADS: dict[WorkloadName, Workload] = {
    "W1": _W1,
    "W2": _W1.model_copy(update={"name": "W2", "prompt_tokens": _FIXED_PROMPT_TOKENS, "audio_seconds": 5.0}),
    "W3": _W1.model_copy(
        update={"name": "W3", "prompt_tokens": 2500, "text_tokens": 900, "codec_tokens": 3500}
    ),
    "tts": Workload(
        name="tts",
        modalities="audio",
        prompt_tokens=36,
        audio_seconds=0,
        text_tokens=0,
        min_codec_tokens=25,
        codec_tokens=150,
        samples_per_codec_token=1920,
    ),
    "images": Workload(
        name="images",
        modalities="image",
        prompt_tokens=20,
        audio_seconds=0,
        text_tokens=0,
        codec_tokens=0,
        partial_images=1,
    ),
}


def with_drawn_length(workload: Workload, rng: np.random.Generator) -> Workload:
    if workload.min_codec_tokens is None:
        return workload
    codec_tokens = int(rng.integers(workload.min_codec_tokens, workload.codec_tokens, endpoint=True))
    words = max(1, round(workload.prompt_tokens * codec_tokens / workload.codec_tokens))
    return workload.model_copy(
        update={"codec_tokens": codec_tokens, "prompt_tokens": words, "min_codec_tokens": None}
    )


def make_turn(workload: Workload, rng: np.random.Generator) -> Turn:
    """Returns a turn that differs from all others from its first words on, and in its audio, so that no
    prefix cache or media cache can serve it."""
    has_system_prompt = not (workload.makes_images or workload.reads_aloud)
    fixed_tokens = _FIXED_PROMPT_TOKENS if has_system_prompt else 0
    words = max(workload.prompt_tokens - fixed_tokens, 0 if workload.audio_seconds else 1)
    tag = " ".join(rng.choice(_WORDS, size=5))
    return Turn(
        system=f"Conversation {tag}. {SYSTEM_PROMPT}",
        text=" ".join(rng.choice(_WORDS, size=words)),
        wav=question_wav(workload.audio_seconds, rng) if workload.audio_seconds else None,
    )


def question_wav(seconds: float, rng: np.random.Generator) -> bytes:
    """Returns a mono 16-bit WAV file of noise: the length of the answer is given, so only the length of the
    question matters. The same state of `rng` gives the same file."""
    samples = rng.uniform(-0.5, 0.5, round(seconds * QUESTION_SAMPLE_RATE))
    file = io.BytesIO()
    soundfile.write(file, samples, QUESTION_SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()
