"""Memory that the codec decoder needs."""

import math
from collections.abc import Mapping

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from omni_server.config.checkpoint_files import num_bits
from omni_server.family.footprint import StageFootprint
from stages.checkpoint_footprint import widest_layer
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.state import values_per_stream


def code2wav_footprint(
    network: Code2WavNetwork,
    config: Qwen3OmniMoeCode2WavConfig,
    dtype: str,
    tensors: Mapping[str, tuple[int, ...]],
) -> StageFootprint:
    """`network` may be on the meta device; for `tensors`, see `StageFootprint`."""
    value_bytes = num_bits(dtype) // 8
    # The widest layer holds its input, and output, activations and their copy with the state in front.
    widest = widest_layer(config.decoder_dim, math.prod(config.upsampling_ratios), config.upsample_rates)
    return StageFootprint(
        tensors=tensors,
        dtype=dtype,
        values_per_token=math.ceil(4 * widest / config.num_quantizers),  # a token is one code of a frame
        stream_state_bytes=value_bytes * values_per_stream(network),
        weight_bytes=value_bytes * sum(weight.numel() for weight in network.parameters()),
    )
