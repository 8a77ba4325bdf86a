"""Memory that each stage of a Qwen3-TTS checkpoint needs, from its config files alone."""

import math
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Model

from omni_server.config.checkpoint_files import config_errors, num_bits
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import Stage
from omni_server.family.footprint import KvLayout, StageFootprint
from stages.checkpoint_footprint import dtype_name
from stages.qwen3_tts.checkpoint_config import CODEC_FOLDER
from stages.qwen3_tts.codec_network import Qwen3TTSNetwork
from stages.qwen3_tts.hf_config import (
    Qwen3TTSConfig,
    Qwen3TTSTalkerConfig,
    Qwen3TTSTokenizerConfig,
    code2wav_config,
    predictor_config,
    talker_config,
    voice_encoder_config,
)
from stages.qwen3_tts.recording import SAMPLES_PER_FRAME
from stages.qwen3_tts.voice_network import VoiceEncoderNetwork
from stages.qwen_codec.code_predictor import CodePredictor
from stages.qwen_codec.footprint import code2wav_footprint
from stages.qwen_codec.options import Code2WavStage, VoiceEncoderStage

_TEXT_EMBEDDING = "talker.model.text_embedding.weight"
"""Stays in host memory."""


def stage_footprints(model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
    """See `ModelFamily.footprints`."""
    with config_errors(f"{model_dir} describes no model that can be built"), torch.device("meta"):
        whole = Qwen3TTSConfig.from_pretrained(model_dir)
        return {name: _footprint(model_dir, whole, config, stage) for name, stage in config.stages.items()}


def _footprint(model_dir: Path, whole: Qwen3TTSConfig, config: StageConfig, stage: Stage) -> StageFootprint:
    match stage:
        case Code2WavStage():
            decoder = code2wav_config(Qwen3TTSTokenizerConfig.from_pretrained(model_dir / CODEC_FOLDER))
            network = Qwen3TTSNetwork(decoder)
            tensors = {
                f"{CODEC_FOLDER}/decoder.{name}": tuple(weight.shape)
                for name, weight in network.named_parameters()
                if not name.startswith("code_embedding.")  # made of several weights
            }
            return code2wav_footprint(network, decoder, stage.compute_dtype(config.platform), tensors)
        case VoiceEncoderStage():
            encoder = VoiceEncoderNetwork(voice_encoder_config(whole), model_dir)
            return _voice_encoder(encoder, stage.compute_dtype(config.platform))
        case _:
            return _talker(talker_config(whole), dtype_name(whole), stage)


def _talker(config: Qwen3TTSTalkerConfig, dtype: str, stage: Stage) -> StageFootprint:
    shapes = _talker_shapes(config)
    num_weights = sum(math.prod(shape) for name, shape in shapes.items() if name != _TEXT_EMBEDDING)
    return StageFootprint(
        tensors=shapes,
        dtype=dtype,
        kv=KvLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim),
        # The two feed-forward halves and their product; residual, norm, input and output.
        values_per_token=3 * config.intermediate_size + 4 * config.hidden_size,
        weight_bytes=num_weights * num_bits(dtype if stage.dtype == "auto" else stage.dtype) // 8,
    )


def _talker_shapes(config: Qwen3TTSTalkerConfig) -> dict[str, tuple[int, ...]]:
    """Of all weights that the talker loads, by their names in the checkpoint."""
    width, text_width = config.hidden_size, config.text_hidden_size
    modules = {
        "model": Qwen3Model(config),
        "model.text_embedding": nn.Embedding(config.text_vocab_size, text_width),
        "text_projection.linear_fc1": nn.Linear(text_width, text_width),
        "text_projection.linear_fc2": nn.Linear(text_width, width),
        "codec_head": nn.Linear(width, config.vocab_size, bias=False),
    }
    weights = {f"{name}.{key}": w for name, part in modules.items() for key, w in part.state_dict().items()}
    predictor = CodePredictor(predictor_config(config), width, max_batch_size=1, use_kernels=False)
    weights |= {f"code_predictor.{name}": part for name, part in predictor.checkpoint_parts().items()}
    return {
        f"talker.{name.replace('embed_tokens', 'codec_embedding')}": tuple(weight.shape)
        for name, weight in weights.items()
    }


def _voice_encoder(network: VoiceEncoderNetwork, dtype: str) -> StageFootprint:
    value_bytes = num_bits(dtype) // 8
    weights = network.state_dict()
    # At the full rate, a residual unit of the audio encoder holds its input, the activations of both layers
    # and the output.
    return StageFootprint(
        tensors={
            name.replace("audio_encoder", f"{CODEC_FOLDER}/encoder", 1): tuple(weight.shape)
            for name, weight in weights.items()
        },
        dtype=dtype,
        values_per_token=4 * network.audio_encoder.config.num_filters * SAMPLES_PER_FRAME,
        weight_bytes=value_bytes * sum(weight.numel() for weight in weights.values()),
    )
