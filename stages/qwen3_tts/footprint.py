"""Memory that each stage of a Qwen3-TTS checkpoint needs, from its config files alone."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omni_server.config.checkpoint_files import num_bits
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import Stage
from omni_server.family import KvLayout, StageFootprint
from stages.checkpoint_footprint import widest_layer
from stages.qwen3_tts.checkpoint_config import (
    CheckpointConfig,
    DecoderConfig,
    TalkerConfig,
    TransformerSizes,
    read_checkpoint_config,
    read_decoder_config,
)
from stages.qwen3_tts.codec_layout import PRE_CONV_KERNEL
from stages.qwen_codec.codec_layout import CONV_KERNEL, UNIT_DILATIONS
from stages.qwen_codec.options import Code2WavStage

_TEXT_EMBEDDING = "talker.model.text_embedding.weight"
"""Stays in host memory."""

_Shapes = dict[str, tuple[int, ...]]


def stage_footprints(model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
    """See `ModelFamily.footprints`."""
    checkpoint, decoder = read_checkpoint_config(model_dir), read_decoder_config(model_dir)
    return {
        name: _code2wav(decoder, stage.compute_dtype(config.platform))
        if isinstance(stage, Code2WavStage)
        else _talker(checkpoint, stage)
        for name, stage in config.stages.items()
    }


def _talker(checkpoint: CheckpointConfig, stage: Stage) -> StageFootprint:
    talker, dtype = checkpoint.talker_config, checkpoint.dtype_name
    shapes = talker_shapes(talker)
    num_weights = sum(math.prod(shape) for name, shape in shapes.items() if name != _TEXT_EMBEDDING)
    return StageFootprint(
        tensors=shapes,
        dtype=dtype,
        loads_float32=False,
        encodes_media=False,
        kv=KvLayout(talker.num_hidden_layers, talker.num_key_value_heads, talker.head_dim),
        # The two feed-forward halves and their product; residual, norm, input and output.
        values_per_token=3 * talker.intermediate_size + 4 * talker.hidden_size,
        weight_bytes=num_weights * num_bits(dtype if stage.dtype == "auto" else stage.dtype) // 8,
    )


def talker_shapes(talker: TalkerConfig) -> _Shapes:
    """Of all weights that the talker loads, by their names in the checkpoint."""
    predictor, text_width, width = talker.code_predictor_config, talker.text_hidden_size, talker.hidden_size
    shapes: _Shapes = {
        "model.codec_embedding.weight": (talker.vocab_size, width),
        "model.text_embedding.weight": (talker.text_vocab_size, text_width),
        "text_projection.linear_fc1.weight": (text_width, text_width),
        "text_projection.linear_fc1.bias": (text_width,),
        "text_projection.linear_fc2.weight": (width, text_width),
        "text_projection.linear_fc2.bias": (width,),
        "codec_head.weight": (talker.vocab_size, width),
        **_transformer("model.", talker),
        **_transformer("code_predictor.model.", predictor),
    }
    for i in range(talker.num_code_groups - 1):
        shapes[f"code_predictor.model.codec_embedding.{i}.weight"] = (predictor.vocab_size, width)
        shapes[f"code_predictor.lm_head.{i}.weight"] = (predictor.vocab_size, predictor.hidden_size)
    if predictor.hidden_size != width:
        shapes["code_predictor.small_to_mtp_projection.weight"] = (predictor.hidden_size, width)
        shapes["code_predictor.small_to_mtp_projection.bias"] = (predictor.hidden_size,)
    return {f"talker.{name}": shape for name, shape in shapes.items()}


def _transformer(prefix: str, sizes: TransformerSizes) -> _Shapes:
    width, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, keys = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    of_layer: _Shapes = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    layers = range(sizes.num_hidden_layers)
    of_layers = {f"{prefix}layers.{i}.{name}.weight": of_layer[name] for i in layers for name in of_layer}
    return {**of_layers, f"{prefix}norm.weight": (width,)}


def _code2wav(decoder: DecoderConfig, dtype: str) -> StageFootprint:
    value_bytes = num_bits(dtype) // 8
    layers = list(_decoder_layers(decoder))
    num_kept = sum(layer.in_channels * layer.num_kept for layer in layers)
    keys = 2 * decoder.num_key_value_heads * (decoder.sliding_window - 1) * decoder.head_dim
    samples = math.prod(decoder.upsampling_ratios)
    # The widest layer holds its input, and output, activations and their copy with the state in front.
    widest = widest_layer(decoder.decoder_dim, samples, decoder.upsample_rates)
    return StageFootprint(
        tensors={},  # only the weights of the checkpoint's own folder are compared with their files
        dtype=dtype,
        loads_float32=False,
        encodes_media=False,
        kv=None,
        values_per_token=math.ceil(4 * widest / decoder.num_quantizers),  # a token is one code of a frame
        stream_state_bytes=value_bytes * (num_kept + decoder.num_hidden_layers * keys),
        weight_bytes=value_bytes * sum(math.prod(layer[:3]) for layer in layers),
    )


class _Layer(NamedTuple):
    in_channels: int
    out_channels: int
    kernel: int = 1
    num_kept: int = 0
    """Positions of the input that are kept for the next window."""


def _decoder_layers(decoder: DecoderConfig) -> Iterator[_Layer]:
    """Those with a matrix of weights; all others are small."""
    width, inner, latent = decoder.hidden_size, decoder.intermediate_size, decoder.latent_dim
    queries = decoder.num_attention_heads * decoder.head_dim
    keys = decoder.num_key_value_heads * decoder.head_dim
    kept = CONV_KERNEL - 1
    yield _Layer(decoder.num_quantizers * decoder.codebook_size, decoder.codebook_dim)
    yield _Layer(decoder.codebook_dim, latent, PRE_CONV_KERNEL, PRE_CONV_KERNEL - 1)
    yield _Layer(latent, 2 * width)  # to the transformer's width, and from it
    for _ in range(decoder.num_hidden_layers):
        yield _Layer(width, 2 * queries + 2 * keys + 3 * inner)
    for ratio in decoder.upsampling_ratios:
        yield _Layer(latent, latent, ratio)
        yield _Layer(latent, 1, CONV_KERNEL, kept)
        yield _Layer(latent, 8 * latent)
    channels = decoder.decoder_dim
    yield _Layer(latent, channels, CONV_KERNEL, kept)
    for rate in decoder.upsample_rates:
        yield _Layer(channels, channels // 2, 2 * rate, 1)
        channels //= 2
        for dilation in UNIT_DILATIONS:
            yield _Layer(channels, channels, CONV_KERNEL, kept * dilation)
            yield _Layer(channels, channels)
    yield _Layer(channels, 1, CONV_KERNEL, kept)
