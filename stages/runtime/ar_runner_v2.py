"""The autoregressive runner on vLLM's V2 model runner: on GPUs the server's choice, as it is vLLM's own.

On a CPU it needs a Triton that compiles for CPUs; in tests Triton's interpreter runs it there.

Everything vLLM does stays: each override calls `super()`. What is specific to this generation is here and in
`row_model_state`. Imported only by workers that run it: it loads vLLM's V2 runner, whose kernels are Triton's.
"""

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from omni_server.protocol.rows import RowsInput
from stages.runtime.fused_sampler import FusedSampler
from stages.runtime.prompt_graphs import use_prompt_graphs
from stages.runtime.row_emitter import PendingRows
from stages.runtime.row_model_state import RowModelStateMixin, row_model_state, step_batch
from stages.runtime.row_runner import RowRunnerMixin, StepOutput, rows_request
from stages.runtime.steady_step import BlocksAndSlots, SteadySteps


class ARModelRunnerV2Mixin(RowRunnerMixin):
    """Over vLLM's V2 `GPUModelRunner`, or the `CPUModelRunner` derived from it."""

    model_state: RowModelStateMixin
    sampler: Sampler | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            raise ValueError(
                "a rank would have rows of some positions only: set prefill_context_parallel_size to 1 in a stage "
                "that sends or receives rows"
            )
        super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # vLLM's hook for the choice of the state is a method of the model's class, `get_model_state_cls`; the
        # thinker's class is vLLM's own. So the state that vLLM has just made is replaced, before anything refers to it.
        self.model_state = row_model_state(
            type(self.model_state),
            self.vllm_config,  # type: ignore[attr-defined]
            self.get_model(),  # type: ignore[attr-defined]
            self.encoder_cache,  # type: ignore[attr-defined]
            self.device,
            overlay=self.row_overlay,
            senders=self._senders,
            emits=self.row_emitter is not None,
        )
        # A stage that is fed has a small vocabulary and steps so short that sampling's launches count. vLLM's hook for
        # another sampler is `custom_sampler` of the model state, but it asked the state that has just been replaced.
        # Not where vLLM has chosen another class, nor for speculation, whose sampler refers to the one it was given.
        if (
            self.stage_config.input_queue is not None
            and type(self.sampler) is Sampler
            and self.vllm_config.speculative_config is None  # type: ignore[attr-defined]
        ):
            self.sampler = FusedSampler.in_place_of(self.sampler, self.vllm_config)  # type: ignore[attr-defined]

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        use_prompt_graphs(self)  # type: ignore[arg-type]
        if self.stage_config.input_queue is not None and self.stage_config.decoding_kernels:
            self.model_state.steady = SteadySteps.of(self, self.row_overlay)  # type: ignore[arg-type]

    # -- requests come and go

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """The first that vLLM does in each step of the scheduler's, also in one without tokens."""
        self._begin_step(scheduler_output)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self.model_state.forget(request_id)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """This generation's penalties are counted on the device, prompt and output, as the reference counts them: it
        may have the penalty that V1 must not be told of. A resumed request comes with its own parameters again."""
        for request in scheduler_output.scheduled_new_reqs:
            match rows_request(request):
                case RowsInput(repetition_penalty=penalty) if penalty != 1:
                    # A copy: where worker and scheduler share a process they share the parameters.
                    request.sampling_params = copy.copy(request.sampling_params)
                    assert request.sampling_params is not None
                    request.sampling_params.repetition_penalty = penalty
        super().add_requests(scheduler_output)  # type: ignore[misc]

    @property
    def num_steady_steps(self) -> int:
        return self.model_state.steady.num_steps if self.model_state.steady is not None else 0

    # -- one step

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        steady = self.model_state.steady
        if steady is not None and kwargs.get("dummy_run", False):  # always by keyword, in `_dummy_run`
            steady.forget()
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        steady = self.model_state.steady
        has_grammars = scheduler_output.has_structured_output_requests
        if (
            steady is not None
            and (next_batch := steady.next_batch(batch_req_state, batch_desc, has_grammars)) is not None
        ):
            return next_batch
        batch: InputBatch = super().prepare_inputs(  # type: ignore[misc]
            scheduler_output, batch_req_state, batch_desc, num_active_loras
        )
        if steady is not None:
            steady.prepared(batch, batch_desc)
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> BlocksAndSlots:
        steady = self.model_state.steady
        if steady is not None and (ready := steady.blocks_and_slots()) is not None:
            return ready
        made: BlocksAndSlots = super().prepare_attn(input_batch)  # type: ignore[misc]
        if steady is not None:
            steady.have_blocks_and_slots(made)
        return made

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:
        """Rows are taken before sampling, from the very step whose tokens `super()` returns."""
        pending = self._emit_rows()
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        return self._with_rows(output, pending)

    def _emit_rows(self) -> PendingRows | None:
        state = self.execute_model_state  # type: ignore[attr-defined]
        if state is None or self._senders.isdisjoint(state.input_batch.req_ids):
            return None
        input_rows = self.model_state.take_input_rows()
        if not self.uses_inputs_embeds:  # type: ignore[attr-defined]
            # The model looks the ids up itself; a collective operation, so on every rank.
            ids = state.input_batch.input_ids[: state.input_batch.num_tokens]
            input_rows = self.get_model().embed_input_ids(ids)  # type: ignore[attr-defined]
        if self.row_emitter is None:
            return None
        assert input_rows is not None
        return self.row_emitter.emit(
            step_batch(state.input_batch),
            state.hidden_states,
            input_rows,
            self.model_state.prompt_positions,
            self._slot,
        )
