"""FP8, made while loading or published: attention and experts of the thinker's language model are quantized,
nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerTensorOnlineLinearMethod,
    Fp8PerTensorOnlineMoEMethod,
)
from vllm.model_executor.model_loader.utils import configure_quant_config, initialize_model

from omni_server.config.load import find_shipped_config, load_stage_config
from stages.qwen3_omni import FAMILY
from stages.qwen3_omni.thinker import Qwen3OmniThinker
from tests.checkpoints.write import make_demo_checkpoint

LAYERS = "language_model.model.layers."


def config_of(folder: Path, stage: str = "thinker", **engine_args: Any) -> VllmConfig:
    FAMILY.register()
    arguments: dict[str, Any] = {
        "hf_overrides": FAMILY.hf_overrides(stage), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 64,
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
    methods: dict[str, type | None] = {}
    for name, layer in layers_of(thinker_of(config_of(folder))).items():
        resolved = online.resolve_quant_method_cls(type(layer), name)
        methods[name] = None if resolved is None else resolved[-1]
    check_methods(methods, Fp8PerTensorOnlineLinearMethod, Fp8PerTensorOnlineMoEMethod, None)
    # The weights that the footprint counts are those of these layers, by their names in the checkpoint.
    counted = {LAYERS + layer_of(name.removeprefix("thinker.model.layers.")) for name in quantizable.weights}
    assert counted == {name for name, method in methods.items() if method is not None}


def test_a_published_fp8_checkpoint_keeps_the_layers_that_it_lists_by_their_published_names(
    tmp_path: Path, alone: None
) -> None:
    folder = make_demo_checkpoint(tmp_path / "checkpoint", family="qwen3_omni", dtype="bfloat16")
    config = config_of(folder)
    thinker = thinker_of(config)
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = {name for name in file.keys() if name.endswith(".weight")}  # noqa: SIM118 - it is no mapping
    in_fp8 = {name for name in weights if re.match(r"thinker\.model\.layers\..*_proj\.weight", name)}
    kept = sorted(name.removesuffix(".weight") for name in weights - in_fp8)
    assert {"thinker.lm_head", "thinker.model.layers.0.mlp.gate"} < set(kept)
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(document))

    published = config_of(folder).quant_config
    assert isinstance(published, Fp8Config)
    configure_quant_config(published, Qwen3OmniThinker)
    with set_current_vllm_config(config):
        methods = {
            name: type(published.get_quant_method(layer, name)) for name, layer in layers_of(thinker).items()
        }
        assert published.get_quant_method(thinker.get_submodule("language_model.lm_head"), "lm_head") is None
    check_methods(methods, Fp8LinearMethod, Fp8MoEMethod, UnquantizedLinearMethod)
    footprints = FAMILY.footprints(folder, load_stage_config(find_shipped_config("qwen3_omni")))
    quantizable = footprints["thinker"].quantizable
    assert quantizable is not None
    assert (quantizable.weights, quantizable.method, quantizable.bits) == (in_fp8, "fp8", 8)
    # The other stages have configs of their own.
    assert (
        config_of(folder, "talker", enable_prompt_embeds=True, skip_tokenizer_init=True).quant_config is None
    )


def thinker_of(config: VllmConfig) -> torch.nn.Module:
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        return initialize_model(config)


def layers_of(thinker: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers that could be quantized, by the names under which vLLM asks for their methods."""
    return {
        layer.layer_name if isinstance(layer, RoutedExperts) else name: layer
        for name, layer in thinker.named_modules()
        if isinstance(layer, LinearBase | RoutedExperts)
    }


def check_methods(
    methods: dict[str, type | None], linear: type, experts: type, unquantized: type | None
) -> None:
    parts = {
        "self_attn.qkv_proj": linear,
        "self_attn.o_proj": linear,
        "mlp.experts": experts,
        "mlp.gate": unquantized,
    }
    numbers = {
        int(name.removeprefix(LAYERS).partition(".")[0]) for name in methods if name.startswith(LAYERS)
    }
    in_layers = {f"{LAYERS}{i}.{part}": method for i in numbers for part, method in parts.items()}
    assert {name: method for name, method in methods.items() if name.startswith(LAYERS)} == in_layers
    others = {name: method for name, method in methods.items() if not name.startswith(LAYERS)}
    assert {name.partition(".")[0] for name in others} == {"audio_tower", "visual"}
    assert set(others.values()) == {unquantized}


def layer_of(weight: str) -> str:
    """The layer of vLLM's that holds a checkpoint's weight."""
    weight = re.sub(r"\.[qkv]_proj\.weight$", ".qkv_proj.weight", weight)
    return re.sub(r"(\.experts)\.\d+\.\w+\.weight$|\.weight$", r"\1", weight)
