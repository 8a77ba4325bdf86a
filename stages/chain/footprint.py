"""The memory of the text model, by its config and the headers of its weights."""

from pathlib import Path

from omni_server.config.checkpoint_files import config_errors
from omni_server.family import KvLayout, StageFootprint

WIDE_LAYERS = 4
"""Estimate: the values per token that a step holds at the same time, in tensors as wide as the largest
layer."""


def text_model_footprint(model_dir: Path, folder: str) -> StageFootprint:
    """Raises `ConfigError` if config.json describes no text model."""
    from safetensors import safe_open
    from transformers import AutoConfig

    tensors: dict[str, tuple[int, ...]] = {}
    for path in sorted((model_dir / folder).glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensors[f"{folder}/{name}"] = tuple(file.get_slice(name).get_shape())
    with config_errors(f"{model_dir / folder / 'config.json'} describes no model that can be built"):
        config = AutoConfig.from_pretrained(model_dir / folder).get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv = KvLayout(config.num_hidden_layers, getattr(config, "num_key_value_heads", heads), head_dim)
        width = max(config.hidden_size, config.intermediate_size)
        dtype = str(config.dtype or "float32").removeprefix("torch.")
    return StageFootprint(
        tensors=tensors,
        dtype=dtype,
        loads_float32=False,
        encodes_media=False,
        kv=kv,
        values_per_token=WIDE_LAYERS * width,
    )
