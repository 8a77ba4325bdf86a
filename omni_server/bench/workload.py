"""The workloads, their turns, and the speech-like audio in them."""

import io
import wave
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

WorkloadName = Literal["W1", "W2", "W3", "images"]
Modalities = Literal["text", "text,audio", "image"]

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
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name team "
    "minute idea kid body back parent face level office"
)
_WORDS = _COMMON_WORDS.split()

_FORMANTS_HZ = (
    (700.0, 1200.0, 2600.0),
    (300.0, 2300.0, 3000.0),
    (450.0, 800.0, 2600.0),
    (550.0, 1700.0, 2500.0),
)
_FORMANT_WIDTH_HZ = 160.0
_SYLLABLE_S = 0.22
_PEAK = 0.5
_HARMONICS_UP_TO_HZ = 4000.0


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


def make_turn(workload: Workload, rng: np.random.Generator) -> Turn:
    """Returns a turn that differs from all others from its first words on, and in its audio, so that no
    prefix cache or media cache can serve it."""
    fixed_tokens = 0 if workload.makes_images else _FIXED_PROMPT_TOKENS
    words = max(workload.prompt_tokens - fixed_tokens, 0 if workload.audio_seconds else 1)
    tag = " ".join(rng.choice(_WORDS, size=5))
    return Turn(
        system=f"Conversation {tag}. {SYSTEM_PROMPT}",
        text=" ".join(rng.choice(_WORDS, size=words)),
        wav=wav_file(speech_like(workload.audio_seconds, rng)) if workload.audio_seconds else None,
    )


def speech_like(seconds: float, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Synthesises audio that an audio encoder treats as speech: harmonics of a wandering pitch under
    vowel-like formants, about 4.5 syllables per second, with a little breath noise.

    Returns mono float32 [round(seconds * 16000)] within -0.5 to 0.5. The same state of `rng` gives the same
    samples.
    """
    count = round(seconds * QUESTION_SAMPLE_RATE)
    time_s = np.arange(count) / QUESTION_SAMPLE_RATE
    syllables = max(1, int(np.ceil(seconds / _SYLLABLE_S)))
    middles_s = (np.arange(syllables) + 0.5) * _SYLLABLE_S
    pitch_hz = np.interp(time_s, middles_s, rng.uniform(100.0, 200.0, syllables))
    vowels = np.array(_FORMANTS_HZ)[rng.integers(len(_FORMANTS_HZ), size=syllables)]
    formants_hz = [np.interp(time_s, middles_s, vowels[:, formant]) for formant in range(vowels.shape[1])]
    phase = 2 * np.pi * np.cumsum(pitch_hz) / QUESTION_SAMPLE_RATE
    voice = np.zeros(count)
    for harmonic in range(1, int(_HARMONICS_UP_TO_HZ / pitch_hz.min()) + 1):
        distances = [(harmonic * pitch_hz - formant_hz) / _FORMANT_WIDTH_HZ for formant_hz in formants_hz]
        gain = np.sum([1 / (1 + distance**2) for distance in distances], axis=0)
        voice += gain * np.sin(harmonic * phase) / np.sqrt(harmonic)
    voice += 0.02 * rng.standard_normal(count)
    loudness = np.interp(time_s, middles_s, rng.uniform(0.2, 1, syllables))
    voice *= np.sin(np.pi * time_s / _SYLLABLE_S) ** 2 * loudness
    return (_PEAK * voice / max(np.abs(voice).max(), 1e-9)).astype(np.float32)


def wav_file(samples: npt.NDArray[np.float32]) -> bytes:
    """Returns a mono 16-bit WAV file at 16 kHz of float samples [n] in [-1, 1]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(QUESTION_SAMPLE_RATE)
        writer.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
