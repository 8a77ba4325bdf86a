"""The autoregressive runner on vLLM's V1 model runner, the default on CPUs.

Each override calls `super()`, so vLLM's behavior is unchanged. Specific to this generation: CPU generators,
which cannot be rewound, are set aside.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from stages.runtime.ar_runner_base import RowRunnerMixin, StepOutput
from stages.runtime.stage_step import StepBatch


class ARModelRunnerV1Mixin(RowRunnerMixin):
    """Extends vLLM's V1 `GPUModelRunner` or `CPUModelRunner`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._num_bad_logits: dict[str, int] | None = None
        self._sampled_hidden: torch.Tensor | None = None

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """Uses positions from the stage that knows the image and audio grids, if it sent any."""
        num_positions = len(req_state.prompt_token_ids or ())
        given = self.row_overlay.prompt_positions(req_state.req_id, num_positions)
        if given is None:
            super()._init_mrope_positions(req_state)
        else:
            req_state.mrope_positions, req_state.mrope_position_delta = given
        # vLLM adds indices of int32 to it.
        req_state.mrope_position_delta = np.int64(req_state.mrope_position_delta)

    # -- one step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._begin_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super()._preprocess(*args, **kwargs)
        inputs_embeds: torch.Tensor | None = inputs[1]
        if inputs_embeds is not None:
            self._lay_rows_over(inputs_embeds, self._step_batch())
        return inputs

    def _step_batch(self) -> StepBatch:
        """Views of vLLM's own arrays, valid until the next step is prepared."""
        batch, starts = self.input_batch, self.query_start_loc.np
        return StepBatch(
            request_ids=batch.req_ids,
            first_positions=batch.num_computed_tokens_cpu[: batch.num_reqs],
            num_tokens=np.diff(starts[: batch.num_reqs + 1]),
            offsets=starts[: batch.num_reqs],
        )

    def _computed_step(self) -> tuple[StepBatch, torch.Tensor]:
        return self._step_batch(), self.input_ids.gpu

    def _get_nans_in_logits(self, logits: torch.Tensor | None) -> dict[str, int]:
        """Like vLLM's NaN count, but includes positive infinity. Negative infinity bars a token."""
        if self._num_bad_logits is not None:
            return self._num_bad_logits
        return super()._get_nans_in_logits(None if logits is None else logits.relu() * 0)

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        if self.device.type == "cpu":
            # vLLM counts after sampling, which modifies float32 logits in place: a tiny penalty may have made
            # a logit infinite.
            self._num_bad_logits = None
            self._num_bad_logits = self._get_nans_in_logits(logits)
        sampled = super()._sample(logits, spec_decode_metadata)
        if self.code_history is not None:
            assert self._sampled_hidden is not None
            batch = self._step_batch()
            is_kept = ~self.discard_request_mask.np[: len(batch.request_ids)]
            self.code_history.predict(self._sampled_hidden, sampled.sampled_token_ids[:, 0], batch, is_kept)
        return sampled

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:
        if self.code_history is not None and (state := self.execute_model_state) is not None:
            self._sampled_hidden = state.sample_hidden_states  # vLLM clears its state before it samples
        discarded: list[int] = []
        if self.device.type == "cpu":
            discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        with generators_set_aside(self.input_batch.generators, discarded):
            return super().sample_tokens(grammar_output)


@contextmanager
def generators_set_aside(generators: dict[int, torch.Generator], rows: Sequence[int]) -> Iterator[None]:
    """Within the context, remove the generators of `rows` from `generators`, which vLLM's input batch indexes
    by row. `rows` are requests whose sampled token is discarded because their prefill is incomplete.

    vLLM's V1 runner samples for all rows and rewinds the generators of discarded rows by their offset. CPU
    generators have no offset, so the engine would end with a RuntimeError and take every request of the stage
    with it. A row without a generator samples from the default one, so a seed gives the same tokens however
    the prompt is chunked.
    """
    aside = {row: generators.pop(row) for row in rows if row in generators}
    try:
        yield
    finally:
        generators.update(aside)
