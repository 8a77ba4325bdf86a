"""Memory that each stage of a Qwen3-Omni checkpoint needs, from config.json alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from omni_server.config.checkpoint_files import config_errors
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import Stage
from omni_server.family.footprint import KvLayout, StageFootprint
from stages.checkpoint_footprint import dtype_name, quantizable, read_config
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.footprint import code2wav_footprint
from stages.qwen_codec.options import Code2WavStage

_LANGUAGE_MODEL = "thinker.model.layers."
_FP8 = {
    "quantization": "online",
    # Names as in vLLM's thinker: attention and experts. Routers, audio and vision encoders, embeddings and
    # lm_head do not match.
    "quantization_config": {
        "targets": {
            "language_model.model.layers.*_proj": "fp8_per_tensor",
            "language_model.model.layers.*.experts": "fp8_per_tensor",
        }
    },
}

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_HIDDEN_PROJECTION = "talker.hidden_projection."
"""The thinker's stage computes the talker's rows of media with it."""


def stage_footprints(model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
    """See `ModelFamily.footprints`."""
    with config_errors(f"{model_dir / 'config.json'} describes no model that can be built"):
        whole = read_config(model_dir, Qwen3OmniMoeConfig)
        with torch.device("meta"):  # shapes only
            tensors = published_tensors(Qwen3OmniMoeForConditionalGeneration(whole).state_dict())
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return {name: _footprint(whole, config, stage, shapes) for name, stage in config.stages.items()}


def _footprint(
    whole: Qwen3OmniMoeConfig, config: StageConfig, stage: Stage, all_shapes: dict[str, tuple[int, ...]]
) -> StageFootprint:
    prefix, is_thinker = f"{stage.model_stage}.", stage.model_stage == "thinker"
    shapes = {
        key: shape
        for key, shape in all_shapes.items()
        if (is_thinker if key.startswith(_HIDDEN_PROJECTION) else key.startswith(prefix))
    }
    if isinstance(stage, Code2WavStage):
        with torch.device("meta"):
            network = Code2WavNetwork(whole.code2wav_config)
        return code2wav_footprint(
            network, whole.code2wav_config, stage.compute_dtype(config.platform), shapes
        )
    decoder = whole.thinker_config.text_config if is_thinker else whole.talker_config.text_config
    # Of a token, the two feed-forward halves and their product in each of its experts.
    inner = decoder.num_experts_per_tok * decoder.moe_intermediate_size
    if not is_thinker:
        inner += decoder.shared_expert_intermediate_size
    return StageFootprint(
        tensors=shapes,
        dtype=dtype_name(whole),
        encodes_media=is_thinker,
        kv=KvLayout(decoder.num_hidden_layers, decoder.num_key_value_heads, decoder.head_dim),
        # And residual, norm, input and output, the latter two of each expert.
        values_per_token=3 * inner + (2 + 2 * decoder.num_experts_per_tok) * decoder.hidden_size,
        quantizable=quantizable(whole, shapes, _LANGUAGE_MODEL, _FP8) if is_thinker else None,
    )


def published_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model's `state_dict`, by their names in a published checkpoint: transformers 5 stacks
    the experts of a layer into two tensors when it loads one; its files have three matrices per expert."""
    return {name: tensor for stacked in state.items() for name, tensor in _unstacked(*stacked)}


def _unstacked(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(_GATE_UP):  # [experts, 2 x intermediate, hidden]
        for expert, matrices in enumerate(tensor):
            gate, up = matrices.chunk(2)
            yield f"{name.removesuffix('gate_up_proj')}{expert}.gate_proj.weight", gate
            yield f"{name.removesuffix('gate_up_proj')}{expert}.up_proj.weight", up
    elif name.endswith(_DOWN):  # [experts, hidden, intermediate]
        for expert, matrix in enumerate(tensor):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", matrix
    else:
        yield name, tensor
