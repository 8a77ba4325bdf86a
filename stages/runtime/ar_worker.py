"""Worker of an autoregressive stage; the engine finds it by name (`worker_cls`)."""

from stages.runtime.ar_runner import ARModelRunnerMixin
from stages.runtime.give_way_worker import GiveWayMixin
from stages.runtime.platform import StageWorkerMixin, platform_worker_class

_Base: type = platform_worker_class()


class ARWorker(GiveWayMixin, StageWorkerMixin, _Base):
    """vLLM's worker of the platform with `ARModelRunnerMixin` on its runner."""

    runner_mixin = ARModelRunnerMixin

    def num_row_requests(self) -> int:
        """For `collective_rpc`: requests this worker still holds rows for."""
        return self.model_runner.num_row_requests()  # type: ignore[no-any-return]

    def num_resumed(self) -> int:
        """For `collective_rpc`: how often a request was taken up again after a preemption."""
        return self.model_runner.num_resumed  # type: ignore[no-any-return]
