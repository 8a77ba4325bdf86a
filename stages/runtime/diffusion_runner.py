"""The model runner of non-autoregressive stages: no logits, no sampling, no KV cache, one tensor per request.

It runs on vLLM's pooling path: the stock scheduler finishes a pooling request at its first `pooler_output`.
Only the step itself replaces vLLM's; input batches, attention metadata and CUDA graphs of the base class stay
unused.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from omni_server.protocol.diffusion import INPUT_KEY, STREAMS_KEY
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.transport.result import encode_failure
from stages.runtime.diffusion_model import (
    DiffusionBatch,
    DiffusionModel,
    Failure,
    RejectedRequestsError,
    split_output,
)
from stages.runtime.step_throttle import BatchAnnouncer

logger = init_logger(__name__)


class DiffusionModelRunnerMixin:
    """Over the platform's V1 model runner, first in the method order."""

    device: torch.device

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError("a diffusion stage takes a request whole: set enable_chunked_prefill to False")
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._requests: dict[str, NewRequestData] = {}
        self._model: DiffusionModel
        config = vllm_config.additional_config
        self._announcer = BatchAnnouncer(())
        if isinstance(config, DiffusionRuntimeConfig):
            self._announcer = BatchAnnouncer(config.announces_to)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Raises `TypeError` for a model that is not a `DiffusionModel`."""
        super().load_model(load_dummy_weights)  # type: ignore[misc]
        model = self.get_model()  # type: ignore[attr-defined]
        if not isinstance(model, DiffusionModel):
            raise TypeError(
                f"{type(model).__name__} cannot run on a diffusion stage: it has to be a subclass of "
                "stages.runtime.diffusion_model.DiffusionModel"
            )
        self._model = model

    def prepare_model(self) -> None:
        """Let the model get ready for its first request."""
        self._model.prepare()

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput:
        """Results of all scheduled requests: floating tensors, or `encode_failure` where one failed."""
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
            # A pooling request ends with this step, whatever came of it.
            for request_id in request_ids:
                self._requests.pop(request_id, None)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[] for _ in request_ids],
            pooler_output=[r if isinstance(r, torch.Tensor) else encode_failure(r) for r in results],
        )

    def _run(self, request_ids: list[str]) -> list[torch.Tensor | Failure]:
        """Per request its tensor or why it failed, in the order of `request_ids`."""
        results: dict[str, torch.Tensor | Failure] = {}
        payloads: dict[str, bytes] = {}
        for request_id in request_ids:
            params = self._requests[request_id].pooling_params
            payload = (params.extra_kwargs or {}).get(INPUT_KEY) if params is not None else None
            if isinstance(payload, bytes):
                payloads[request_id] = payload
            else:
                results[request_id] = f"the request has no '{INPUT_KEY}' of type bytes"
        batch = DiffusionBatch(
            tuple(payloads),
            tuple(self._token_ids(request_id) for request_id in payloads),
            tuple(payloads.values()),
        )
        with self._announced(batch):
            results.update(zip(batch.request_ids, self._run_batch(batch), strict=True))
        return [results[request_id] for request_id in request_ids]

    def _announced(self, batch: DiffusionBatch) -> AbstractContextManager[None]:
        """Results are on the CPU when a batch has been run, so that the device is free of it then."""
        if not self._announcer.has_listeners:
            return nullcontext()
        num_streams = max(map(self._num_streams, batch.request_ids), default=1)
        if num_streams == 1:  # its codec tokens wait behind nobody's
            return nullcontext()
        return self._announcer.announced(num_streams)

    def _num_streams(self, request_id: str) -> int:
        params = self._requests[request_id].pooling_params
        value = None if params is None else (params.extra_kwargs or {}).get(STREAMS_KEY)
        return value if isinstance(value, int) else 1  # nobody is throttled for what nobody knows

    def _token_ids(self, request_id: str) -> torch.Tensor:
        return torch.tensor(self._requests[request_id].prompt_token_ids or [], dtype=torch.int64)

    def _run_batch(self, batch: DiffusionBatch) -> list[torch.Tensor | Failure]:
        if not batch.request_ids:
            return []
        try:
            return split_output(self._model.sample(batch), batch)
        except RejectedRequestsError as error:
            return self._run_without(batch, error.reasons)
        except torch.AcceleratorError:
            # The device's context is lost and no later step could succeed: the engine has to end.
            raise
        except Exception as error:
            if len(batch.request_ids) == 1:
                logger.exception("request %s failed", batch.request_ids[0])
                return [f"{type(error).__name__}: {error}"]
            logger.warning(
                "a batch of %d requests failed (%s); running them singly", len(batch.request_ids), error
            )
            return [self._run_batch(batch.select([i]))[0] for i in range(len(batch.request_ids))]

    def _run_without(
        self, batch: DiffusionBatch, reasons: dict[str, Failure]
    ) -> list[torch.Tensor | Failure]:
        accepted = [i for i, request_id in enumerate(batch.request_ids) if request_id not in reasons]
        if len(accepted) == len(batch.request_ids):
            return ["the model rejected requests that were not in its batch"] * len(accepted)
        rest = self._run_batch(batch.select(accepted))
        results: list[torch.Tensor | Failure] = [
            reasons.get(request_id, "") for request_id in batch.request_ids
        ]
        for index, result in zip(accepted, rest, strict=True):
            results[index] = result
        return results

    @property
    def num_requests(self) -> int:
        """Requests whose data is held."""
        return len(self._requests)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("plugin",)

    # There is no KV cache, nothing to profile for one and nothing to capture.

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
