"""The stage workers. They extend vLLM's worker for the platform and use our model runners.

An engine finds them by name (its argument `worker_cls`).
"""

from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from omni_server.protocol.device_memory import slack_bytes
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.start_report import Phase
from stages.runtime import engine_start
from stages.runtime.diffusion_runner import DiffusionModelRunnerMixin
from stages.runtime.engine_start import ProgressReporter
from stages.runtime.memory import (
    GRAPH_BYTES,
    MemoryBudget,
    check_budget,
    enforce_share,
    measured_use,
    reserved_above,
    start_measuring,
    torch_limit,
)

VllmWorker: Any = object
"""For mypy. At run time the mixins are combined with vLLM's worker for the platform."""


def platform_worker_class() -> type[Worker]:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    return Worker


def platform_runner_class(*, use_v2: bool) -> type:
    if current_platform.is_cpu():
        if use_v2:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2

            return CPUModelRunnerV2
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        return CPUModelRunner
    if use_v2:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

        return GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


class StageWorkerMixin(VllmWorker):
    """Extends the platform's worker: builds the model runner from `runner_mixin`, keeps a GPU stage within
    its share of the device (see `stages.runtime.memory`), and reports its start-up progress.

    vLLM's GPU worker has a hook for the runner (`_make_model_runner`). Its CPU worker constructs the runner
    in `init_device`, so this class replaces that runner before anything is loaded into it.
    """

    runner_mixin: type
    use_v2_model_runner: bool  # vLLM's choice; `runner_mixin` must match it
    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device
    progress: ProgressReporter

    def _make_model_runner(self) -> Any:
        mixin, base = self.runner_mixin, platform_runner_class(use_v2=self.use_v2_model_runner)
        # The mixin comes first in the method resolution order.
        runner_class = type(mixin.__name__.removesuffix("Mixin"), (mixin, base), {})
        return runner_class(self.vllm_config, self.device)

    def init_device(self) -> None:
        self.progress = engine_start.begin(self.vllm_config.additional_config, is_first_rank=self.rank == 0)
        super().init_device()
        if not isinstance(self.model_runner, self.runner_mixin):
            self.model_runner = self._make_model_runner()
        if self.device.type == "cuda":
            # vLLM has just checked that the share is free. Nothing large has been allocated yet.
            enforce_share(self.requested_memory, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.progress.report(Phase.LOADING)
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.progress.report(Phase.LOADED)

    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache. On CPU, or if the config sets a size, vLLM determines it."""
        if self.vllm_config.compilation_config.mode != CompilationMode.NONE:
            self.progress.report(Phase.COMPILING)
        elif self.device.type == "cuda":
            self.progress.report(Phase.MEASURING)
        cache = self.vllm_config.cache_config
        if self.device.type != "cuda" or cache.kv_cache_memory_bytes is not None:
            return super().determine_available_memory()
        share: int = self.requested_memory
        limit = torch_limit(share)
        start_measuring(self.device)
        # Given a size, vLLM makes its profile run but ignores the device's free memory. It returns that size
        # minus the GPU memory that its multimodal frontend keeps.
        cache.kv_cache_memory_bytes = limit
        try:
            # As in vLLM's own measurement: no small block may keep a large segment from being freed.
            with self._scoped_allocator_max_split(max_split_size_mb=20):
                frontend = limit - super().determine_available_memory()
        finally:
            cache.kv_cache_memory_bytes = None
        resident, activations = measured_use(self.device)
        slack = slack_bytes(
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            encodes_media=self.vllm_config.model_config.is_multimodal_model,
        )
        budget = MemoryBudget(share - frontend, resident, activations, self._graph_bytes(resident), slack)
        check_budget(budget, self.device)
        self.progress.report(Phase.BUDGETED, budget.describe())
        return budget.kv_cache

    def _graph_bytes(self, resident: int) -> int:
        """Estimates the memory of CUDA graphs. vLLM captures the largest graphs of each kind as a trial. Its
        own estimate is a difference in free device memory; this one is what torch's allocator reserved."""
        config = self.vllm_config.compilation_config
        if config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        start_measuring(self.device)
        self.model_runner.profile_cudagraph_memory()
        kinds = 2  # at most: decode-only graphs, and those of all other steps or their pieces
        return (
            reserved_above(resident, self.device) + kinds * len(config.cudagraph_capture_sizes) * GRAPH_BYTES
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            self.progress.report(Phase.CAPTURING)
        return super().compile_or_warm_up_model()


def expert_warm_up_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens of a step that together use all kernels of a mixture of experts above 256 tokens.

    vLLM's Triton kernels are tuned for ranges of tokens that are centered at multiples of 512, up to 4096
    (see `fused_moe/configs` in vLLM), and Triton compiles each for even and for odd numbers of tokens.
    """
    sizes = (even + odd for even in range(512, 4096 + 1, 512) for odd in (0, 1))
    return [size for size in sizes if size <= max_num_batched_tokens]


# On a CPU, importing this class replaces parts of torch.cuda that the modules of vLLM's V2 runner import by
# name, so it must come first.
_Base: type = platform_worker_class()


class ARWorker(StageWorkerMixin, _Base):
    """The worker of autoregressive stages. `VLLM_USE_V2_MODEL_RUNNER` selects the model runner generation.
    The server sets it unless an operator has: V2 on GPUs, V1 on CPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Each module loads one generation of vLLM's runner. Import only the one needed.
        if self.use_v2_model_runner:
            from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin

            self.runner_mixin = ARModelRunnerV2Mixin
        else:
            from stages.runtime.ar_runner_v1 import ARModelRunnerV1Mixin

            self.runner_mixin = ARModelRunnerV1Mixin

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compiles the kernels of a mixture of experts for steps of many tokens, and those of predicted
        codes, too. Without that, each kernel is compiled when a step first needs it, which delays all
        requests by a second or two."""
        if self.vllm_config.model_config.is_moe and not current_platform.is_cpu():
            for num_tokens in expert_warm_up_sizes(self.vllm_config.scheduler_config.max_num_batched_tokens):
                self.model_runner._dummy_run(num_tokens)
        self.model_runner.warm_up_predictor()
        return super().compile_or_warm_up_model()

    def num_row_requests(self) -> int:
        """For `collective_rpc`: number of requests that receive or send rows here."""
        return self.model_runner.num_row_requests()

    def num_resumed(self) -> int:
        """For `collective_rpc`: number of resumptions after a preemption."""
        return self.model_runner.num_resumed

    def num_steady_steps(self) -> int:
        """For `collective_rpc`: number of fast decode steps (`stages.runtime.decode_fast_path`)."""
        return self.model_runner.num_fast_steps

    def runner_generation(self) -> int:
        """For `collective_rpc`: the generation of vLLM's model runner that this stage uses, 1 or 2."""
        return 2 if self.use_v2_model_runner else 1


class DiffusionWorker(StageWorkerMixin, _Base):
    runner_mixin = DiffusionModelRunnerMixin
    model_runner: DiffusionModelRunnerMixin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Always V1, whatever vLLM chooses for other stages: the runner's own step is unused here, and V2
        # refuses pooling models that are not for embedding or classification.
        self.use_v2_model_runner = False

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Lets the model prepare itself. vLLM compiles and captures nothing: zero seconds."""
        config = self.vllm_config.additional_config
        if isinstance(config, DiffusionRuntimeConfig) and config.is_fast:
            self.progress.report(Phase.CAPTURING)
        self.model_runner.prepare_model()
        return CompilationTimes(language_model=0.0, encoder=0.0)
