"""Worker of an autoregressive stage; the engine finds it by name (`worker_cls`)."""

from typing import Any

from stages.runtime.give_way_worker import GiveWayMixin
from stages.runtime.platform import StageWorkerMixin, platform_worker_class

# First of all: on a CPU this module of vLLM's stands in for parts of torch.cuda that V2's modules import by name.
_Base: type = platform_worker_class()


class ARWorker(GiveWayMixin, StageWorkerMixin, _Base):
    """vLLM's worker of the platform, with our rows on the generation of model runner that the environment asks for.

    `VLLM_USE_V2_MODEL_RUNNER` is that; where no operator has set it, the server does: V2 on GPUs, V1 on CPUs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Either module loads a generation of vLLM's runner, and the one of the other is not needed.
        if self.use_v2_model_runner:
            from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin

            self.runner_mixin = ARModelRunnerV2Mixin
        else:
            from stages.runtime.ar_runner import ARModelRunnerMixin

            self.runner_mixin = ARModelRunnerMixin

    def num_row_requests(self) -> int:
        """For `collective_rpc`: requests this worker still holds rows for."""
        return self.model_runner.num_row_requests()  # type: ignore[no-any-return]

    def num_resumed(self) -> int:
        """For `collective_rpc`: how often a request was taken up again after a preemption."""
        return self.model_runner.num_resumed  # type: ignore[no-any-return]

    def num_steady_steps(self) -> int:
        """For `collective_rpc`: decoding steps that one kernel prepared."""
        return self.model_runner.num_steady_steps  # type: ignore[no-any-return]

    def runner_generation(self) -> int:
        """For `collective_rpc`: 1 or 2, the generation of vLLM's model runner that this stage runs on."""
        return 2 if self.use_v2_model_runner else 1
