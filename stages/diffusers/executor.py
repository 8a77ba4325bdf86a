"""vLLM's executor interface over a Diffusers pipeline, in the engine's own process.

A pipeline has no KV cache, no sampler and no input batch, so no worker of vLLM's is involved: what vLLM asks
of its workers, `PipelineWorker` answers.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import run_method

from stages.diffusers.pipeline_worker import PipelineWorker


class DiffusersPipelineExecutor(Executor):
    """One denoising step of each scheduled request per `execute_model`."""

    supports_pp = False

    def _init_executor(self) -> None:
        self._worker = PipelineWorker(self.vllm_config)
        self._worker.init_device()
        self._worker.load_model()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Calls a method of the one worker. All defaults of `Executor` end here."""
        return _called(lambda: [run_method(self._worker, method, args, kwargs or {})], non_block)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return _called(lambda: self._worker.execute_model(scheduler_output), non_block)

    def check_health(self) -> None:
        self._worker.check_health()


def _called(call: Callable[[], Any], non_block: bool) -> Any:
    """Returns the result of `call`; with `non_block` a future of it, which is done, so that an error is
    raised where vLLM reads the result."""
    if not non_block:
        return call()
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - raised where the result is read
        future.set_exception(error)
    return future
