"""Engine arguments of the code2wav stage."""

import pickle
from pathlib import Path
from typing import Literal

import pytest
from transformers import PreTrainedConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from omni_server.config.pipeline import StepwiseEngine
from omni_server.engine.engine_args import diffusion_engine_args
from omni_server.errors import ConfigError
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from stages.qwen2_5_omni.options import Code2WavStage, SolverConfig
from stages.qwen3_omni.options import Code2WavStage as Qwen3Code2WavStage


def overrides(config: PreTrainedConfig) -> PreTrainedConfig:
    return config


def stage(**fields: object) -> Code2WavStage:
    return Code2WavStage.model_validate(
        {"engine": "diffusion", "model_stage": "code2wav", "max_model_len": 132, **fields}
    )


def test_the_stage_config_arrives(tmp_path: Path) -> None:
    arguments = diffusion_engine_args(
        tmp_path,
        stage(
            max_num_seqs=3,
            max_num_batched_tokens=500,
            solver={"num_steps": 5, "guidance_scale": 1.5},
            engine_args={"seed": 17},
        ),
        platform="cpu",
        load_format="auto",
        hf_overrides=overrides,
        carries_state=True,
    )
    assert (arguments.model, arguments.runner, arguments.hf_overrides) == (
        str(tmp_path),
        "pooling",
        overrides,
    )
    assert (arguments.max_num_seqs, arguments.max_model_len, arguments.seed) == (3, 132, 17)
    runtime = arguments.additional_config
    assert isinstance(runtime, DiffusionRuntimeConfig)
    assert isinstance(runtime.stage, Code2WavStage)
    assert runtime.stage.solver == SolverConfig(num_steps=5, guidance_scale=1.5)
    assert (runtime.stage.max_num_seqs, runtime.stage.max_num_batched_tokens) == (3, 500)
    assert pickle.loads(pickle.dumps(runtime)) == runtime, "it travels to the engine's process"  # noqa: S301
    assert runtime.num_streams == 6


def test_places_for_streams_are_made_where_state_is_carried(tmp_path: Path) -> None:
    for carries_state, num_streams in ((True, 9), (False, 0)):
        arguments = diffusion_engine_args(
            tmp_path,
            stage(max_num_seqs=3, max_streams=9),
            platform="cpu",
            load_format="auto",
            hf_overrides=overrides,
            carries_state=carries_state,
        )
        assert isinstance(arguments.additional_config, DiffusionRuntimeConfig)
        assert arguments.additional_config.num_streams == num_streams


def test_a_request_is_never_cut(tmp_path: Path) -> None:
    arguments = diffusion_engine_args(
        tmp_path, stage(), platform="cpu", load_format="auto", hf_overrides=overrides, carries_state=True
    )
    assert arguments.enable_chunked_prefill is False
    assert arguments.enable_prefix_caching is False
    assert arguments.max_num_batched_tokens == 2048


def test_waiting_requests_are_taken_by_priority(tmp_path: Path) -> None:
    arguments = diffusion_engine_args(
        tmp_path, stage(), platform="cpu", load_format="auto", hf_overrides=overrides, carries_state=True
    )
    assert arguments.scheduling_policy == "priority"


def test_a_stage_of_many_steps_has_an_executor_and_no_worker(tmp_path: Path) -> None:
    made = diffusion_engine_args(
        tmp_path,
        stage(),
        platform="cpu",
        load_format="dummy",
        hf_overrides=None,
        carries_state=False,
        stepwise=StepwiseEngine("package.module.Executor", "some_format"),
    )
    assert made.load_format == "dummy"
    assert made.distributed_executor_backend == "package.module.Executor"
    assert made.config_format == "some_format"
    assert made.scheduler_cls == "stages.runtime.step_scheduler.StepScheduler"
    assert made.worker_cls == AsyncEngineArgs.worker_cls


def test_the_share_of_the_device_counts_on_cuda_only(tmp_path: Path) -> None:
    config = stage(devices=[1], gpu_memory_utilization=0.2)
    on_cuda = diffusion_engine_args(
        tmp_path, config, platform="cuda", load_format="auto", hf_overrides=overrides, carries_state=True
    )
    assert on_cuda.gpu_memory_utilization == 0.2
    on_cpu = diffusion_engine_args(
        tmp_path, config, platform="cpu", load_format="auto", hf_overrides=overrides, carries_state=True
    )
    assert on_cpu.gpu_memory_utilization == AsyncEngineArgs.gpu_memory_utilization


def runtime_config(
    folder: Path, platform: Literal["cpu", "cuda"], **fields: object
) -> DiffusionRuntimeConfig:
    arguments = diffusion_engine_args(
        folder,
        stage(**fields),
        platform=platform,
        load_format="auto",
        hf_overrides=overrides,
        carries_state=True,
    )
    assert arguments.dtype == "float32"
    assert arguments.enforce_eager is True
    runtime = arguments.additional_config
    assert isinstance(runtime, DiffusionRuntimeConfig)
    return runtime


def test_the_precision_is_the_models_own_affair(tmp_path: Path) -> None:
    assert runtime_config(tmp_path, "cpu").compute_dtype == "float32"
    assert runtime_config(tmp_path, "cuda").compute_dtype == "float16"
    for dtype in ("float32", "bfloat16", "float16"):
        assert runtime_config(tmp_path, "cuda", dtype=dtype).compute_dtype == dtype


def test_a_family_may_choose_another_precision_on_a_gpu(tmp_path: Path) -> None:
    fields = {"engine": "diffusion", "model_stage": "code2wav", "max_model_len": 128}
    for platform, dtype, expected in (
        ("cuda", "auto", "bfloat16"),
        ("cuda", "float16", "float16"),
        ("cpu", "auto", "float32"),
    ):
        arguments = diffusion_engine_args(
            tmp_path,
            Qwen3Code2WavStage.model_validate(fields | {"dtype": dtype}),
            platform="cuda" if platform == "cuda" else "cpu",
            load_format="auto",
            hf_overrides=overrides,
            carries_state=True,
        )
        assert isinstance(arguments.additional_config, DiffusionRuntimeConfig)
        assert arguments.additional_config.compute_dtype == expected


def test_the_fast_path_is_for_cuda_and_can_be_turned_off(tmp_path: Path) -> None:
    assert runtime_config(tmp_path, "cuda").is_fast
    assert not runtime_config(tmp_path, "cpu").is_fast
    assert not runtime_config(tmp_path, "cuda", engine_args={"enforce_eager": True}).is_fast
    assert runtime_config(tmp_path, "cuda", engine_args={"enforce_eager": False}).is_fast


@pytest.mark.parametrize("name", ["enable_chunked_prefill", "enable_prefix_caching"])
def test_requests_may_not_be_cut_by_engine_arguments(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args\.{name} of code2wav must be False"):
        diffusion_engine_args(
            tmp_path,
            stage(engine_args={name: True}),
            platform="cpu",
            load_format="auto",
            hf_overrides=overrides,
            carries_state=True,
        )


def test_other_engine_arguments_win(tmp_path: Path) -> None:
    arguments = diffusion_engine_args(
        tmp_path,
        stage(
            engine_args={
                "kv_cache_memory_bytes": 1 << 22,
                "enforce_eager": True,
                "enable_chunked_prefill": False,
            }
        ),
        platform="cpu",
        load_format="dummy",
        hf_overrides=overrides,
        carries_state=True,
    )
    assert (arguments.kv_cache_memory_bytes, arguments.load_format) == (1 << 22, "dummy")
