"""Dimensions of demo checkpoints, and named sizes."""

from dataclasses import dataclass

from omni_server.errors import ConfigError


@dataclass(frozen=True)
class TextSize:
    """A Qwen2 decoder. Head sizes of vLLM's CPU attention: 32, 64, 80, 96, 112, 128, 160, 192, 224, 256."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """hidden / heads in the thinker, free in the talker."""
    intermediate: int
    mrope_section: tuple[int, int, int]
    """Frequencies for time, height and width; they sum to head_dim / 2."""
    rope_theta: float
    """Small (genuine: 1e6), so that in short prompts even the lowest frequencies, the width's, turn."""


@dataclass(frozen=True)
class AudioSize:
    """The Whisper-like audio encoder."""

    hidden: int
    layers: int
    heads: int
    intermediate: int


@dataclass(frozen=True)
class VisionSize:
    """The image and video encoder: patches of 14 pixels, 2 x 2 of them merged into one token."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    full_attention_layers: tuple[int, ...]


@dataclass(frozen=True)
class DiTSize:
    """The flow-matching transformer from codes to mel frames."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    code_embedding: int
    speaker_encoder: int
    """ECAPA's output width and its channel count, tripled in the last layer."""
    look_ahead_layers: tuple[int, ...]
    look_backward_layers: tuple[int, ...]


@dataclass(frozen=True)
class VocoderSize:
    """BigVGAN. Upsampling is fixed: 5 x 3 x 2 x 2 x 2 x 2 = 240 samples per mel frame."""

    channels: int
    """Halved at each of six upsampling steps, so a multiple of 64."""
    resblock_kernels: tuple[int, ...]


@dataclass(frozen=True)
class DemoSize:
    thinker: TextSize
    audio: AudioSize
    vision: VisionSize
    talker: TextSize
    dit: DiTSize
    vocoder: VocoderSize

    def __post_init__(self) -> None:
        for name, text in (("thinker", self.thinker), ("talker", self.talker)):
            if 2 * sum(text.mrope_section) != text.head_dim:
                raise ConfigError(
                    f"{name}: mrope_section {text.mrope_section} must sum to half of {text.head_dim}"
                )
        if self.thinker.heads * self.thinker.head_dim != self.thinker.hidden:
            raise ConfigError(
                "thinker: heads x head_dim must be the hidden size (vLLM's Qwen2 takes it for granted)"
            )
        if self.vocoder.channels % 64:
            raise ConfigError(f"vocoder: channels must be a multiple of 64, not {self.vocoder.channels}")


SIZES = {
    # As in the genuine model, the talker's heads x head_dim is not its hidden size.
    "tiny": DemoSize(
        thinker=TextSize(128, 2, 4, 2, 32, 256, (4, 6, 6), 100.0),
        audio=AudioSize(64, 2, 2, 128),
        vision=VisionSize(64, 2, 2, 128, (1,)),
        talker=TextSize(64, 2, 4, 2, 32, 128, (4, 6, 6), 100.0),
        dit=DiTSize(64, 2, 2, 32, 32, 16, look_ahead_layers=(0,), look_backward_layers=(0, 1)),
        vocoder=VocoderSize(64, (3,)),
    ),
    # All sizes differ, and a talker section is zero as in Qwen2.5-Omni-3B ([16, 16, 0]).
    "wide": DemoSize(
        thinker=TextSize(192, 3, 6, 2, 32, 320, (6, 5, 5), 200.0),
        audio=AudioSize(96, 3, 3, 160),
        vision=VisionSize(96, 3, 3, 160, (0, 2)),
        talker=TextSize(96, 3, 4, 1, 32, 192, (8, 8, 0), 50.0),
        dit=DiTSize(96, 3, 3, 32, 48, 24, look_ahead_layers=(1,), look_backward_layers=(0, 2)),
        vocoder=VocoderSize(128, (3, 7)),
    ),
}
