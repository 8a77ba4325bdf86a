"""Memory that each stage of a spoken language model needs, for any architecture of the language model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from omni_server.config.checkpoint_files import (
    StoredTensor,
    config_errors,
    indexed_weight_files,
    read_tensors,
)
from omni_server.config.speech_model import LLM_FOLDER, SPEECH_FOLDER
from omni_server.config.stage_config import StageConfig
from omni_server.family.footprint import KvLayout, StageFootprint
from stages.checkpoint_footprint import dtype_name, quantizable
from stages.qwen3_tts import footprint as qwen3_tts

_FP8 = {"quantization": "fp8_per_tensor"}


def stage_footprints(model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
    """See `ModelFamily.footprints`."""
    speaking = {
        name: stage for name, stage in config.stages.items() if config.stage_spec(name).folder != LLM_FOLDER
    }
    footprints = qwen3_tts.stage_footprints(
        model_dir / SPEECH_FOLDER, config.model_copy(update={"stages": speaking})
    )
    return {
        name: _within(SPEECH_FOLDER, footprints[name])
        if name in speaking
        else _within(LLM_FOLDER, _language_model(model_dir / LLM_FOLDER))
        for name in config.stages
    }


def _within(folder: str, footprint: StageFootprint) -> StageFootprint:
    """With the names of weights in the folder of both checkpoints."""
    tensors = {f"{folder}/{name}": shape for name, shape in footprint.tensors.items()}
    return replace(footprint, tensors=tensors)


def _language_model(folder: Path) -> StageFootprint:
    with config_errors(f"{folder / 'config.json'} describes no language model that can be built"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text: Any = config.get_text_config(decoder=True)
        num_heads = text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        num_experts = getattr(text, "num_experts_per_tok", None) or 1
        inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        stored = _stored_weights(folder)
        shapes = {name: tensor.shape for name, tensor in stored.items()} or _described_weights(config)
    is_quantized = getattr(config, "quantization_config", None) is not None
    names = [f"{LLM_FOLDER}/{name}" for name in shapes]
    return StageFootprint(
        tensors=shapes,
        dtype=dtype_name(text if config.dtype is None else config),
        encodes_media=text is not config,
        kv=KvLayout(text.num_hidden_layers, num_kv_heads, head_dim),
        # As of the omni models' thinkers.
        values_per_token=3 * num_experts * inner + (2 + 2 * num_experts) * text.hidden_size,
        quantizable=quantizable(config, names, LLM_FOLDER, _FP8),
        # Quantized weights have shapes of their own.
        weight_bytes=sum(tensor.num_bytes for tensor in stored.values()) if is_quantized and stored else None,
    )


def _stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Empty before they are downloaded, and if they shall be random."""
    index = folder / "model.safetensors.index.json"
    paths = indexed_weight_files(index) if index.is_file() else sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in paths if path.is_file() for name, tensor in read_tensors(path).items()}


def _described_weights(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Of the class of transformers that the config names."""
    (architecture, *_) = config.architectures or ("",)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    model.tie_weights()
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}
