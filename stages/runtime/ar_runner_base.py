"""The autoregressive runner's part common to both vLLM generations: rows in and out per request.

The adapters for the generations, `ar_runner_v1` and `ar_runner_v2`, call it at the right points of a step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.sequence import IntermediateTensors
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import REQUEST_KEY, RowsInput, RowsOutput, decode_request
from stages.runtime.embeddings_in import ComposesRows, HasRowTable, RowOverlay
from stages.runtime.embeddings_out import PendingRows, RowEmitter, consumer_prompt, last_sent
from stages.runtime.fractional_positions import unpacked
from stages.runtime.frame_predictor import CodeHistory, PendingCodes, frame_predictor
from stages.runtime.row_producer import RowProducer
from stages.runtime.stage_step import (
    StepBatch,
    TakenSlot,
    attach_findings,
    attached_step,
    stage_config,
)

VllmRunner: Any = object
"""For mypy. At run time the mixin is combined with one of vLLM's model runners."""

StepOutput: TypeAlias = ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors | None
"""Return type of `sample_tokens` in vLLM's runners. None on a rank that does not sample."""


class RowRunnerMixin(VllmRunner):
    """Extends one of vLLM's model runners, below an adapter."""

    device: torch.device
    use_aux_hidden_state_outputs: bool

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.stage_config = config = stage_config(vllm_config)
        self.row_emitter: RowEmitter | None = None
        self.row_overlay = RowOverlay(config.input_queues, get_tensor_model_parallel_rank())
        self.code_history: CodeHistory | None = None
        """Set if the model predicts codes for the sampled tokens."""
        self.num_resumed = 0
        self._known: set[str] = set()
        # Position behind the last row that is sent. Known on every rank; only one rank has the emitter.
        self._senders: dict[str, float] = {}
        self._has_hidden_layer = False
        self._slot: TakenSlot | None = None
        self._input_rows: torch.Tensor | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        config = self.stage_config
        if config.decoding_kernels and self.device.type == "cuda":  # other devices may lack Triton
            from stages.runtime.small_batch_gemm import use_small_batch_gemm

            use_small_batch_gemm(self.get_model())
        if config.row_producer is not None:
            assert config.output_queue is not None
            producer_class = resolve_obj_by_qualname(config.row_producer.replace(":", "."))
            # Every rank needs a producer: it looks up embeddings, which is a collective operation.
            producer = producer_class(self.get_model(), Path(config.model_dir))
            self._use_hidden_layer(producer)
            if get_tensor_model_parallel_rank() == 0:
                self.row_emitter = RowEmitter(producer, config.output_queue, self.device)
        if config.num_predicted:
            predictor = frame_predictor(self.get_model(), config.num_predicted)
            predictor.code_sampling = predictor.code_sampling.changed(config.predictor_sampling)
            self.code_history = CodeHistory(
                predictor,
                max_num_seqs=self.vllm_config.scheduler_config.max_num_seqs,
                max_model_len=self.vllm_config.model_config.max_model_len,
                device=self.device,
            )
        if config.row_table:
            model = self.get_model()
            if not isinstance(model, HasRowTable):
                raise TypeError(f"{type(model).__name__} has no table of rows for text ids")
            self.row_overlay.use_table(model.row_table())
            if isinstance(model, ComposesRows):
                self.row_overlay.compose_rows = model.compose_rows

    @torch.inference_mode()
    def warm_up_predictor(self) -> None:
        """Compiles the kernels of the predicted codes, whether or not CUDA graphs are recorded later."""
        if self.code_history is not None:
            self.code_history.warm_up(self._zero_hidden())

    def _zero_hidden(self) -> torch.Tensor:
        """As the hidden states that the most tokens of a step are sampled from: `[max_num_seqs, width]`."""
        config = self.vllm_config.model_config
        return torch.zeros(
            self.vllm_config.scheduler_config.max_num_seqs,
            config.get_hidden_size(),
            dtype=config.dtype,
            device=self.device,
        )

    def _use_hidden_layer(self, producer: RowProducer) -> None:
        """Lets the model return the hidden state that the producer needs, as it does for EAGLE 3."""
        if producer.hidden_layer is None:
            return
        model = self.get_model()
        if not supports_eagle3(model):
            raise TypeError(f"{type(model).__name__} does not return the hidden states of a layer")
        if self.use_aux_hidden_state_outputs:
            raise ValueError("a stage that sends a layer's hidden states cannot draft from hidden states")
        model.set_aux_hidden_state_layers((producer.hidden_layer,))
        self.use_aux_hidden_state_outputs = True
        self._has_hidden_layer = True

    # -- request lifecycle

    def _begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Called for every scheduler step, before vLLM processes its requests."""
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
        self.num_resumed += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        step = attached_step(scheduler_output)
        self._slot = step.slot
        self._input_rows = None
        for request_id, feed in step.feeds:
            self.row_overlay.feed(request_id, feed)
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id in self._known:  # V2 receives a resumed request as if it were new
                self.num_resumed += 1
            else:
                self._known.add(request.req_id)
                self._announce(request)

    def _announce(self, request: NewRequestData) -> None:
        if self.code_history is not None and request.sampling_params is not None:
            num_prompt_tokens = len(request.prompt_token_ids or ())
            self.code_history.add(request.req_id, num_prompt_tokens, request.sampling_params)
        extra = {} if request.sampling_params is None else request.sampling_params.extra_args or {}
        match decode_request(extra[REQUEST_KEY]) if REQUEST_KEY in extra else None:
            case RowsInput() as rows_input:
                self.row_overlay.announce(request.req_id, rows_input)
            case RowsOutput() as rows_output if self.stage_config.row_producer is not None:
                self._senders[request.req_id] = last_sent(rows_output)
                if self.row_emitter is None:
                    return
                token_ids = list(request.prompt_token_ids or ())
                positions = None
                if self.vllm_config.model_config.uses_mrope:
                    length, media = consumer_prompt(len(token_ids), request.mm_features, rows_output.spans)
                    # One more is where text that follows begins. Tokens of text are all alike here.
                    in_model = self.get_model().get_mrope_input_positions([0] * (length + 1), media)
                    positions = unpacked(in_model[0])
                modalities = {feature.modality for feature in request.mm_features}
                self.row_emitter.add(request.req_id, rows_output, token_ids, modalities, positions)

    def _forget(self, request_id: str) -> None:
        """Drop the state of an ended (not merely preempted) request."""
        self._known.discard(request_id)
        self._senders.pop(request_id, None)
        self.row_overlay.remove(request_id)
        if self.code_history is not None:
            self.code_history.remove(request_id)
        if self.row_emitter is not None:
            self.row_emitter.remove(request_id)

    # -- one step

    def _lay_rows_over(self, inputs_embeds: torch.Tensor, batch: StepBatch) -> None:
        """Before the forward pass, add the embeddings of predicted codes to the model's input
        `[>= num_tokens, width]`, then lay received rows over it. Copies that input if the step sends rows: in
        eager mode, vLLM's in-place CUDA normalisation (`fused_add_rms_norm`) adds the first layer's output to
        this buffer."""
        if self.code_history is not None:
            self.code_history.add_embeddings(inputs_embeds, batch)
        if len(self.row_overlay):
            self.row_overlay.apply(inputs_embeds, batch)
        if self._sends_rows(batch):
            self._input_rows = inputs_embeds[: batch.total_tokens].clone()

    def _sends_rows(self, batch: StepBatch) -> bool:
        """Whether the step may compute rows that are sent."""
        if self._senders.keys().isdisjoint(batch.request_ids):
            return False
        return any(first < self._senders.get(request_id, 0) for request_id, first, _, _ in batch.parts())

    def _computed_step(self) -> tuple[StepBatch, torch.Tensor]:
        """The batch whose forward pass has run, and its token ids `[>= num_tokens]`."""
        raise NotImplementedError

    def _emit_rows(self) -> PendingRows | None:
        state = self.execute_model_state
        if state is None or not self._senders:
            return None
        batch, token_ids = self._computed_step()
        if not self._sends_rows(batch):
            return None
        input_rows, self._input_rows = self._input_rows, None
        if input_rows is None:
            # The model looks up the ids itself. The lookup is collective, so every rank runs it.
            input_rows = self.get_model().embed_input_ids(token_ids[: batch.total_tokens])
        if self.row_emitter is None:
            return None
        hidden = state.aux_hidden_states[0] if self._has_hidden_layer else state.hidden_states
        return self.row_emitter.emit(batch, hidden, input_rows, self._slot)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:
        """Takes the rows before sampling, from the same step whose tokens `super()` returns."""
        rows = self._emit_rows()
        output = super().sample_tokens(grammar_output)
        codes = None if self.code_history is None else self.code_history.take()
        if rows is None and codes is None and not self.row_overlay.has_findings:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return CompletedOutput(output, rows, codes, self.row_overlay.take_findings())
        if not isinstance(output, ModelRunnerOutput) or output is EMPTY_MODEL_RUNNER_OUTPUT:
            assert rows is None
            return output  # this rank computed no step; findings wait for the next one
        return completed(output, rows, codes, self.row_overlay.take_findings())

    @property
    def num_fast_steps(self) -> int:
        """Decode steps that took the fast path; 0 in a generation without one."""
        return 0

    def num_row_requests(self) -> int:
        """Number of requests that receive or send rows or whose codes are kept, each counted once for each; 0
        when the stage is idle."""
        holders = (self.row_overlay, self.row_emitter, self.code_history)
        return sum(len(holder) for holder in holders if holder is not None)


class CompletedOutput(AsyncModelRunnerOutput):
    """Calls `completed` when vLLM requests the finished output."""

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        rows: PendingRows | None,
        codes: PendingCodes | None,
        findings: Mapping[str, Corruption],
    ) -> None:
        self._output = output
        self._parts = rows, codes, findings

    def get_output(self) -> ModelRunnerOutput:
        return completed(self._output.get_output(), *self._parts)


def completed(
    output: ModelRunnerOutput,
    rows: PendingRows | None,
    codes: PendingCodes | None,
    findings: Mapping[str, Corruption],
) -> ModelRunnerOutput:
    """Add the step's rows or predicted codes, once copied, and all `findings` to `output`, and return it.
    Corrupt rows come last: they are the cause."""
    if codes is not None:
        output.pooler_output = codes.finish()
        findings = {**codes.corrupt, **findings}
    if rows is not None:
        output.pooler_output = rows.finish()
        findings = {**findings, **rows.corrupt}
    if findings:
        attach_findings(output, findings)
    return output
