"""Memory that each stage of a Qwen3-TTS checkpoint needs, from its config files alone."""

import math
from pathlib import Path

import msgspec
import torch

from omni_server.config.checkpoint_files import num_bits
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import Stage
from omni_server.family import KvLayout, StageFootprint
from stages.checkpoint_footprint import widest_layer
from stages.qwen3_tts.checkpoint_config import (
    CODEC_FOLDER,
    CheckpointConfig,
    DecoderConfig,
    TalkerConfig,
    TransformerSizes,
    read_checkpoint_config,
    read_decoder_config,
)
from stages.qwen3_tts.codec_network import Qwen3TTSNetwork
from stages.qwen3_tts.hf_config import Qwen3TTSConfig, Qwen3TTSDecoderConfig, voice_encoder_config
from stages.qwen3_tts.options import VoiceEncoderStage
from stages.qwen3_tts.recording import SAMPLES_PER_FRAME
from stages.qwen3_tts.voice_network import VoiceEncoderNetwork
from stages.qwen_codec.code2wav.state import values_per_stream
from stages.qwen_codec.options import Code2WavStage

_TEXT_EMBEDDING = "talker.model.text_embedding.weight"
"""Stays in host memory."""

_Shapes = dict[str, tuple[int, ...]]


def stage_footprints(model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
    """See `ModelFamily.footprints`."""
    checkpoint, decoder = read_checkpoint_config(model_dir), read_decoder_config(model_dir)
    footprints = {}
    for name, stage in config.stages.items():
        match stage:
            case Code2WavStage():
                footprints[name] = _code2wav(decoder, stage.compute_dtype(config.platform))
            case VoiceEncoderStage():
                footprints[name] = _voice_encoder(model_dir, stage.compute_dtype(config.platform))
            case _:
                footprints[name] = _talker(checkpoint, stage)
    return footprints


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
    with torch.device("meta"):
        network = Qwen3TTSNetwork(Qwen3TTSDecoderConfig(**msgspec.structs.asdict(decoder)))
    # The widest layer holds its input, and output, activations and their copy with the state in front.
    widest = widest_layer(decoder.decoder_dim, math.prod(decoder.upsampling_ratios), decoder.upsample_rates)
    return StageFootprint(
        tensors={
            f"{CODEC_FOLDER}/decoder.{name}": tuple(weight.shape)
            for name, weight in network.named_parameters()
            if not name.startswith("code_embedding.")  # made of several weights
        },
        dtype=dtype,
        loads_float32=False,
        encodes_media=False,
        kv=None,
        values_per_token=math.ceil(4 * widest / decoder.num_quantizers),  # a token is one code of a frame
        stream_state_bytes=value_bytes * values_per_stream(network),
        weight_bytes=value_bytes * sum(weight.numel() for weight in network.parameters()),
    )


def _voice_encoder(model_dir: Path, dtype: str) -> StageFootprint:
    value_bytes = num_bits(dtype) // 8
    config = voice_encoder_config(Qwen3TTSConfig.from_pretrained(model_dir))
    with torch.device("meta"):
        network = VoiceEncoderNetwork(config, model_dir)
    speaker = network.speaker_encoder.named_parameters(prefix="speaker_encoder")
    # At the full rate, a residual unit of the audio encoder holds its input, the activations of both layers and
    # the output.
    return StageFootprint(
        tensors={name: tuple(weight.shape) for name, weight in speaker},
        dtype=dtype,
        loads_float32=False,
        encodes_media=False,
        kv=None,
        values_per_token=4 * network.audio_encoder.config.num_filters * SAMPLES_PER_FRAME,
        weight_bytes=value_bytes * sum(weight.numel() for weight in network.state_dict().values()),
    )
