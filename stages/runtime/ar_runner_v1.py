"""The autoregressive runner on vLLM's V1 model runner, the default on CPUs.

Everything that vLLM does stays: each override calls `super()`. What only this generation needs is here:
generators on a CPU that need not be rewound.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from stages.runtime.ar_runner_base import RowRunnerMixin, StepOutput
from stages.runtime.embeddings_out import PendingRows
from stages.runtime.stage_step import StepBatch


class ARModelRunnerV1Mixin(RowRunnerMixin):
    """Over vLLM's V1 `GPUModelRunner` or `CPUModelRunner`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._num_bad_logits: dict[str, int] | None = None
        self._batch: StepBatch | None = None
        self._input_rows: torch.Tensor | None = None

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """Positions of a fed request come from the stage that knows the image and audio grids."""
        num_positions = len(req_state.prompt_token_ids or ())
        given = self.row_overlay.prompt_positions(req_state.req_id, num_positions)
        if given is None:
            super()._init_mrope_positions(req_state)
        else:
            req_state.mrope_positions, req_state.mrope_position_delta = given

    # -- one step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._batch = None
        self._input_rows = None
        self._begin_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _preprocess(
        self,
        scheduler_output: SchedulerOutput,
        num_input_tokens: int,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Any:
        inputs = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)
        inputs_embeds: torch.Tensor | None = inputs[1]
        if inputs_embeds is not None and len(self.row_overlay):
            self.row_overlay.apply(inputs_embeds, self._step_batch())
        if self._senders:
            self._input_rows = self._take_input(inputs_embeds)
        return inputs

    def _take_input(self, inputs_embeds: torch.Tensor | None) -> torch.Tensor | None:
        """The model's input `[num_tokens, width]`, for the rows of this step.

        Taken before the forward pass: run eagerly, vLLM's CUDA normalisation (`fused_add_rms_norm`, in place)
        adds the first layer's output into this very buffer.
        """
        if (
            inputs_embeds is None
        ):  # the model looks the ids up itself; a collective operation, so on every rank
            return self.get_model().embed_input_ids(self.input_ids.gpu[: self._step_batch().total_tokens])
        return None if self.row_emitter is None else inputs_embeds[: self._step_batch().total_tokens].clone()

    def _get_nans_in_logits(self, logits: torch.Tensor | None) -> dict[str, int]:
        """vLLM's count of NaN, with positive infinity counted as well; negative infinity bars a token."""
        if self._num_bad_logits is not None:
            return self._num_bad_logits
        return super()._get_nans_in_logits(None if logits is None else logits.relu() * 0)

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        if self.device.type == "cpu":
            # vLLM counts after sampling, which changes float32 in place: a tiny penalty may make a logit
            # infinite.
            self._num_bad_logits = None
            self._num_bad_logits = self._get_nans_in_logits(logits)
        return super()._sample(logits, spec_decode_metadata)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:
        """Rows are taken before sampling, from the very step whose tokens `super()` returns."""
        pending = self._emit_rows()
        with self._discarded_set_aside():
            output = super().sample_tokens(grammar_output)
        return self._with_rows(output, pending)

    def _discarded_set_aside(self) -> AbstractContextManager[None]:
        if self.device.type != "cpu":
            return nullcontext()
        batch = self.input_batch
        discarded = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        return generators_set_aside(batch.generators, discarded.tolist())

    def _emit_rows(self) -> PendingRows | None:
        state = self.execute_model_state
        if self.row_emitter is None or state is None or not len(self.row_emitter):
            return None
        assert self._input_rows is not None
        return self.row_emitter.emit(
            self._step_batch(), state.hidden_states, self._input_rows, self._prompt_positions, self._slot
        )

    def _prompt_positions(self, request_id: str) -> tuple[torch.Tensor, int] | None:
        state: CachedRequestState = self.requests[request_id]
        if state.mrope_positions is None or state.mrope_position_delta is None:
            return None
        return state.mrope_positions, state.mrope_position_delta

    def _step_batch(self) -> StepBatch:
        """Views of vLLM's own arrays, which stay as they are until the next step is prepared."""
        if self._batch is None:
            batch = self.input_batch
            count = batch.num_reqs
            starts = self.query_start_loc.np
            self._batch = StepBatch(
                request_ids=batch.req_ids,
                first_positions=batch.num_computed_tokens_cpu[:count],
                num_tokens=np.diff(starts[: count + 1]),
                offsets=starts[:count],
            )
        return self._batch


@contextmanager
def generators_set_aside(generators: dict[int, torch.Generator], rows: Sequence[int]) -> Iterator[None]:
    """Inside, `generators` (by row of the batch, as vLLM's input batch has them) lack those of `rows`:
    requests whose token is sampled and thrown away, because their prompts are not computed to the end yet.

    vLLM's V1 runner samples for all rows and rewinds the generators of discarded ones by their offset, which
    generators on a CPU do not have: the engine would end with a RuntimeError, and every request of the stage
    with it. Without its generator a row is sampled from the default one. A seed then gives the same tokens
    however its prompt is cut.
    """
    aside = {row: generators.pop(row) for row in rows if row in generators}
    try:
        yield
    finally:
        generators.update(aside)
