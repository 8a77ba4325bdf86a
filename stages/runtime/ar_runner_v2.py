"""The autoregressive runner on vLLM's V2 model runner, the default on GPUs both here and in vLLM.

On a CPU it needs a Triton that compiles for CPUs; the tests use Triton's interpreter there.

Each override calls `super()`, so vLLM's own behavior is unchanged. V2 keeps model-specific state in a *model
state*; `RowModelStateMixin` adds a request's rows to it. Only workers that run V2 import this module, because
it loads vLLM's V2 runner and its Triton kernels.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from stages.runtime.ar_runner_base import RowRunnerMixin
from stages.runtime.decode_fast_path import BlocksAndSlots, DecodeFastPath
from stages.runtime.fused_sampler import FusedSampler
from stages.runtime.predictor_graphs import PredictorGraphs, cuda_graph_recorder
from stages.runtime.prompt_graphs import use_prompt_graphs
from stages.runtime.stage_step import StepBatch


class RowModelStateMixin(DefaultModelState):
    """A model state that lays rows over the input embeddings and applies the M-RoPE positions sent with them.

    Combined with the class that vLLM chooses for the model: `DefaultModelState` or a subclass."""

    device: torch.device
    rope_state: RopeState | None

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
        *,
        runner: "ARModelRunnerV2Mixin",
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._runner = runner
        if (rope := self.rope_state) is not None:
            # vLLM's are int32, and packed positions need more.
            size = (rope.max_num_reqs * rope.num_dims, rope.max_model_len)
            rope.prefill_positions = StagedWriteTensor(size, torch.int64, device, uva_instead_of_gpu=True)
            rope.prefill_delta = UvaBackedTensor(rope.max_num_reqs, torch.int64)
        self.fast_path: DecodeFastPath | None = None
        """Prepares decode steps in the runner's place. Created with its caches."""
        # M-RoPE positions `[3, num_tokens]` and delta by request index, to be written with the other staged
        # writes.
        self._given_positions: list[tuple[int, tuple[torch.Tensor, int]]] = []

    # -- new requests

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        # The stage that knows the image and audio grids sends the positions of a fed request.
        given = self._runner.row_overlay.prompt_positions(
            new_req_data.req_id, len(new_req_data.prefill_token_ids or ())
        )
        if self.rope_state is not None and given is not None:
            self._given_positions.append((req_index, given))
            self.rope_state.prefill_delta.np[req_index] = given[1]

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        for req_index, (positions, delta) in self._given_positions:
            assert self.rope_state is not None
            # Must follow vLLM's own write for this request: writes staged together have no order.
            on_device = async_tensor_h2d(positions, self.device, torch.int64)
            self.rope_state.update_prefill_positions(req_index, on_device, delta)
        self._given_positions.clear()

    # -- CUDA graphs

    def capture_inner_cudagraphs(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls it after it has recorded its own graphs, both to measure their memory and to keep them;
        never if it records none, as with `enforce_eager` and on a CPU."""
        super().capture_inner_cudagraphs(*args, **kwargs)
        self._runner.record_predictor()

    # -- one step

    @property
    def _is_fast(self) -> bool:
        return self.fast_path is not None and self.fast_path.is_fast

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> torch.Tensor:
        """A view of the buffer that CUDA graphs read, with rows laid over it."""
        if self._is_fast:
            return self.inputs_embeds[: input_batch.num_tokens_after_padding]
        inputs_embeds: torch.Tensor = super().prepare_inputs_embeds(
            scheduled_encoder_inputs, input_batch, req_states
        )
        self._runner._lay_rows_over(inputs_embeds, step_batch(input_batch))
        return inputs_embeds

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, torch.Tensor | None]:
        if self._is_fast and self.rope_state is not None:
            return {"positions": self.rope_state.positions[:, : input_batch.num_tokens_after_padding]}
        return super().prepare_inputs(input_batch, req_states)

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        fast_path = self.fast_path if cudagraph_mode == CUDAGraphMode.FULL else None
        if fast_path is not None and (ready := fast_path.metadata()) is not None:
            return ready
        made: dict[str, Any] = super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)
        if fast_path is not None:
            fast_path.keep_metadata(made)
        return made


def with_rows(base: type[ModelState]) -> type[RowModelStateMixin]:
    """Add rows to `base`, the class that vLLM chose for the model.

    Raises `TypeError` if `base` prepares inputs in its own way or provides its own sampler.
    """
    if not issubclass(base, DefaultModelState) or base.custom_sampler is not ModelState.custom_sampler:
        raise TypeError(
            f"{base.__name__} prepares inputs or samples in a way of its own: rows cannot be added to it"
        )
    state_class: type[RowModelStateMixin] = type(f"Row{base.__name__}", (RowModelStateMixin, base), {})
    return state_class


def step_batch(batch: InputBatch) -> StepBatch:
    """Views of vLLM's arrays for the step, in vLLM's order: decoding requests first."""
    return StepBatch(
        request_ids=batch.req_ids,
        first_positions=batch.num_computed_tokens_np,
        num_tokens=batch.num_scheduled_tokens,
        offsets=batch.query_start_loc_np[: batch.num_reqs],
    )


class ARModelRunnerV2Mixin(RowRunnerMixin):
    """Extends vLLM's V2 `GPUModelRunner` or its subclass `CPUModelRunner`."""

    model_state: RowModelStateMixin
    sampler: Sampler | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            raise ValueError(
                "a rank would have rows of some positions only: set prefill_context_parallel_size to 1 in a "
                "stage that sends or receives rows"
            )
        super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # vLLM's hook for choosing the state, `get_model_state_cls`, is a method of the model's class, which
        # may be vLLM's own. So we replace the state that vLLM has just created, before anything refers to it.
        self.model_state = with_rows(type(self.model_state))(
            self.vllm_config,
            self.get_model(),
            self.encoder_cache,
            self.device,
            runner=self,
        )
        # A fed stage has a small vocabulary and steps so short that sampling's kernel launches matter. vLLM
        # has already called its sampler hook, `custom_sampler`, on the model state replaced above. We keep
        # vLLM's sampler if it is of another class, and under speculation, whose sampler refers to the one it
        # was given.
        if (
            self.stage_config.is_fed
            and type(self.sampler) is Sampler
            and self.vllm_config.speculative_config is None
        ):
            self.sampler = FusedSampler.in_place_of(self.sampler, self.vllm_config)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        use_prompt_graphs(self, is_profiling=is_profiling)
        config = self.stage_config
        # The fast path's kernel builds the inputs itself and does not know the embeddings of predicted codes.
        if config.input_queues and config.decoding_kernels and not config.num_predicted:
            self.model_state.fast_path = DecodeFastPath.of(self, self.row_overlay)

    def record_predictor(self) -> None:
        """From now on, predicted codes come from CUDA graphs. Called again, it keeps them."""
        history = self.code_history
        if history is None or isinstance(history.predict_codes, PredictorGraphs):
            return
        with cuda_graph_recorder(self.device) as record:
            history.predict_codes = PredictorGraphs(self.get_model(), self._zero_hidden(), record)

    # -- request lifecycle

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM calls this first in every scheduler step, even in one without tokens."""
        self._begin_step(scheduler_output)
        super().finish_requests(scheduler_output)

    @property
    def num_fast_steps(self) -> int:
        return self.model_state.fast_path.num_steps if self.model_state.fast_path is not None else 0

    # -- one step

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        fast_path = self.model_state.fast_path
        if fast_path is not None and kwargs.get("dummy_run", False):  # always by keyword, in `_dummy_run`
            fast_path.forget()
        return super().execute_model(scheduler_output, *args, **kwargs)

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        fast_path = self.model_state.fast_path
        has_grammars = scheduler_output.has_structured_output_requests
        if (
            fast_path is not None
            and (next_batch := fast_path.next_batch(batch_req_state, batch_desc, has_grammars)) is not None
        ):
            return next_batch
        batch: InputBatch = super().prepare_inputs(
            scheduler_output, batch_req_state, batch_desc, num_active_loras
        )
        if fast_path is not None:
            fast_path.prepared(batch, batch_desc)
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> BlocksAndSlots:
        fast_path = self.model_state.fast_path
        if fast_path is not None and (ready := fast_path.blocks_and_slots()) is not None:
            return ready
        made: BlocksAndSlots = super().prepare_attn(input_batch)
        if fast_path is not None:
            fast_path.keep_blocks_and_slots(made)
        return made

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        sampled: tuple[SamplerOutput, torch.Tensor, torch.Tensor] = super().sample(
            hidden_states, input_batch, grammar_output
        )
        if self.code_history is not None:
            batch = step_batch(input_batch)
            lengths = self.req_states.prefill_len.np[input_batch.idx_mapping_np]
            self.code_history.predict(
                hidden_states[input_batch.logits_indices],
                sampled[0].sampled_token_ids[:, 0],
                batch,
                batch.first_positions + batch.num_tokens >= lengths,
            )
        return sampled

    def _computed_step(self) -> tuple[StepBatch, torch.Tensor]:
        batch = self.execute_model_state.input_batch
        return step_batch(batch), batch.input_ids
