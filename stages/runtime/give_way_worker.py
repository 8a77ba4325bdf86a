"""Where a worker gives way: before each of its steps, whichever generation of vLLM's runner computes it."""

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_server.protocol.give_way import GiveWaySpec
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.runtime.give_way import GiveWay


class GiveWayMixin:
    """Over a worker: puts steps off as `StageRuntimeConfig.gives_way` asks for it.

    Of several ranks the first one waits. The others come as far as the first collective operation of their step.
    """

    vllm_config: VllmConfig
    rank: int
    _give_way: GiveWay | None = None

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        match self.vllm_config.additional_config:
            case StageRuntimeConfig(gives_way=GiveWaySpec() as spec) if self.rank == 0:
                self._give_way = GiveWay(spec)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._give_way is not None and scheduler_output.total_num_scheduled_tokens > 0:
            self._give_way.wait()
        return super().execute_model(scheduler_output)  # type: ignore[misc, no-any-return]

    def shutdown(self) -> None:
        if self._give_way is not None:
            self._give_way.close()
        super().shutdown()  # type: ignore[misc]

    def pauses(self) -> tuple[int, float]:
        """For `collective_rpc`: how often this worker has given way, and for how many seconds in all."""
        return (0, 0.0) if self._give_way is None else (self._give_way.num_pauses, self._give_way.paused_s)
