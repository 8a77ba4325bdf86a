"""vLLM's engine arguments for a non-autoregressive stage."""

from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from omni_server.config.stage_config import DiffusionStage
from omni_server.errors import ConfigError
from omni_server.family import HfOverrides

DIFFUSION_WORKER = "stages.runtime.diffusion_worker.DiffusionWorker"

NO_KV_CACHE_BYTES = 1 << 20
"""There is no KV cache, but on a CPU vLLM sizes one from the machine's memory unless it is told a size."""


def diffusion_engine_args(
    model_dir: Path,
    stage: DiffusionStage,
    *,
    platform: str,
    load_format: str,
    hf_overrides: HfOverrides,
) -> AsyncEngineArgs:
    """Arguments of the stage's `AsyncLLM`; its requests are `PoolingParams(task="plugin", ...)`.

    `platform` is "cpu" or "cuda"; `hf_overrides` picks the stage's part of the checkpoint's config. Raises
    `ConfigError` if the stage asks for what such an engine cannot do.
    """
    if stage.dtype not in ("auto", "float32"):
        raise ConfigError(f"{stage.model_stage} runs in float32; set its dtype to float32 or auto, not {stage.dtype}")
    # A request is computed whole, in one step, and depends on nothing that came before it.
    whole: dict[str, Any] = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    for name, value in whole.items():
        if stage.engine_args.get(name, value) != value:
            raise ConfigError(f"engine_args.{name} of {stage.model_stage} must be {value}: its requests are never cut")
    arguments: dict[str, Any] = whole | {
        "model": str(model_dir),
        "hf_overrides": hf_overrides,
        "runner": "pooling",
        "worker_cls": DIFFUSION_WORKER,
        "additional_config": {"omni": {"solver": stage.solver.model_dump()}},
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "float32",
        "load_format": load_format,
        "enforce_eager": True,
        # A step ends with its results on the host: there is nothing to overlap the next one with.
        "async_scheduling": False,
        "kv_cache_memory_bytes": NO_KV_CACHE_BYTES,
        "max_model_len": stage.max_model_len,
        "max_num_seqs": stage.max_num_seqs,
        "max_num_batched_tokens": max(stage.max_num_batched_tokens, stage.max_model_len),
        "disable_log_stats": True,
    }
    if platform == "cuda":
        arguments |= {"device_ids": list(stage.devices), "gpu_memory_utilization": stage.gpu_memory_utilization}
    return AsyncEngineArgs(**(arguments | stage.engine_args))
