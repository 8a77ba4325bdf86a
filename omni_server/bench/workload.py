"""What is asked: the workloads W1, W2 and W3, and the single turns of which each consists."""

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from omni_server.bench.speech import speech_like, wav_file

WorkloadName = Literal["W1", "W2", "W3"]
Modalities = Literal["text", "text,audio"]

SAMPLES_PER_CODE = 480
"""Of Qwen2.5-Omni's code2wav: two mel frames per code, 240 samples per mel frame."""
SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
_FIXED_PROMPT_TOKENS = 52
"""About what the system prompt, the words in front of it and the chat template come to; the sentence is the rest."""
_COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea kid body back parent face level office"
)
_WORDS = _COMMON_WORDS.split()


class Workload(BaseModel):
    """One kind of request, with exact lengths of the answer."""

    model_config = ConfigDict(frozen=True)

    name: WorkloadName
    modalities: Modalities
    prompt_tokens: int
    """Approximately, in words of which most are one token; sound that is sent comes on top."""
    audio_seconds: float
    """Of sound in the question; 0 for none."""
    text_tokens: int
    codec_tokens: int
    """0 where no speech is asked for."""

    @property
    def expected_samples(self) -> int:
        """Of the answer's speech, at 24 kHz."""
        return self.codec_tokens * SAMPLES_PER_CODE


class Turn(BaseModel):
    """What one request says."""

    model_config = ConfigDict(frozen=True)

    system: str
    text: str
    """"" where the question is spoken."""
    wav: bytes | None


WORKLOADS: dict[WorkloadName, Workload] = {
    "W1": Workload(
        name="W1", modalities="text,audio", prompt_tokens=60, audio_seconds=0, text_tokens=64, codec_tokens=250
    ),
    "W2": Workload(
        name="W2",
        modalities="text,audio",
        prompt_tokens=_FIXED_PROMPT_TOKENS,
        audio_seconds=5.0,
        text_tokens=64,
        codec_tokens=250,
    ),
    "W3": Workload(
        name="W3", modalities="text,audio", prompt_tokens=2500, audio_seconds=0, text_tokens=900, codec_tokens=3500
    ),
}


def make_turn(workload: Workload, rng: np.random.Generator) -> Turn:
    """A turn that differs from every other one from its first words on, and in its sound, so that no cache of
    prefixes or of media answers it."""
    words = max(workload.prompt_tokens - _FIXED_PROMPT_TOKENS, 0 if workload.audio_seconds else 1)
    tag = " ".join(rng.choice(_WORDS, size=5))
    return Turn(
        system=f"Conversation {tag}. {SYSTEM_PROMPT}",
        text=" ".join(rng.choice(_WORDS, size=words)),
        wav=wav_file(speech_like(workload.audio_seconds, rng)) if workload.audio_seconds else None,
    )
