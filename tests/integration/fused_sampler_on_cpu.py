"""Samples with both samplers, on a CPU, and prints as JSON what came out. Used by test_fused_sampler; needs
tests/integration/v2_on_cpu on PYTHONPATH."""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's stand-ins for what V2 asks of a GPU, as its CPU worker loads them
from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import sampler as sampler_module
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from stages.runtime import sampling_kernel
from tests.integration.sampling_states import TALKER, Batch, random_logits, random_params

VOCABULARIES = {320: 1, 500: 2, 8448: 1}
"""And how many batches of each: vLLM's own kernels, interpreted, take seconds with the talker's."""
UNUSUAL: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.1},
    "top_p without top_k": {"top_k": 0},
    "top_p with small top_k": {"top_k": 1},
    "top_p with allowed ids": {"allowed_token_ids": [1, 2, 3]},
    "large top_k": {"top_k": 129},
    "bad words": {"bad_words": ["x"]},
    "nothing": {},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "processed logprobs": {"logprobs_mode": "processed_logprobs"},
    "raw logprobs": {"logprobs_mode": "raw_logprobs"},
    "noise in float64": {"use_fp64_gumbel": True},
    "sampling masks": {"return_sampling_mask": True},
    "traces": {"enable_trace_replay": True},
}


class Comparison:
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls
        self.made: list[dict[str, Any]] = []

    def add(self, what: str, batch: Batch, step: tuple[Any, ...]) -> None:
        before = len(self.calls)
        ours = batch.ours(step)
        fused = len(self.calls) > before
        self.made.append({"what": what, "ours": ours, "vllms": batch.vllms(step), "fused": fused})

    def add_ours(self, what: str, batch: Batch, logits: torch.Tensor, step: InputBatch) -> None:
        before = len(self.calls)
        ours = told(batch.sampler(logits.clone(), step))
        self.made.append({"what": what, "ours": ours, "fused": len(self.calls) > before})

    def add_whole(self, what: str, batch: Batch, logits: torch.Tensor, step: InputBatch) -> None:
        before = len(self.calls)
        ours = told(batch.sampler(logits.clone(), step))
        fused = len(self.calls) > before
        vllms = told(Sampler.__call__(batch.sampler, logits.clone(), step))
        self.made.append({"what": what, "ours": ours, "vllms": vllms, "fused": fused})


def told(output: SamplerOutput) -> dict[str, Any]:
    """In a form for JSON."""
    return {
        "tokens": output.sampled_token_ids.tolist(),
        "numbers": [(str(x.dtype), x.tolist()) for x in (output.num_sampled, output.num_rejected)],
        "logprobs": None
        if output.logprobs_tensors is None
        else output.logprobs_tensors.logprob_token_ids.tolist(),
        "has_mask": output.sampling_mask_tensors is not None,
        "not_numbers": None if output.num_nans is None else output.num_nans.tolist(),
    }


def mixed(comparison: Comparison) -> None:
    random = np.random.default_rng(0)
    for vocabulary, num_batches in VOCABULARIES.items():
        for number in range(num_batches):
            params = [random_params(random, vocabulary) for _ in range(4)]
            params[0] = SamplingParams(**TALKER, max_tokens=2000, stop_token_ids=[1, 2], seed=number)
            batch = Batch(vocabulary, params, seed=number)
            for kind, logits in random_logits(random, (len(params), vocabulary)):
                comparison.add(f"{kind}, {vocabulary}, {number}", batch, batch.step(logits))


def many_equal(comparison: Comparison) -> None:
    """Thousands of values are the largest: top-k keeps the first ones."""
    params = [SamplingParams(temperature=1.0, top_k=top_k, seed=top_k) for top_k in (1, 40, 128)]
    batch = Batch(8448, params)
    largest = torch.arange(3 * 8448).view(3, -1) % 3 == 1
    comparison.add("many equal", batch, batch.step(largest.float()))


def out_of_the_ordinary(comparison: Comparison) -> None:
    """One request of two asks for what the kernel does not do, or the engine was started with it."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 500)).astype(np.float32))
    usual = SamplingParams(**TALKER, max_tokens=2000)
    for what, changes in UNUSUAL.items():
        unusual = SamplingParams(**TALKER | {"min_tokens": 0} | changes)
        if unusual.bad_words:
            unusual._bad_words_token_ids = [[7]]
        batch = Batch(500, [usual, unusual])
        comparison.add(what, batch, batch.step(logits))
    for what, options in OPTIONS.items():
        batch = Batch(500, [usual, usual], **options)
        comparison.add(what, batch, (*batch.step(logits), True))
    batch = Batch(500, [usual, usual])
    comparison.add("float64", batch, batch.step(logits.double()))
    batch = Batch(sampling_kernel.MAX_VOCABULARY + 1, [SamplingParams(temperature=0)])
    comparison.add("vocabulary", batch, batch.step(torch.randn(1, sampling_kernel.MAX_VOCABULARY + 1)))


def whole_steps(comparison: Comparison) -> None:
    """What the runner is given of a step, not the tokens only."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32))
    usual = SamplingParams(**TALKER, max_tokens=2000)
    batch = Batch(500, [usual] * 3)
    decoding = batch.decoding()
    comparison.add_whole("decoding", batch, logits, decoding)
    # Of the first one's prompt there is more to come.
    chunk = replace(
        decoding, seq_lens=decoding.seq_lens - torch.tensor([2, 0, 0], dtype=torch.int32), has_prefill=True
    )
    comparison.add_whole("a chunk of a prompt", batch, logits, chunk)
    for what, options in OPTIONS.items():
        batch = Batch(500, [usual, usual, SamplingParams(temperature=0, logprobs=2)], **options)
        comparison.add_whole(f"logprobs, {what}", batch, logits, batch.decoding())


def not_numbers(comparison: Comparison) -> None:
    """Requests whose logits are not all finite numbers among others, greedy and sampled.

    Not compared with vLLM's own kernel, which Triton cannot interpret.
    """
    for what, params in (
        ("greedy", SamplingParams(temperature=0)),
        ("sampled", SamplingParams(**TALKER, max_tokens=2000, seed=1)),
    ):
        logits = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 500)).astype(np.float32))
        batch = Batch(500, [params] * 4)
        batch.sampler.compute_nans = True
        comparison.add_ours(f"{what}, finite", batch, logits, batch.decoding())
        logits[1, 7:9] = torch.nan
        logits[3] = torch.nan
        comparison.add_ours(f"{what}, NaN", batch, logits, batch.decoding())
        logits[1, 7:9] = torch.inf
        logits[1, 9] = -torch.inf
        comparison.add_ours(f"{what}, infinity", batch, logits, batch.decoding())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler_module, "get_num_nans", lambda logits: logits.isnan().sum(1))
            comparison.add_ours(
                f"{what}, beside a prompt", batch, logits, replace(batch.decoding(), has_prefill=True)
            )


if __name__ == "__main__":
    calls: list[int] = []
    sample = sampling_kernel.sample

    def counting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return sample(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernel, "sample", counting)
        groups = {}
        for group in (mixed, many_equal, out_of_the_ordinary, whole_steps, not_numbers):
            comparison = Comparison(calls)
            group(comparison)
            groups[group.__name__] = comparison.made
    sys.stdout.write(json.dumps(groups) + "\n")
