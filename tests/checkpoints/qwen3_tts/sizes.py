"""Dimensions of Qwen3-TTS demo checkpoints, and named sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextSize:
    """A Qwen3 decoder. vLLM's CPU attention has head sizes of 32, 64, 80, 96, 112, 128 and more."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class DecoderSize:
    """The decoder from codes to a waveform, 1920 samples per frame."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    """As in the genuine model, heads x head_dim is not the hidden size."""
    intermediate: int
    sliding_window: int
    codebook_dim: int
    """Twice the width of a codebook's vectors."""
    latent: int
    channels: int
    """Halved at each of four upsampling steps, so a multiple of 16."""


@dataclass(frozen=True)
class SpeakerSize:
    """The encoder from reference audio to the vector of a voice, which is as wide as the talker."""

    channels: int
    attention_channels: int
    se_channels: int
    res2net_scale: int


@dataclass(frozen=True)
class AudioEncoderSize:
    """The encoder from reference audio to codes, a Mimi without its decoder."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    filters: int
    codebook_dim: int


@dataclass(frozen=True)
class DemoSize:
    published: str
    """`tts_model_size` of the published model of this shape."""
    talker: TextSize
    mrope_section: tuple[int, int, int]
    """Frequencies for time, height and width; they sum to head_dim / 2."""
    text_hidden: int
    predictor: TextSize
    rope_theta: float
    """Of both. Small (genuine: 1e6), so that in short prompts even the lowest frequencies turn."""
    decoder: DecoderSize
    speaker: SpeakerSize
    audio_encoder: AudioEncoderSize


_SPEAKER = SpeakerSize(16, 8, 8, 4)
_AUDIO_ENCODER = AudioEncoderSize(32, 2, 2, 64, 4, 8)

SIZES = {
    # As in 1.7B, the predictor is narrower than the talker, and projects what it gets from it.
    "tiny": DemoSize(
        published="1b7",
        talker=TextSize(64, 2, 4, 2, 32, 128),
        mrope_section=(6, 5, 5),
        text_hidden=48,
        predictor=TextSize(32, 2, 2, 1, 32, 64),
        rope_theta=100.0,
        decoder=DecoderSize(32, 2, 4, 16, 64, 72, 32, 48, 64),
        speaker=_SPEAKER,
        audio_encoder=_AUDIO_ENCODER,
    ),
    # As in 0.6B, both are equally wide. All sizes differ from those of tiny.
    "tiny-0.6b": DemoSize(
        published="0b6",
        talker=TextSize(96, 3, 2, 1, 64, 160),
        mrope_section=(12, 10, 10),
        text_hidden=64,
        predictor=TextSize(96, 3, 3, 3, 32, 96),
        rope_theta=50.0,
        decoder=DecoderSize(48, 3, 3, 32, 96, 40, 48, 64, 96),
        speaker=_SPEAKER,
        audio_encoder=_AUDIO_ENCODER,
    ),
}

_GENUINE_DECODER = DecoderSize(512, 8, 16, 64, 1024, 72, 512, 1024, 1536)
_GENUINE_SPEAKER = SpeakerSize(512, 128, 128, 8)
_GENUINE_AUDIO_ENCODER = AudioEncoderSize(512, 8, 8, 2048, 64, 256)
_GENUINE_PREDICTOR = TextSize(1024, 5, 16, 8, 128, 3072)

PUBLISHED = {
    "1.7b": DemoSize(
        published="1b7",
        talker=TextSize(2048, 28, 16, 8, 128, 6144),
        mrope_section=(24, 20, 20),
        text_hidden=2048,
        predictor=_GENUINE_PREDICTOR,
        rope_theta=1e6,
        decoder=_GENUINE_DECODER,
        speaker=_GENUINE_SPEAKER,
        audio_encoder=_GENUINE_AUDIO_ENCODER,
    ),
    "0.6b": DemoSize(
        published="0b6",
        talker=TextSize(1024, 28, 16, 8, 128, 3072),
        mrope_section=(24, 20, 20),
        text_hidden=2048,
        predictor=_GENUINE_PREDICTOR,
        rope_theta=1e6,
        decoder=_GENUINE_DECODER,
        speaker=_GENUINE_SPEAKER,
        audio_encoder=_GENUINE_AUDIO_ENCODER,
    ),
}
"""The published models' sizes."""
