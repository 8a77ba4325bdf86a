"""vLLM's V2 sampler with one kernel, `sampling_kernel`, for the common cases. vLLM handles all others.

It samples the same tokens as vLLM's own kernels. Only V2 workers import this module: it needs Triton.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from stages.runtime import sampling_kernel, top_k_kernel

_OWN_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class FusedSampler(Sampler):
    """Decides per step: our kernel samples if it supports every request of the step; otherwise vLLM does.

    vLLM samples
    - if a request uses logprobs after processing, min-p, bad words, or end ids that a grammar may restore;
    - where its top-k and top-p searches deviate from the definition, because of how they count equal values
      or limited precision: for top-k above `MAX_TOP_K`, for top-p without top-k or with one so small that a
      single value may hold all that top-p cuts off, and for top-p among a list of allowed ids;
    - always with several logits per request (speculation), other logits processors, thinking budgets,
      replayed traces, returned sampling masks, float64 noise, and vocabularies above `MAX_VOCABULARY`.
    """

    def __init__(
        self, vllm_config: VllmConfig, max_num_reqs: int, vocab_size: int, device: torch.device, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, max_num_reqs, vocab_size, device, **kwargs)
        (self._biases,) = (made for made in self.logits_processors if isinstance(made, LogitBiasState))
        (self._bad_words,) = (made for made in self.logits_processors if isinstance(made, BadWordsState))
        self._vocabulary = vocab_size
        self._is_possible = (
            vocab_size <= sampling_kernel.MAX_VOCABULARY
            and len(self.logits_processors) == len(_OWN_PROCESSORS)
            and not self.thinking_budget_state.enabled
            and self.trace_replay_state is None
            and not self.return_sampling_mask
            and not self.use_fp64_gumbel
        )
        self._ones = torch.ones(max_num_reqs, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._ones)
        self._fits: npt.NDArray[np.bool_] = np.ones(max_num_reqs, bool)  # by row of the state tensors
        self._wants_token_only: npt.NDArray[np.bool_] = np.ones(max_num_reqs, bool)  # by the same rows
        self._has_news = True
        self._num_bad: torch.Tensor | None = None
        scratch = (max_num_reqs, top_k_kernel.COLUMNS)
        self._scratch = (
            torch.empty(scratch, dtype=torch.int32, device=device),
            torch.empty(scratch, dtype=torch.float32, device=device),
        )

    @classmethod
    def in_place_of(cls, sampler: Sampler, vllm_config: VllmConfig) -> "FusedSampler":
        """Configured like `sampler`, which has no requests yet."""
        states = sampler.req_states
        return cls(
            vllm_config,
            states.max_num_reqs,
            states.vocab_size,
            states.device,
            req_states=states,
            logprobs_mode=sampler.logprobs_mode,
            num_speculative_tokens=sampler.num_speculative_tokens,
            use_fp64_gumbel=sampler.use_fp64_gumbel,
            enable_trace_replay=sampler.trace_replay_state is not None,
            return_sampling_mask=sampler.return_sampling_mask,
            custom_logits_processors=[
                made for made in sampler.logits_processors if not isinstance(made, _OWN_PROCESSORS)
            ],
        )

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        super().add_request(req_idx, sampling_params)
        self._has_news = True
        self._wants_token_only[req_idx] = self.get_logprobs_dims(np.array([req_idx])) is None
        states, biases = self.sampling_states, self._biases
        top_k, top_p = int(states.top_k.np[req_idx]), float(states.top_p.np[req_idx])
        if top_p == 1:
            is_exact = top_k <= sampling_kernel.MAX_TOP_K or top_k == self._vocabulary
        else:
            # Without top-k, `top_k` equals the vocabulary size. The k-th value has at most 1/k of the
            # probability: if top-p cuts off more than that, it removes at least the k-th value.
            is_exact = (
                top_k < self._vocabulary
                and top_k <= sampling_kernel.MAX_TOP_K
                and top_k * (1 - top_p) > 0.999
                and biases.num_allowed_token_ids.np[req_idx] == 0
            )
        self._fits[req_idx] = (
            (is_exact or states.temperature.np[req_idx] == 0)
            and states.min_p.np[req_idx] == 0
            and self._bad_words.num_bad_words.np[req_idx] == 0
            and biases.restore_when_all_masked.np[req_idx] == 0
        )

    def apply_staged_writes(self) -> None:
        """Called in every step, and makes a dozen small copies. There is something to write only after
        `add_request`."""
        if self._has_news:
            super().apply_staged_writes()
            self._has_news = False

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Skips vLLM's gathering and counting if each request is decoding, has one token and requests only
        that token."""
        num_requests = input_batch.num_reqs
        self._num_bad = None
        if (
            not self._is_possible
            or input_batch.has_prefill
            or input_batch.num_tokens != num_requests
            or not self._wants_token_only[input_batch.idx_mapping_np].all()
        ):
            return self._counted(super().__call__(logits, input_batch))
        tokens, _ = self.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[:num_requests],
            input_batch.input_ids[:num_requests],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        return SamplerOutput(
            sampled_token_ids=tokens.view(-1, 1),
            logprobs_tensors=None,
            num_nans=self._nans(logits) if self.compute_nans else None,
            num_sampled=self._ones[:num_requests],
            num_rejected=self._zeros[:num_requests],
        )

    def _counted(self, output: SamplerOutput) -> SamplerOutput:
        """Replace vLLM's count, which includes only NaN, with our kernel's if the kernel sampled."""
        if output.num_nans is not None and self._num_bad is not None:
            output.num_nans = self._num_bad
        return output

    def _nans(self, logits: torch.Tensor) -> torch.Tensor:
        """Bad logits of the step just sampled, `[num_requests]`. Uses vLLM's count if our kernel has none."""
        return get_num_nans(logits) if self._num_bad is None else self._num_bad

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: npt.NDArray[np.integer[Any]],
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: npt.NDArray[np.integer[Any]],
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens and processed logits, or unprocessed `logits` if our kernel samples: vLLM reads them
        only for logprobs after processing and for sampling masks."""
        if not (
            self._is_possible
            and self._fits[idx_mapping_np].all()
            and logits.shape == (len(idx_mapping_np), self._vocabulary)
            and logits.stride(1) == 1
            and logits.dtype in _FLOATS
            and not (return_logprobs and self.logprobs_mode in PROCESSED_LOGPROBS_MODES)
        ):
            return super().sample(
                logits,
                expanded_idx_mapping,
                idx_mapping,
                idx_mapping_np,
                pos,
                input_ids,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                return_logprobs,
            )
        sampling, biases, penalties = self.sampling_states, self._biases, self.penalties_state
        tokens, self._num_bad = sampling_kernel.sample(
            logits,
            idx_mapping,
            pos,
            self._scratch,
            (sampling.temperature.gpu, sampling.top_k.gpu, sampling.top_p.gpu, sampling.seeds.gpu),
            (
                biases.num_allowed_token_ids.gpu,
                biases.allowed_token_ids.gpu,
                biases.num_logit_bias.gpu,
                biases.logit_bias_token_ids.gpu,
                biases.logit_bias.gpu,
                biases.min_lens.gpu,
                biases.num_stop_token_ids.gpu,
                biases.stop_token_ids.gpu,
            ),
            (
                penalties.repetition_penalty.gpu,
                penalties.frequency_penalty.gpu,
                penalties.presence_penalty.gpu,
                penalties.prompt_bin_mask,
                penalties.output_bin_counts,
            ),
        )
        return tokens, logits
