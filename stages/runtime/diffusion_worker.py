"""The worker of non-autoregressive stages; named by `worker_cls` of the engine's arguments."""

from typing import Any

from vllm.v1.worker.worker_base import CompilationTimes

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.start_report import Phase
from stages.runtime.diffusion_runner import DiffusionModelRunnerMixin
from stages.runtime.stage_worker import StageWorkerMixin, platform_worker_class


class DiffusionWorker(StageWorkerMixin, platform_worker_class()):  # type: ignore[misc]
    """vLLM's worker for this platform with the diffusion model runner in it."""

    runner_mixin = DiffusionModelRunnerMixin
    model_runner: DiffusionModelRunnerMixin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whatever vLLM chooses for the other stages: nothing of the runner's own step is used here, and V2
        # refuses pooling models that are not for embedding or classification.
        self.use_v2_model_runner = False

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """The model prepares itself; vLLM compiles and captures nothing: zero seconds each."""
        config = self.vllm_config.additional_config
        if isinstance(config, DiffusionRuntimeConfig) and config.is_fast:
            self.progress.report(Phase.CAPTURING)
        self.model_runner.prepare_model()
        return CompilationTimes(language_model=0.0, encoder=0.0)
