"""Checkpoints that are quantized, and FP8 made while loading: the thinker's language model is quantized,
nothing else.

The layouts are those that AutoAWQ and GPTQModel write for this model; no published file was at hand.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMarlinLinearMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerTensorOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import configure_quant_config, initialize_model

from omni_server.check.files import StoredWeights, read_weights
from omni_server.check.memory import ModelSizes, stage_memory
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stages import DiffusionStage
from omni_server.engine.engine_args import diffusion_engine_args
from stages.qwen2_5_omni import FAMILY
from stages.qwen2_5_omni.footprint import stage_footprints
from stages.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from tests.checkpoints.write import make_demo_checkpoint

GROUP = 128
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["visual"],
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False,
    "checkpoint_format": "gptq", "pack_dtype": "int32",
}  # fmt: skip
BASE = load_stage_config(find_shipped_config("qwen2_5_omni"))


def quantized(folder: Path, quantization: dict[str, Any]) -> Path:
    """The demo checkpoint, in 4 bits as `quantization` says."""
    make_demo_checkpoint(folder, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.startswith("thinker.model.layers.") and weight.ndim == 2:
            weights |= in_4_bits(
                name.removesuffix("weight"), *weight.shape, str(quantization["quant_method"])
            )
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_4_bits(layer: str, num_outputs: int, num_inputs: int, method: str) -> dict[str, torch.Tensor]:
    """AWQ packs eight outputs into an int32, GPTQ eight inputs."""
    groups = num_inputs // GROUP
    packed = (num_inputs, num_outputs // 8) if method == "awq" else (num_inputs // 8, num_outputs)
    order = {} if method == "awq" else {f"{layer}g_idx": torch.arange(num_inputs, dtype=torch.int32) // GROUP}
    return order | {
        f"{layer}qweight": torch.zeros(packed, dtype=torch.int32),
        f"{layer}qzeros": torch.zeros(groups, num_outputs // 8, dtype=torch.int32),
        f"{layer}scales": torch.ones(groups, num_outputs, dtype=torch.float16),
    }


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tmp_path_factory.mktemp("awq") / "checkpoint", AWQ)


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tmp_path_factory.mktemp("gptq") / "checkpoint", GPTQ)


def config_of(folder: Path, stage: str, **engine_args: Any) -> VllmConfig:
    FAMILY.register()
    arguments: dict[str, Any] = {
        "hf_overrides": FAMILY.hf_overrides(stage), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 64,
        "block_size": 32, "skip_tokenizer_init": stage != "thinker", "kv_cache_memory_bytes": 1 << 20,
    }  # fmt: skip
    return AsyncEngineArgs(str(folder), **(arguments | engine_args)).create_engine_config()


def model_of(config: VllmConfig) -> torch.nn.Module:
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        return initialize_model(config)


def methods(model: torch.nn.Module) -> dict[str, type]:
    """How each layer with a matrix is computed, by its name in vLLM's model."""
    found: dict[str, type] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            found[name] = torch.nn.Linear
        elif "quant_method" in vars(layer):
            found[name] = type(layer.quant_method)
    return found


def check_thinker(found: dict[str, type], quantized_method: type) -> None:
    """Every layer of the language model is quantized, and no other."""
    layers = {
        name: method for name, method in found.items() if name.startswith("language_model.model.layers.")
    }
    assert {name.removeprefix("language_model.model.layers.") for name in layers} == {
        f"{number}.{part}"
        for number in (0, 1)
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert set(layers.values()) == {quantized_method}
    others = {name: method for name, method in found.items() if name not in layers}
    assert {name.partition(".")[0] for name in others} == {"audio_tower", "visual", "language_model"}
    assert set(others.values()) <= {torch.nn.Linear, UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


@pytest.mark.parametrize(
    ("layout", "config_class", "method"),
    [("awq", AutoAWQConfig, AutoAWQMarlinLinearMethod), ("gptq", AutoGPTQConfig, AutoGPTQLinearMethod)],
)
def test_of_a_quantized_checkpoint_the_thinkers_language_model_is_quantized_and_nothing_else(
    layout: str, config_class: type, method: type, alone: None, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(layout)
    config = config_of(folder, "thinker")
    assert isinstance(config.quant_config, config_class)
    thinker = model_of(config)
    check_thinker(methods(thinker), method)
    loaded = thinker.load_weights(load_file(folder / "model.safetensors").items())  # type: ignore[operator]
    assert {name for name, _ in thinker.named_parameters()} <= loaded  # nothing is left as it was made

    config = config_of(folder, "talker", enable_prompt_embeds=True)
    assert config.quant_config is None
    found = methods(model_of(config))
    assert set(found.values()) == {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
    assert "model.layers.0.mlp.gate_up_proj" in found

    code2wav = BASE.stages["code2wav"]
    assert isinstance(code2wav, DiffusionStage)
    hf_overrides = FAMILY.hf_overrides("code2wav")
    assert hf_overrides is not None
    arguments = diffusion_engine_args(
        folder, code2wav, platform="cpu", load_format="auto", hf_overrides=hf_overrides, carries_state=True
    )
    config = arguments.create_engine_config()
    assert (config.quant_config, config.model_config.quantization) == (None, None)


def test_fp8_is_for_the_layers_of_the_thinkers_language_model(tmp_path: Path, alone: None) -> None:
    """On a CPU vLLM cannot make such layers, but it says which it would make."""
    folder = make_demo_checkpoint(tmp_path / "checkpoint", dtype="bfloat16")
    footprints = stage_footprints(folder, BASE)
    assert (footprints["talker"].quantizable, footprints["code2wav"].quantizable) == (None, None)
    quantizable = footprints["thinker"].quantizable
    assert quantizable is not None
    online = config_of(folder, "thinker", **quantizable.fp8_engine_args).quant_config
    assert isinstance(online, OnlineQuantizationConfig)
    configure_quant_config(online, Qwen2_5OmniThinker)

    found: dict[str, type] = {}
    for name, layer in model_of(config_of(folder, "thinker")).named_modules():
        if "quant_method" in vars(layer) or "kv_cache_dtype" in vars(
            layer
        ):  # what is asked: attention as well
            resolved = online.resolve_quant_method_cls(type(layer), name)
            found[name] = UnquantizedLinearMethod if resolved is None else resolved[-1]
    attentions = {name for name in found if name.endswith(".attn")}
    assert {found.pop(name) for name in attentions if name.startswith("language_model.")} == {
        UnquantizedLinearMethod
    }
    check_thinker({"audio_tower": torch.nn.Linear, **found}, Fp8PerTensorOnlineLinearMethod)


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_the_size_of_quantized_weights_follows_from_the_config(
    layout: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(layout)
    sizes = ModelSizes(layout, stage_footprints(folder, BASE), StoredWeights())
    computed = stage_memory("thinker", BASE, sizes, 80 << 30)
    stored = sum(
        tensor.num_bytes
        for name, tensor in read_weights(folder, BASE).tensors.items()
        if name.startswith("thinker.")
    )
    assert computed.weights == pytest.approx(stored, rel=0.02)
    assert computed.precision == layout
