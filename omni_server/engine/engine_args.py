"""vLLM's engine arguments for each kind of stage."""

from pathlib import Path
from typing import Any, Literal

from vllm.config.logging import LoggingConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from omni_server.config.pipeline import StepwiseEngine
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.errors import ConfigError
from omni_server.family import HfOverrides
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.runtime_config import StageRuntimeConfig

AR_WORKER = "stages.runtime.stage_worker.ARWorker"
SCHEDULER = "stages.runtime.stage_scheduler.StageScheduler"
ASYNC_SCHEDULER = "stages.runtime.stage_scheduler.AsyncStageScheduler"

EMPTY_GENERATION_CONFIG = Path(__file__).parent / "empty_generation_config"
"""The checkpoint's generation_config.json is written for one of its parts, but vLLM applies its end tokens to
every engine on the folder. Text ids among the stop ids of a stage with another vocabulary fail as soon as
min_tokens is used."""

DIFFUSION_WORKER = "stages.runtime.stage_worker.DiffusionWorker"

DIFFUSION_SCHEDULER = "stages.runtime.batching_delay.BatchingScheduler"
STEP_SCHEDULER = "stages.runtime.step_scheduler.StepScheduler"

NO_LOGGING = LoggingConfig(configure_logging=False, pylogging_config_file=None)
"""vLLM configures its loggers when it is imported, and forked engines inherit them. To do it again takes a
quarter of the CPU time of a small engine's start."""

NO_KV_CACHE_BYTES = 1 << 20
"""There is no KV cache, but on a CPU vLLM sizes one by the machine's memory unless a size is given."""


def ar_engine_args(
    model_dir: Path,
    stage: ArStage,
    runtime: StageRuntimeConfig,
    *,
    platform: str,
    load_format: str,
    hf_overrides: HfOverrides | None,
) -> AsyncEngineArgs:
    """Returns the arguments of a stage's `AsyncLLM`. `platform` is "cpu" or "cuda"."""
    is_async = platform == "cuda" and not current_platform.is_cpu()
    arguments = _common(model_dir, stage, platform, load_format, hf_overrides) | {
        "worker_cls": AR_WORKER,
        "scheduler_cls": ASYNC_SCHEDULER if is_async else SCHEDULER,
        "additional_config": runtime,
        "generation_config": str(EMPTY_GENERATION_CONFIG),
        "tensor_parallel_size": stage.tensor_parallel_size,
        "distributed_executor_backend": "uni" if stage.num_ranks == 1 else "mp",
        "dtype": stage.dtype,
        # By default vLLM chooses the backend that the first structured request needs, and keeps it.
        # A model that may write white space anywhere can write nothing else until its limit.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
    }
    if runtime.is_fed:
        arguments["skip_tokenizer_init"] = True  # the stage's tokens are not text
    if runtime.is_fed or runtime.num_predicted:
        # Token ids do not determine the stage's inputs.
        arguments |= {"enable_prompt_embeds": True, "enable_prefix_caching": False}
    if platform == "cuda":
        arguments["async_scheduling"] = True
    arguments |= stage.engine_args
    largest = arguments.get("max_cudagraph_capture_size")
    if largest is not None and not arguments.keys() & {"cudagraph_capture_sizes", "compilation_config"}:
        largest = arguments["max_cudagraph_capture_size"] = min(largest, stage.max_num_batched_tokens)
        arguments["cudagraph_capture_sizes"] = graph_sizes(largest, stage.max_num_seqs)
    return AsyncEngineArgs(**arguments)


def graph_sizes(largest: int, max_num_seqs: int) -> list[int]:
    """Returns the sizes of the CUDA graphs in tokens, ascending.

    Smaller steps are padded: by less than 8 tokens, or above `max_num_seqs` tokens by up to a quarter. vLLM's
    sizes are 16 apart: with 64 requests and 2048 tokens, 147 graphs instead of 31.
    """
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    while sizes[-1] < largest:
        spacing = max(8, 1 << (sizes[-1].bit_length() - 3))
        sizes.append((sizes[-1] // spacing + 1) * spacing)
    return sorted({min(size, largest) for size in sizes})


def diffusion_engine_args(
    model_dir: Path,
    stage: DiffusionStage,
    *,
    platform: Literal["cpu", "cuda"],
    load_format: str,
    hf_overrides: HfOverrides | None,
    carries_state: bool,
    stepwise: StepwiseEngine | None = None,
) -> AsyncEngineArgs:
    """Returns the arguments of a stage's `AsyncLLM`. Its requests are `PoolingParams(task="plugin", ...)`.

    `hf_overrides` selects the stage's part of the checkpoint's config. With `carries_state`, requests may be
    windows of a stream, whose state the model keeps for the next one. With `stepwise`, they take many steps.
    Raises `ConfigError` if the stage asks for what such an engine cannot do.
    """
    # A request is computed whole, in one step. Other dependencies between requests are up to the model.
    whole: dict[str, Any] = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    for name, value in whole.items():
        if stage.engine_args.get(name, value) != value:
            raise ConfigError(
                f"engine_args.{name} of {stage.model_stage} must be {value}: its requests are never cut"
            )
    on_gpu = platform == "cuda"
    runtime = DiffusionRuntimeConfig(
        stage=stage,
        compute_dtype=stage.compute_dtype(platform),
        is_fast=on_gpu and not stage.engine_args.get("enforce_eager", False),
        num_streams=stage.num_stream_slots if carries_state else 0,
    )
    arguments = _common(model_dir, stage, platform, load_format, hf_overrides) | {
        "runner": "pooling",
        "worker_cls": DIFFUSION_WORKER,
        "scheduler_cls": DIFFUSION_SCHEDULER,
        "additional_config": runtime,
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "float32",  # of the loaded weights; the model casts what it computes with
        # A step ends with its results on the host, so there is nothing to overlap the next step with.
        "async_scheduling": False,
        "kv_cache_memory_bytes": NO_KV_CACHE_BYTES,
    }
    if stepwise is not None:
        arguments |= {
            "worker_cls": stepwise.worker,
            "scheduler_cls": STEP_SCHEDULER,
            "config_format": stepwise.config_format,
        }
    # vLLM has nothing to capture: the model has its own CUDA graphs.
    return AsyncEngineArgs(**(arguments | stage.engine_args | whole | {"enforce_eager": True}))


def _common(
    model_dir: Path,
    stage: ArStage | DiffusionStage,
    platform: str,
    load_format: str,
    hf_overrides: HfOverrides | None,
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "load_format": load_format,
        "max_model_len": stage.max_model_len,
        "max_num_seqs": stage.max_num_seqs,
        "max_num_batched_tokens": stage.max_num_batched_tokens,
        "disable_log_stats": True,
        "logging_config": NO_LOGGING,
        # Callers take turns; the priority of a window of speech is its playout deadline.
        "scheduling_policy": "priority",
        "use_tqdm_on_load": False,  # the worker reports its progress
    }
    if hf_overrides is not None:
        arguments["hf_overrides"] = hf_overrides
    if platform == "cuda":
        arguments["gpu_memory_utilization"] = stage.gpu_memory_utilization
    return arguments
