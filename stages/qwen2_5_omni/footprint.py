"""Memory that each stage of a Qwen2.5-Omni checkpoint needs, from config.json alone."""

import math
from pathlib import Path

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from omni_server.config.checkpoint_files import config_errors
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import Stage
from omni_server.errors import ConfigError
from omni_server.family import NeededFile
from omni_server.family.footprint import KvLayout, StageFootprint
from stages import checkpoint_footprint
from stages.checkpoint_footprint import dtype_name, quantizable, read_config, widest_layer
from stages.qwen2_5_omni.code2wav.stream_kv import slot_shape
from stages.qwen2_5_omni.code2wav.voices import VOICES_FILE
from stages.qwen2_5_omni.options import Code2WavStage

NEEDED_FILES = (*checkpoint_footprint.NEEDED_FILES, NeededFile((VOICES_FILE,), "the voices"))

_LANGUAGE_MODEL = "thinker.model.layers."
_FP8 = {
    "quantization": "online",
    # Names as in vLLM's thinker. Audio and vision encoders, embeddings and lm_head do not match.
    "quantization_config": {"targets": {"language_model.model.layers.*_proj": "fp8_per_tensor"}},
}

_VOCODER_PREFIX = "token2wav.code2wav_bigvgan_model."
_PREFIXES: dict[str, str] = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}


def stage_footprints(model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
    """See `ModelFamily.footprints`."""
    with config_errors(f"{model_dir / 'config.json'} describes no model that can be built"):
        whole = read_config(model_dir, Qwen2_5OmniConfig)
        with torch.device("meta"):  # shapes only
            model = Qwen2_5OmniForConditionalGeneration(whole)
        tensors = model.state_dict()
        if whole.thinker_config.text_config.tie_word_embeddings:  # vLLM's thinker reads this
            for name in model.thinker._tied_weights_keys:
                del tensors[f"thinker.{name}"]
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return {name: _footprint(whole, config, stage, shapes) for name, stage in config.stages.items()}


def _footprint(
    whole: Qwen2_5OmniConfig, config: StageConfig, stage: Stage, all_shapes: dict[str, tuple[int, ...]]
) -> StageFootprint:
    prefix = _PREFIXES[stage.model_stage]
    shapes = {key: shape for key, shape in all_shapes.items() if key.startswith(prefix)}
    if not shapes:
        raise ConfigError(
            f"the checkpoint has no {stage.model_stage} (enable_audio_output in config.json): use a stage "
            "config with the thinker alone"
        )
    if isinstance(stage, Code2WavStage):
        return _code2wav(whole, config, stage, shapes)
    is_thinker = stage.model_stage == "thinker"
    decoder = whole.thinker_config.text_config if is_thinker else whole.talker_config
    head_dim = decoder.hidden_size // decoder.num_attention_heads if is_thinker else decoder.head_dim
    return StageFootprint(
        tensors=shapes,
        dtype=dtype_name(whole),
        encodes_media=is_thinker,
        kv=KvLayout(decoder.num_hidden_layers, decoder.num_key_value_heads, head_dim),
        # Both feed-forward halves and their product; residual, norm, input and output.
        values_per_token=3 * decoder.intermediate_size + 4 * decoder.hidden_size,
        quantizable=quantizable(whole, shapes, _LANGUAGE_MODEL, _FP8) if is_thinker else None,
    )


def _code2wav(
    whole: Qwen2_5OmniConfig, config: StageConfig, stage: Code2WavStage, shapes: dict[str, tuple[int, ...]]
) -> StageFootprint:
    dit, vocoder = whole.token2wav_config.dit_config, whole.token2wav_config.bigvgan_config
    is_float32 = stage.compute_dtype(config.platform) == "float32"
    # A DiT block holds its residual, norm, queries, keys, values and feed-forward part; the vocoder's widest
    # layer holds its input, and output and activations at twice the rate. CUDA graphs double that (`dtype` is
    # float32). With the 7B's sizes in float16, code2wav took 1.26, 1.71, 2.59, 3.11 and 4.07 GB of one H200
    # for 4, 8, 16, 32 and 64 requests once its graphs were recorded; this estimate gives 2.20, 2.32, 2.81,
    # 3.29 and 4.20 GB.
    per_frame = stage.solver.num_branches * 10 * dit.hidden_size + 6 * widest_layer(
        vocoder.upsample_initial_channel, 1, vocoder.upsample_rates
    )
    vocoder_values = sum(
        math.prod(shape) for name, shape in shapes.items() if name.startswith(_VOCODER_PREFIX)
    )
    return StageFootprint(
        tensors=shapes,
        dtype="float32",
        loads_float32=True,
        values_per_token=dit.repeats * per_frame,
        # The vocoder's copy beside its float32 weights, plus one temporary layer.
        preparation_bytes=vocoder_values * (4 if is_float32 else 2) * 5 // 4,
        stream_state_bytes=math.prod(slot_shape(dit, stage.solver)) * (4 if is_float32 else 2),
    )
