"""FP8 made while loading: attention and experts of the thinker's language model are quantized, nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerTensorOnlineLinearMethod,
    Fp8PerTensorOnlineMoEMethod,
)
from vllm.model_executor.model_loader.utils import configure_quant_config, initialize_model

from omni_server.config.load import find_shipped_config, load_stage_config
from stages.demo_checkpoint.write import make_demo_checkpoint
from stages.qwen3_omni import FAMILY
from stages.qwen3_omni.thinker import Qwen3OmniThinker

LAYERS = "language_model.model.layers."


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The only rank of its group."""
    init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, backend="gloo")
    yield
    cleanup_dist_env_and_memory()


def config_of(folder: Path, **engine_args: Any) -> VllmConfig:
    FAMILY.register()
    arguments: dict[str, Any] = {
        "hf_overrides": FAMILY.hf_overrides("thinker"), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 64,
        "block_size": 32, "kv_cache_memory_bytes": 1 << 20,
    }  # fmt: skip
    return AsyncEngineArgs(str(folder), **(arguments | engine_args)).create_engine_config()


def test_fp8_is_for_attention_and_experts_of_the_thinkers_language_model(tmp_path: Path, alone: None) -> None:
    """On a CPU vLLM cannot make such layers, but it says which it would make."""
    folder = make_demo_checkpoint(tmp_path / "checkpoint", family="qwen3_omni", dtype="bfloat16")
    shipped = load_stage_config(find_shipped_config("qwen3_omni.80gb"))
    footprints = FAMILY.footprints(folder, shipped)
    assert (footprints["talker"].quantizable, footprints["code2wav"].quantizable) == (None, None)
    quantizable = footprints["thinker"].quantizable
    assert quantizable is not None
    assert quantizable.fp8_engine_args.items() <= shipped.stages["thinker"].engine_args.items()

    online = config_of(folder, **quantizable.fp8_engine_args).quant_config
    assert isinstance(online, OnlineQuantizationConfig)
    configure_quant_config(online, Qwen3OmniThinker)
    config = config_of(folder)
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        thinker = initialize_model(config)
    methods: dict[str, type | None] = {}
    for name, layer in thinker.named_modules():
        if isinstance(layer, LinearBase | RoutedExperts):
            asked = layer.layer_name if isinstance(layer, RoutedExperts) else name
            resolved = online.resolve_quant_method_cls(type(layer), asked)
            methods[asked] = None if resolved is None else resolved[-1]
    linear, experts = Fp8PerTensorOnlineLinearMethod, Fp8PerTensorOnlineMoEMethod
    parts = {
        "self_attn.qkv_proj": linear,
        "self_attn.o_proj": linear,
        "mlp.experts": experts,
        "mlp.gate": None,
    }
    num_layers = config.model_config.hf_config.thinker_config.text_config.num_hidden_layers
    in_layers = {f"{LAYERS}{i}.{part}": method for i in range(num_layers) for part, method in parts.items()}
    assert {name: method for name, method in methods.items() if name.startswith(LAYERS)} == in_layers
    others = {name: method for name, method in methods.items() if not name.startswith(LAYERS)}
    assert {name.partition(".")[0] for name in others} == {"audio_tower", "visual"}
    assert set(others.values()) == {None}
    # The weights that the footprint counts are those of these layers, by their names in the checkpoint.
    counted = {LAYERS + layer_of(name.removeprefix("thinker.model.layers.")) for name in quantizable.weights}
    assert counted == {name for name, method in in_layers.items() if method is not None}


def layer_of(weight: str) -> str:
    """The layer of vLLM's that holds a checkpoint's weight."""
    weight = re.sub(r"\.[qkv]_proj\.weight$", ".qkv_proj.weight", weight)
    return re.sub(r"(\.experts)\.\d+\.\w+\.weight$|\.weight$", r"\1", weight)
