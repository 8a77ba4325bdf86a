"""The model runner of non-autoregressive stages: no logits, no sampling, no KV cache, one tensor per request.

It uses vLLM's pooling path: the stock scheduler finishes a pooling request at its first `pooler_output`. It
replaces only the step itself and does not use the input batches, attention metadata and CUDA graphs of the
base class.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from omni_server.protocol.diffusion import INPUT_KEY
from omni_server.transport.result import Failure, encode_failure
from stages.runtime.diffusion_model import (
    DiffusionBatch,
    DiffusionModel,
    RejectedRequestsError,
    checked_results,
)

logger = init_logger(__name__)


class DiffusionModelRunnerMixin:
    """Extends the platform's V1 model runner. Comes first in the MRO."""

    device: torch.device

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError("a diffusion stage takes a request whole: set enable_chunked_prefill to False")
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._requests: dict[str, NewRequestData] = {}
        self._model: DiffusionModel

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Raises `TypeError` for a model that is not a `DiffusionModel`."""
        super().load_model(load_dummy_weights)  # type: ignore[misc]
        model = self.get_model()  # type: ignore[attr-defined]
        if not isinstance(model, DiffusionModel):
            raise TypeError(
                f"{type(model).__name__} cannot run on a diffusion stage: it has to be a subclass of "
                "stages.runtime.diffusion_model.DiffusionModel"
            )
        if self.load_config.load_format == "dummy":  # type: ignore[attr-defined]
            model.randomize_weights()
        self._model = model

    def prepare_model(self) -> None:
        self._model.prepare()

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput:
        """Returns a floating-point tensor for each scheduled request, or `encode_failure` if it failed."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = new
        request_ids = list(scheduler_output.num_scheduled_tokens)
        if not request_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        try:
            results = self._run(request_ids)
        finally:
            # A pooling request ends with this step, whatever its result.
            for request_id in request_ids:
                self._requests.pop(request_id, None)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[] for _ in request_ids],
            pooler_output=[r if isinstance(r, torch.Tensor) else encode_failure(r) for r in results],
        )

    def _run(self, request_ids: list[str]) -> list[torch.Tensor | Failure]:
        """Returns each request's tensor or failure, in the order of `request_ids`."""
        inputs = {
            request_id: payload
            for request_id in request_ids
            if isinstance(payload := self._extra(request_id).get(INPUT_KEY), bytes)
        }
        token_ids = [self._requests[request_id].prompt_token_ids or [] for request_id in inputs]
        batch = DiffusionBatch(
            tuple(inputs),
            tuple(torch.tensor(ids, dtype=torch.int64) for ids in token_ids),
            tuple(inputs.values()),
        )
        results = self._run_batch(batch)
        missing = f"the request has no '{INPUT_KEY}' of type bytes"
        return [results.get(request_id, missing) for request_id in request_ids]

    def _extra(self, request_id: str) -> Mapping[str, object]:
        params = self._requests[request_id].pooling_params
        return {} if params is None else params.extra_kwargs or {}

    def _run_batch(self, batch: DiffusionBatch) -> dict[str, torch.Tensor | Failure]:
        if not batch.request_ids:
            return {}
        try:
            results = checked_results(self._model.sample(batch), batch)
            return dict(zip(batch.request_ids, results, strict=True))
        except RejectedRequestsError as error:
            accepted = [
                i for i, request_id in enumerate(batch.request_ids) if request_id not in error.reasons
            ]
            if len(accepted) == len(batch.request_ids):
                return dict.fromkeys(
                    batch.request_ids, "the model rejected requests that were not in its batch"
                )
            return self._run_batch(batch.select(accepted)) | error.reasons
        except torch.AcceleratorError:
            # The device context is lost and no later step can succeed, so the engine must end.
            raise
        except Exception as error:
            if len(batch.request_ids) == 1:
                logger.exception("request %s failed", batch.request_ids[0])
                return {batch.request_ids[0]: f"{type(error).__name__}: {error}"}
            logger.warning(
                "a batch of %d requests failed (%s); running them singly", len(batch.request_ids), error
            )
            alone: dict[str, torch.Tensor | Failure] = {}
            for index in range(len(batch.request_ids)):
                alone |= self._run_batch(batch.select([index]))
            return alone

    @property
    def num_requests(self) -> int:
        """Number of requests held."""
        return len(self._requests)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("plugin",)

    # There is no KV cache, so there is nothing to profile or capture.

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {}

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.kv_caches: list[torch.Tensor] = []

    def profile_run(self, randomize_inputs: bool = False) -> None:
        pass

    def warming_up_model(self) -> None:
        pass

    def capture_model(self) -> int:
        return 0

    def _dummy_run(self, num_tokens: int, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = torch.empty(0, device=self.device)
        return nothing, nothing
