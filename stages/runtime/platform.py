"""Binds our runner and worker mixins to the classes vLLM has for this platform (V1 model runner on both)."""

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from stages.runtime.parent_watch import end_with_parent


def platform_worker_class() -> type[Worker]:
    """vLLM's worker class for the current platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    return Worker


def platform_runner_class() -> type[GPUModelRunner]:
    """vLLM's V1 model-runner class for the current platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        return CPUModelRunner
    return GPUModelRunner


def build_runner(mixin: type, vllm_config: VllmConfig, device: torch.device) -> GPUModelRunner:
    """An instance of `mixin` over the platform's runner; the mixin comes first in the method order."""
    base = platform_runner_class()
    runner_class: type[GPUModelRunner] = type(mixin.__name__.removesuffix("Mixin"), (mixin, base), {})
    return runner_class(vllm_config, device)


class StageWorkerMixin:
    """Over the platform's worker: builds the model runner that `runner_mixin` names.

    vLLM's GPU worker has a hook for that (`_make_model_runner`); its CPU worker constructs the runner
    inside `init_device`, so there the finished runner is replaced before anything is loaded into it.
    """

    runner_mixin: type
    model_runner: GPUModelRunner

    def _make_model_runner(self) -> GPUModelRunner:
        if self.use_v2_model_runner:  # type: ignore[attr-defined]
            raise RuntimeError("stages run on vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        return build_runner(self.runner_mixin, self.vllm_config, self.device)  # type: ignore[attr-defined]

    def init_device(self) -> None:
        end_with_parent()
        super().init_device()  # type: ignore[misc]
        if not isinstance(self.model_runner, self.runner_mixin):
            self.model_runner = self._make_model_runner()
