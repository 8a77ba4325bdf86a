"""What the tests of servers know about the families whose demo checkpoints they serve."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class OmniFamily:
    name: str
    """As scripts/make_demo_checkpoint takes it; the id of the tests."""
    voices: tuple[str, ...]
    """In the order of `/v1/models`."""
    default_voice: str
    samples_per_code: int
    """At 24 kHz."""
    lead_samples: int
    """An utterance is shorter than its codec tokens by this many samples (`CodecLayout.lead_samples`)."""
    stages: tuple[str, ...] = ("thinker", "talker", "code2wav")
    image_tokens: tuple[int, int] = (0, 0)
    """Of tests/data's shapes.png, 140 x 112, and gradient.png."""
    speech_tokens: tuple[int, int] = (0, 0)
    """Fewest and most for the 2.1 s of speech_hello.wav."""
    longest_audio_tokens: int = 0
    """Of 300 s."""
    speaks_last_token: bool = False
    """Whether the last token of a text that was cut off is spoken: the talker needs no hidden state of it."""

    @property
    def chats(self) -> bool:
        """Or only reads aloud. The rows of what a thinker writes go through shared memory."""
        return "thinker" in self.stages

    @property
    def stage_config(self) -> str:
        return f"configs/{self.name}.demo-cpu.yaml"

    def num_samples(self, num_codes: int) -> int:
        """Of a whole utterance."""
        return max(0, self.samples_per_code * num_codes - self.lead_samples)


QWEN2_5_OMNI = OmniFamily(
    name="qwen2_5_omni",
    voices=("Chelsie", "Ethan"),
    default_voice="Chelsie",
    samples_per_code=480,
    lead_samples=0,
    image_tokens=(20, 9),  # squares of 28
    speech_tokens=(50, 54),  # 25 a second
    longest_audio_tokens=7500,
)
QWEN3_OMNI = OmniFamily(
    name="qwen3_omni",
    voices=("Chelsie", "Ethan", "Aiden"),
    default_voice="Ethan",
    samples_per_code=1920,
    lead_samples=555,
    image_tokens=(16, 9),  # squares of 32
    speech_tokens=(26, 30),  # 13 a second
    longest_audio_tokens=3900,
    speaks_last_token=True,
)
QWEN3_TTS = OmniFamily(
    name="qwen3_tts",
    voices=("Serena", "Vivian", "Uncle_fu", "Ryan", "Aiden", "Ono_anna", "Sohee", "Eric", "Dylan"),
    default_voice="Serena",
    samples_per_code=1920,
    lead_samples=0,
    stages=("talker", "code2wav"),
)
OMNI_FAMILIES = (QWEN2_5_OMNI, QWEN3_OMNI)
FAMILIES = {family.name: family for family in OMNI_FAMILIES}


def family_of(checkpoint: Path) -> OmniFamily:
    """The one whose checkpoint is in this folder. Raises `ValueError` for any other."""
    model_type = json.loads((checkpoint / "config.json").read_text())["model_type"]
    for family in OMNI_FAMILIES:
        if model_type.startswith(family.name):
            return family
    raise ValueError(f"{checkpoint} has a checkpoint of '{model_type}'")


def for_families(*families: OmniFamily) -> pytest.MarkDecorator:
    """Runs a test with the servers of these families."""
    return pytest.mark.parametrize(
        "family", families, ids=[family.name for family in families], indirect=True
    )


for_each_family = for_families(*OMNI_FAMILIES)
"""Runs a test with the servers of all families that chat; without it, a test runs with that of `--family`."""
for_each_reader = for_families(*OMNI_FAMILIES, QWEN3_TTS)
"""The same of all that read aloud."""
