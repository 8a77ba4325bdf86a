"""The autoregressive runner: vLLM's V1 model runner, plus rows out and rows in.

Everything vLLM does stays: each override calls `super()`. What is specific to the V1 generation of the
runner is in this module; `RowEmitter` and `RowOverlay` know nothing of it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.sequence import IntermediateTensors
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from omni_server.protocol.rows import REQUEST_KEY, RowsInput, RowsOutput, decode_request
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.runtime.batch import StepBatch, attached_step
from stages.runtime.repetition_penalty import RepetitionPenalty
from stages.runtime.row_emitter import PendingRows, RowEmitter
from stages.runtime.row_overlay import RowOverlay


class ARModelRunnerMixin:
    """Over vLLM's V1 `GPUModelRunner` or `CPUModelRunner`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        config = vllm_config.additional_config
        if not isinstance(config, StageRuntimeConfig):
            raise TypeError("an omni stage needs additional_config=StageRuntimeConfig(...)")
        self.stage_config = config
        self.row_emitter: RowEmitter | None = None
        self.num_resumed = 0
        self.row_overlay = RowOverlay(config.input_queue, get_tensor_model_parallel_rank())
        self.repetition_penalty = RepetitionPenalty(vllm_config.model_config.get_vocab_size(), device)
        self._sending: set[str] = set()  # on every rank, the emitter is on one
        self._batch: StepBatch | None = None
        self._input_rows: torch.Tensor | None = None

    # -- set-up

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.stage_config
        if config.row_producer is not None:
            assert config.output_queue is not None
            producer_class = resolve_obj_by_qualname(config.row_producer.replace(":", "."))
            # On every rank: it looks up embeddings, which is a collective operation.
            producer = producer_class(self.get_model(), Path(config.model_dir))  # type: ignore[attr-defined]
            if get_tensor_model_parallel_rank() == 0:
                self.row_emitter = RowEmitter(producer, config.output_queue, self.device)  # type: ignore[attr-defined]

    # -- requests come and go

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._batch = None
        self._input_rows = None
        for request_id in scheduler_output.finished_req_ids:
            self._sending.discard(request_id)
            self.row_overlay.remove(request_id)
            self.repetition_penalty.remove(request_id)
            if self.row_emitter is not None:
                self.row_emitter.remove(request_id)
        self.num_resumed += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        for request_id, feed in attached_step(scheduler_output).feeds:
            self.row_overlay.feed(request_id, feed)
        for request in scheduler_output.scheduled_new_reqs:
            self._announce(request)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _announce(self, request: NewRequestData) -> None:
        params = request.sampling_params
        if params is None or not params.extra_args or REQUEST_KEY not in params.extra_args:
            return
        match decode_request(params.extra_args[REQUEST_KEY]):
            case RowsInput() as rows_input:
                self.row_overlay.announce(request.req_id, rows_input)
                self.repetition_penalty.add(request.req_id, rows_input.repetition_penalty)
            case RowsOutput() as rows_output if self.stage_config.row_producer is not None:
                self._sending.add(request.req_id)
                if self.row_emitter is None:
                    return
                modalities = {feature.modality for feature in request.mm_features}
                self.row_emitter.add(request.req_id, rows_output, list(request.prompt_token_ids or ()), modalities)

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """Positions of a fed request come from the stage that knows the image and audio grids."""
        num_positions = len(req_state.prompt_token_ids or ())
        given = self.row_overlay.prompt_positions(req_state.req_id, num_positions)
        if given is None:
            super()._init_mrope_positions(req_state)  # type: ignore[misc]
        else:
            req_state.mrope_positions, req_state.mrope_position_delta = given

    # -- one step

    def _preprocess(
        self,
        scheduler_output: SchedulerOutput,
        num_input_tokens: int,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Any:
        inputs = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)  # type: ignore[misc]
        inputs_embeds: torch.Tensor | None = inputs[1]
        if inputs_embeds is not None and len(self.row_overlay):
            self.row_overlay.apply(inputs_embeds, self._step_batch())
        if len(self.repetition_penalty):
            # With async scheduling nobody but the device knows yet what was sampled last.
            self.repetition_penalty.see(self._input_ids(), self._step_batch())
        if self._sending:
            self._input_rows = self._take_input(inputs_embeds)
        return inputs

    def _take_input(self, inputs_embeds: torch.Tensor | None) -> torch.Tensor | None:
        """The model's input `[num_tokens, width]`, for the rows of this step.

        Taken before the forward pass: run eagerly, vLLM's CUDA normalisation (`fused_add_rms_norm`, in place) adds the
        first layer's output into this very buffer.
        """
        if inputs_embeds is None:  # the model looks the ids up itself; a collective operation, so on every rank
            return self.get_model().embed_input_ids(self._input_ids())  # type: ignore[attr-defined, no-any-return]
        return None if self.row_emitter is None else inputs_embeds[: self._step_batch().total_tokens].clone()

    def _input_ids(self) -> torch.Tensor:
        """Ids that this step computes on, `[num_tokens]`, on the device."""
        return self.input_ids.gpu[: self._step_batch().total_tokens]  # type: ignore[attr-defined, no-any-return]

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        if logits is not None and len(self.repetition_penalty):
            logits = self.repetition_penalty.apply(logits, self._step_batch())
        return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc, no-any-return]

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors:
        """Rows are taken before sampling, from the very step whose tokens `super()` returns."""
        pending = self._emit_rows()
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if pending is None:
            return output  # type: ignore[no-any-return]
        if isinstance(output, AsyncModelRunnerOutput):
            return _WithRows(output, pending)
        output.pooler_output = pending.finish()
        return output  # type: ignore[no-any-return]

    def _emit_rows(self) -> PendingRows | None:
        state = self.execute_model_state  # type: ignore[attr-defined]
        if self.row_emitter is None or state is None or not len(self.row_emitter):
            return None
        assert self._input_rows is not None
        return self.row_emitter.emit(
            self._step_batch(),
            state.hidden_states,
            self._input_rows,
            self._prompt_positions,
            attached_step(state.scheduler_output).slot,
        )

    def _prompt_positions(self, request_id: str) -> tuple[torch.Tensor, int] | None:
        state: CachedRequestState = self.requests[request_id]  # type: ignore[attr-defined]
        if state.mrope_positions is None or state.mrope_position_delta is None:
            return None
        return state.mrope_positions, state.mrope_position_delta

    def _step_batch(self) -> StepBatch:
        """Views of vLLM's own arrays, which stay as they are until the next step is prepared."""
        if self._batch is None:
            batch = self.input_batch  # type: ignore[attr-defined]
            count = batch.num_reqs
            starts = self.query_start_loc.np  # type: ignore[attr-defined]
            self._batch = StepBatch(
                request_ids=batch.req_ids,
                first_positions=batch.num_computed_tokens_cpu[:count],
                num_tokens=np.diff(starts[: count + 1]),
                offsets=starts[:count],
            )
        return self._batch

    def num_row_requests(self) -> int:
        """Requests that rows are held for or sent for; 0 when the stage is idle."""
        return len(self.row_overlay) + (len(self.row_emitter) if self.row_emitter is not None else 0)


class _WithRows(AsyncModelRunnerOutput):
    """Async scheduling: the step's rows join its tokens when vLLM asks for the finished output."""

    def __init__(self, output: AsyncModelRunnerOutput, pending: PendingRows) -> None:
        self._output = output
        self._pending = pending

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        output.pooler_output = self._pending.finish()
        return output
