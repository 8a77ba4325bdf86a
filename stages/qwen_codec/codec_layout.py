"""How codec frames relate to audio. Derived from the config alone, without torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_server.errors import ConfigError
from omni_server.family.codec import CodecLayout

CONV_KERNEL = 7
"""Width of every convolution of `Qwen3OmniMoeCode2Wav` that sees more than one position."""

NUM_CODEBOOKS = 16
"""Of all published models."""

UNIT_DILATIONS = (1, 3, 9)
"""Dilations of a decoder block's residual units (`Qwen3OmniMoeCode2WavDecoderBlock`)."""


@dataclass(frozen=True, kw_only=True)
class Code2WavLayout(CodecLayout):
    context_frames: int
    """Earlier frames that the audio of a frame depends on. With that many, a lost state can be computed again
    exactly; fewer give other audio."""


def check_num_codebooks(key: str, number: object) -> None:
    """Raises `ConfigError`, which names the `key` of the config."""
    if number != NUM_CODEBOOKS:
        raise ConfigError(f"{key} is {number}, and only {NUM_CODEBOOKS} is supported")


def code2wav_layout(
    config: Mapping[str, Any], *, has_lead: bool = True, front_context: int = 0
) -> Code2WavLayout:
    """`config`: the decoder's; `front_context`: earlier frames that the input of its transformer depends on.
    Raises `KeyError`, and `ValueError` for a config that no decoder can have."""
    upsampling_ratios: Sequence[int] = config["upsampling_ratios"]
    upsample_rates: Sequence[int] = config["upsample_rates"]
    # Backwards from a frame's first sample: earlier positions that it needs, at the rate of each level. One
    # value of an upsampled level depends on the position it comes from, and with a lead on the one before.
    context = CONV_KERNEL - 1
    for rate in reversed(upsample_rates):
        context = -(-(context + (CONV_KERNEL - 1) * sum(UNIT_DILATIONS)) // rate) + 1
    context += CONV_KERNEL - 1
    for ratio in reversed(upsampling_ratios):
        context = -(-(context + CONV_KERNEL - 1) // ratio)
    return Code2WavLayout(
        frames_per_block=1,
        samples_per_frame=math.prod(upsampling_ratios) * math.prod(upsample_rates),
        lead_samples=lead_after(upsample_rates) if has_lead else 0,
        context_frames=front_context
        + int(config["num_hidden_layers"]) * (int(config["sliding_window"]) - 1)
        + context,
    )


def lead_after(upsample_rates: Sequence[int]) -> int:
    """Returns how many positions decoder blocks with a lead and these rates, the first one first, drop at the
    beginning, at the rate of their output. The transposed convolution of each block drops its first input,
    because it adds up pairs of neighbours."""
    lead = 0
    for rate in upsample_rates:
        lead = (lead + 1) * rate
    return lead
