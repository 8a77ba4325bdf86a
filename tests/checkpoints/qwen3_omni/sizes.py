"""Dimensions of Qwen3-Omni demo checkpoints, and named sizes."""

from dataclasses import dataclass

from omni_server.errors import ConfigError


@dataclass(frozen=True)
class ExpertSize:
    """A mixture of experts. On a CPU, vLLM needs widths that are multiples of 32."""

    experts: int
    active: int
    """Experts per token."""
    intermediate: int
    shared: int = 0
    """Width of the talker's shared expert; the thinker has none."""


@dataclass(frozen=True)
class MoeTextSize:
    """A Qwen3-MoE decoder. vLLM's CPU attention has head sizes of 32, 64, 80, 96, 112, 128 and more."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: ExpertSize
    mrope_section: tuple[int, int, int]
    """Frequencies for time, height and width; they sum to head_dim / 2."""
    rope_theta: float
    """Small (genuine: 1e6), so that in short prompts even the lowest frequencies turn."""


@dataclass(frozen=True)
class AudioSize:
    """The audio encoder."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    conv_channels: int
    """Channels of the three convolutions before it, each of stride 2."""


@dataclass(frozen=True)
class VisionSize:
    """The image and video encoder: patches of 16 pixels, 2 x 2 of them merged into one token."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    deepstack_layers: tuple[int, ...]
    """Their outputs are added to as many of the thinker's first layers."""


@dataclass(frozen=True)
class PredictorSize:
    """The code predictor; as wide as the talker, because their embeddings are added."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class Code2WavSize:
    """The decoder from codes to a waveform, 1920 samples per frame."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    sliding_window: int
    decoder_channels: int
    """Halved at each of four upsampling steps, so a multiple of 16."""


@dataclass(frozen=True)
class DemoSize:
    thinker: MoeTextSize
    accept_hidden_layer: int
    """Index into the thinker's hidden states (0: embeddings) of what the talker gets at media positions.
    Genuine: 24 of 48 layers, behind those that vision is added to, where implementations differ."""
    audio: AudioSize
    vision: VisionSize
    talker: MoeTextSize
    predictor: PredictorSize
    code2wav: Code2WavSize

    def __post_init__(self) -> None:
        for name, text in (("thinker", self.thinker), ("talker", self.talker)):
            if 2 * sum(text.mrope_section) != text.head_dim:
                raise ConfigError(
                    f"{name}: mrope_section {text.mrope_section} must sum to half of {text.head_dim}"
                )
        if not len(self.vision.deepstack_layers) < self.accept_hidden_layer < self.thinker.layers:
            raise ConfigError(
                f"accept_hidden_layer {self.accept_hidden_layer} must lie behind the "
                f"{len(self.vision.deepstack_layers)} layers that vision is added to, and before the last"
            )
        if self.code2wav.decoder_channels % 16:
            raise ConfigError(
                f"code2wav: decoder_channels must be a multiple of 16, not {self.code2wav.decoder_channels}"
            )


SIZES = {
    # As in the genuine model, heads x head_dim is not the talker's hidden size.
    "tiny": DemoSize(
        thinker=MoeTextSize(128, 5, 4, 2, 32, ExpertSize(8, 2, 64), (6, 5, 5), 100.0),
        accept_hidden_layer=4,
        audio=AudioSize(64, 2, 2, 128, 16),
        vision=VisionSize(64, 3, 2, 128, (0, 1)),
        talker=MoeTextSize(64, 2, 4, 2, 32, ExpertSize(4, 2, 32, shared=64), (6, 5, 5), 100.0),
        predictor=PredictorSize(2, 2, 1, 32, 128),
        code2wav=Code2WavSize(64, 2, 2, 128, 72, 64),
    ),
    # All sizes differ, and each part has more layers.
    "wide": DemoSize(
        thinker=MoeTextSize(192, 7, 6, 2, 32, ExpertSize(6, 3, 32), (8, 4, 4), 200.0),
        accept_hidden_layer=5,
        audio=AudioSize(96, 3, 3, 160, 24),
        vision=VisionSize(96, 4, 3, 160, (0, 1, 3)),
        talker=MoeTextSize(96, 3, 2, 1, 64, ExpertSize(6, 3, 64, shared=32), (12, 10, 10), 50.0),
        predictor=PredictorSize(3, 3, 3, 32, 160),
        code2wav=Code2WavSize(96, 3, 3, 192, 40, 96),
    ),
}
