"""Batches of requests in the state of vLLM's V2 sampler, for comparisons of `FusedSampler` with vLLM's
`Sampler`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from stages.runtime import top_k_kernel
from stages.runtime.fused_sampler import FusedSampler

TALKER = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05, "min_tokens": 2000}
"""The shipped config's values, with end ids barred."""


class Batch:
    """Some requests in a sampler with room for more, each with a prompt and, as after a preemption, an
    output."""

    def __init__(
        self,
        vocabulary: int,
        params: Sequence[SamplingParams],
        device: str = "cpu",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.device = torch.device(device)
        self.vocabulary = vocabulary
        max_num_reqs = len(params) + 3
        states = RequestState(max_num_reqs, 64, 64, 0, vocabulary, self.device)
        config = VllmConfig()
        made = Sampler(config, max_num_reqs, vocabulary, self.device, states, **options)
        self.sampler = FusedSampler.in_place_of(made, config)
        for number, request in enumerate(params):
            length = int(self.random.integers(1, 40))
            tokens = self.random.integers(0, vocabulary, int(self.random.integers(length, 60))).tolist()
            states.add_request(str(number), length, tokens, 0, 64)
            self.sampler.add_request(states.req_id_to_index[str(number)], request)
        states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.index = self.random.permutation([states.req_id_to_index[str(n)] for n in range(len(params))])

    def step(self, logits: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of `sample`; the requests are at random positions."""
        mapping = torch.from_numpy(self.index).to(self.device)
        pos = torch.from_numpy(self.random.integers(0, 3000, len(self.index))).to(self.device)
        ids = torch.zeros(len(self.index), dtype=torch.int32, device=self.device)
        lengths = np.full(len(self.index), 3000, np.int32)
        return logits, mapping, mapping, self.index, pos, ids, torch.zeros_like(ids), lengths

    def decoding(self) -> InputBatch:
        """A step with the next token of each request, padded by two tokens."""
        num = len(self.index)
        states = self.sampler.req_states
        made = InputBatch.make_dummy(num, num, InputBuffers(states.max_num_reqs, num + 2, self.device))
        mapping = torch.from_numpy(self.index).to(self.device)
        lengths = torch.from_numpy(states.prefill_len.np[self.index] + 1).to(self.device)
        return replace(
            made,
            idx_mapping=mapping,
            idx_mapping_np=self.index,
            expanded_idx_mapping=mapping,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            positions=torch.nn.functional.pad(lengths.long() - 1, (0, 2)),
            input_ids=torch.zeros(num + 2, dtype=torch.int32, device=self.device),
            num_tokens_after_padding=num + 2,
        )

    def ours(self, step: tuple[Any, ...]) -> list[int]:
        return self.sampler.sample(*step)[0].tolist()  # type: ignore[no-any-return]

    def vllms(self, step: tuple[Any, ...]) -> list[int]:
        """By vLLM's own method, from the same state."""
        return Sampler.sample(self.sampler, step[0].clone(), *step[1:])[0].tolist()  # type: ignore[no-any-return]


def random_params(random: np.random.Generator, vocabulary: int) -> SamplingParams:
    """What a client may ask of the talker, and in which the kernel does not differ from vLLM."""
    top_k = int(random.choice([0, 1, 5, 40, 40, 40, 100]))
    ids = random.permutation(vocabulary)
    few: list[int] = ids[:3].tolist()
    top_p = float(
        random.choice([0.5, 0.8, 0.95, 1.0] if top_k >= 40 else [0.5, 0.8, 1.0] if top_k == 5 else [1.0])
    )
    return SamplingParams(
        temperature=float(random.choice([0.0, 0.9, 0.9, 1.0, 1.7])),
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=float(random.choice([1.0, 1.05, 1.3])),
        frequency_penalty=float(random.choice([0.0, 0.0, 0.4, -0.3])),
        presence_penalty=float(random.choice([0.0, 0.0, 0.7])),
        min_tokens=int(random.choice([0, 1500])),
        stop_token_ids=few,
        logit_bias={token: float(random.normal() * 5) for token in few[1:]}
        if random.random() < 0.2
        else None,
        allowed_token_ids=ids[: int(random.integers(1, 60))].tolist()
        if top_p == 1 and random.random() < 0.4
        else None,
        seed=int(random.integers(0, 2**40)) if random.random() < 0.5 else None,
        max_tokens=2000,
    )


def random_logits(random: np.random.Generator, shape: tuple[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of several kinds; in bfloat16 equal values are the rule, as in a model's own."""
    normal = torch.from_numpy(random.normal(size=shape).astype(np.float32))
    yield "flat", normal
    yield "float16", (2 * normal).half()
    yield "peaked", 4 * normal + 8
    yield "bfloat16", (3 * normal - 5).bfloat16()
    yield "few values", (2 * normal).round()
    yield (
        "in few columns",
        torch.where(torch.arange(shape[1]) % top_k_kernel.COLUMNS < 3, normal + 9, normal),
    )
    yield "half barred", normal.masked_fill(torch.from_numpy(random.random(shape) < 0.5), float("-inf"))
