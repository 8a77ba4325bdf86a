"""Engine arguments of the stages."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.engine.engine_args import ar_engine_args, diffusion_engine_args
from omni_server.errors import ConfigError
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen2_5_omni.options import Code2WavStage, SolverConfig
from stages.qwen_codec.options import Code2WavStage as Qwen3Code2WavStage

MODEL = Path(__file__).parent
"""vLLM looks for a model on the hub if its folder is missing."""


def overrides(config: PreTrainedConfig) -> PreTrainedConfig:
    return config


def arguments_of(
    *,
    of: type[DiffusionStage] = Code2WavStage,
    platform: Any = "cpu",
    carries_state: bool = True,
    **fields: object,
) -> tuple[AsyncEngineArgs, DiffusionRuntimeConfig]:
    stage = of.model_validate(
        {"engine": "diffusion", "model_stage": "code2wav", "max_model_len": 132, **fields}
    )
    arguments = diffusion_engine_args(
        MODEL,
        stage,
        platform=platform,
        load_format="auto",
        hf_overrides=overrides,
        carries_state=carries_state,
    )
    runtime = arguments.additional_config
    assert isinstance(runtime, DiffusionRuntimeConfig)
    return arguments, runtime


def test_the_stage_config_arrives() -> None:
    arguments, runtime = arguments_of(
        max_num_seqs=3,
        max_num_batched_tokens=500,
        solver={"num_steps": 5, "guidance_scale": 1.5},
        engine_args={"seed": 17, "kv_cache_memory_bytes": 1 << 22},
    )
    assert (arguments.model, arguments.runner, arguments.hf_overrides) == (str(MODEL), "pooling", overrides)
    assert (arguments.max_num_seqs, arguments.max_model_len) == (3, 132)
    assert (arguments.seed, arguments.kv_cache_memory_bytes) == (17, 1 << 22)
    assert isinstance(runtime.stage, Code2WavStage)
    assert runtime.stage.solver == SolverConfig(num_steps=5, guidance_scale=1.5)
    assert (runtime.stage.max_num_seqs, runtime.stage.max_num_batched_tokens) == (3, 500)
    assert pickle.loads(pickle.dumps(runtime)) == runtime, "it travels to the engine's process"  # noqa: S301


def test_places_for_streams_are_made_where_state_is_carried() -> None:
    assert arguments_of(max_num_seqs=3)[1].num_streams == 6
    assert arguments_of(max_num_seqs=3, max_streams=9)[1].num_streams == 9
    assert arguments_of(max_num_seqs=3, max_streams=9, carries_state=False)[1].num_streams == 0


def test_a_request_is_never_cut() -> None:
    arguments, _ = arguments_of()
    assert arguments.enable_chunked_prefill is False
    assert arguments.enable_prefix_caching is False
    assert arguments.max_num_batched_tokens == 2048
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        with pytest.raises(ConfigError, match=rf"engine_args\.{name} of code2wav must be False"):
            arguments_of(engine_args={name: True})


def test_the_share_of_the_device_counts_on_cuda_only() -> None:
    share: dict[str, Any] = {"devices": [1], "gpu_memory_utilization": 0.2}
    assert arguments_of(platform="cuda", **share)[0].gpu_memory_utilization == 0.2
    on_cpu, _ = arguments_of(**share)
    assert on_cpu.gpu_memory_utilization == AsyncEngineArgs.gpu_memory_utilization


@pytest.mark.parametrize(
    ("family", "platform", "dtype", "expected"),
    [
        (Code2WavStage, "cpu", "auto", "float32"),
        (Code2WavStage, "cuda", "auto", "float16"),
        (Code2WavStage, "cuda", "bfloat16", "bfloat16"),
        (Code2WavStage, "cuda", "float32", "float32"),
        (Qwen3Code2WavStage, "cpu", "auto", "float32"),
        (Qwen3Code2WavStage, "cuda", "auto", "bfloat16"),
        (Qwen3Code2WavStage, "cuda", "float16", "float16"),
    ],
)
def test_the_precision_is_the_models_own_affair(
    family: type[DiffusionStage], platform: str, dtype: str, expected: str
) -> None:
    arguments, runtime = arguments_of(of=family, platform=platform, dtype=dtype)
    assert (arguments.dtype, arguments.enforce_eager) == ("float32", True)
    assert runtime.compute_dtype == expected


def test_the_fast_path_is_for_cuda_and_can_be_turned_off() -> None:
    assert arguments_of(platform="cuda")[1].is_fast
    assert not arguments_of(platform="cpu")[1].is_fast
    assert not arguments_of(platform="cuda", engine_args={"enforce_eager": True})[1].is_fast


def graph_sizes_of(**engine_args: object) -> list[int] | None:
    """The numbers of tokens of an autoregressive stage's steps that become CUDA graphs."""
    stage = ArStage.model_validate(
        {
            "engine": "ar",
            "model_stage": "thinker",
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "engine_args": engine_args,
        }
    )
    arguments = ar_engine_args(
        MODEL,
        stage,
        StageRuntimeConfig(str(MODEL)),
        platform="cuda",
        load_format="auto",
        hf_overrides=None,
    )
    return arguments.cudagraph_capture_sizes


@pytest.mark.parametrize("largest", [1, 64, 100, 512, 2048])
def test_cuda_graphs_pad_decode_steps_by_less_than_eight_tokens_and_prompts_by_a_quarter(
    largest: int,
) -> None:
    sizes = graph_sizes_of(max_cudagraph_capture_size=largest)
    assert sizes is not None
    assert (sizes[0], sizes[-1]) == (1, largest)
    for num_tokens in range(1, largest + 1):
        padding = next(size for size in sizes if size >= num_tokens) - num_tokens
        assert padding < (8 if num_tokens <= 64 else max(8, num_tokens / 4))
    assert len(sizes) <= 31


def test_no_cuda_graph_is_larger_than_a_step() -> None:
    assert ArStage.model_fields["max_num_batched_tokens"].default == 2048
    assert graph_sizes_of(max_cudagraph_capture_size=8192) == graph_sizes_of(max_cudagraph_capture_size=2048)


def test_the_sizes_of_cuda_graphs_can_be_given() -> None:
    given = {"cudagraph_capture_sizes": [1, 5], "max_cudagraph_capture_size": 5}
    assert graph_sizes_of(**given) == [1, 5]
    both = {"compilation_config": {"cudagraph_capture_sizes": [1, 5]}, "max_cudagraph_capture_size": 5}
    assert graph_sizes_of(**both) is None, "vLLM takes them from one place only"
    assert graph_sizes_of() is None, "vLLM's own"
