"""vLLM's engine arguments for an autoregressive stage."""

from pathlib import Path
from typing import Any

from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from omni_server.config.stages import ArStage
from omni_server.family import HfOverrides
from omni_server.protocol.runtime_config import StageRuntimeConfig

AR_WORKER = "stages.runtime.stage_worker.ARWorker"
SCHEDULER = "stages.runtime.stage_scheduler.StageScheduler"
ASYNC_SCHEDULER = "stages.runtime.stage_scheduler.AsyncStageScheduler"

EMPTY_GENERATION_CONFIG = Path(__file__).parent / "empty_generation_config"
"""The checkpoint's generation_config.json is written for one of its parts, but vLLM applies its end tokens to
every engine on the folder: text ids among the talker's stop ids fail as soon as min_tokens is used."""


def ar_engine_args(
    model_dir: Path,
    stage: ArStage,
    runtime: StageRuntimeConfig,
    *,
    platform: str,
    load_format: str,
    hf_overrides: HfOverrides | None,
) -> AsyncEngineArgs:
    """Arguments of the stage's `AsyncLLM`. `platform` is "cpu" or "cuda"."""
    ranks = stage.tensor_parallel_size * stage.pipeline_parallel_size
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "worker_cls": AR_WORKER,
        "additional_config": runtime,
        "generation_config": str(EMPTY_GENERATION_CONFIG),
        "tensor_parallel_size": stage.tensor_parallel_size,
        "pipeline_parallel_size": stage.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if ranks == 1 else "mp",
        "dtype": stage.dtype,
        "load_format": load_format,
        "max_model_len": stage.max_model_len,
        "max_num_seqs": stage.max_num_seqs,
        "max_num_batched_tokens": stage.max_num_batched_tokens,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,  # the worker reports what it does
        # By itself vLLM takes whichever backend the first structured request needs, and then keeps to it.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
    }
    if hf_overrides is not None:
        arguments["hf_overrides"] = hf_overrides
    if runtime.input_queue is not None:
        # The stage's tokens are no text, and do not determine its inputs.
        arguments |= {
            "skip_tokenizer_init": True,
            "enable_prompt_embeds": True,
            "enable_prefix_caching": False,
        }
    if platform == "cuda":
        arguments |= {
            "device_ids": list(stage.devices),
            "gpu_memory_utilization": stage.gpu_memory_utilization,
            "async_scheduling": True,
        }
    is_async = platform == "cuda" and not current_platform.is_cpu()
    arguments["scheduler_cls"] = ASYNC_SCHEDULER if is_async else SCHEDULER
    return AsyncEngineArgs(**(arguments | stage.engine_args))
