"""Worker of an autoregressive stage; the engine finds it by name (`worker_cls`)."""

from typing import Any

from stages.runtime.stage_worker import StageWorkerMixin, ThrottledWorkerMixin, platform_worker_class

# First of all: on a CPU this module of vLLM's stands in for parts of torch.cuda that V2's modules import by
# name.
_Base: type = platform_worker_class()


class ARWorker(ThrottledWorkerMixin, StageWorkerMixin, _Base):
    """vLLM's worker of the platform, with our rows on the generation of model runner that the environment
    selects.

    `VLLM_USE_V2_MODEL_RUNNER` does; where no operator has set it, the server does: V2 on GPUs, V1 on CPUs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Each module loads one generation of vLLM's runner; the other is not needed.
        if self.use_v2_model_runner:
            from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin

            self.runner_mixin = ARModelRunnerV2Mixin
        else:
            from stages.runtime.ar_runner_v1 import ARModelRunnerV1Mixin

            self.runner_mixin = ARModelRunnerV1Mixin

    def num_row_requests(self) -> int:
        """For `collective_rpc`: requests that this worker still holds rows for."""
        return self.model_runner.num_row_requests()

    def num_resumed(self) -> int:
        """For `collective_rpc`: how often a request was resumed after a preemption."""
        return self.model_runner.num_resumed

    def num_steady_steps(self) -> int:
        """For `collective_rpc`: decoding steps that took the fast path
        (`stages.runtime.decode_fast_path`)."""
        return self.model_runner.num_fast_steps

    def runner_generation(self) -> int:
        """For `collective_rpc`: 1 or 2, the generation of vLLM's model runner that this stage runs on."""
        return 2 if self.use_v2_model_runner else 1
