"""How Qwen3-TTS' codec frames relate to audio. Derived from the config alone, without torch."""

from collections.abc import Mapping
from typing import Any

from stages.qwen_codec.codec_layout import Code2WavLayout, code2wav_layout

PRE_CONV_KERNEL = 3
"""Width of the convolution in front of the decoder's transformer."""


def decoder_layout(config: Mapping[str, Any]) -> Code2WavLayout:
    """`config`: the speech tokenizer's `decoder_config`. Raises `KeyError`."""
    return code2wav_layout(config, has_lead=False, front_context=PRE_CONV_KERNEL - 1)
