"""Compiled, the kernel that samples a whole step gives the tokens of vLLM's own kernels.
`pytest -m gpu -s tests/gpu/test_fused_sampler.py` prints which ones differ."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from stages.runtime import sampling_kernel
from tests.integration.sampling_states import TALKER, Batch, random_logits, random_params

pytestmark = pytest.mark.gpu

VOCABULARY = 8448
SIZES = (1, 7, 64)


@pytest.fixture(autouse=True)
def vllms_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer, where vLLM has it, draws other random numbers."""
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")


@pytest.mark.parametrize("size", SIZES)
def test_compiled_it_gives_vllms_tokens(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mixed batches, in float32, float16 and bfloat16. A last digit of a sum may decide whether one of
    several equal values at the very end of top-p is kept, and then whether it is drawn: hence one token in a
    thousand."""
    random = np.random.default_rng(size)
    calls: list[int] = []
    sample = sampling_kernel.sample

    def counting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return sample(*args)

    monkeypatch.setattr(sampling_kernel, "sample", counting)
    num_tokens, different = 0, []
    for seed in range(max(20, 400 // size)):  # one in a thousand does not show in a few hundred tokens
        params = [random_params(random, VOCABULARY) for _ in range(size)]
        batch = Batch(VOCABULARY, params, device="cuda", seed=seed)
        for kind, logits in random_logits(random, (size, VOCABULARY)):
            step = batch.step(logits.cuda())
            ours, vllms = batch.ours(step), batch.vllms(step)
            num_tokens += size
            different += [
                f"{kind}: {mine}, not {its}, {params[row]}"
                for row, (mine, its) in enumerate(zip(ours, vllms, strict=True))
                if mine != its
            ]
    tell(f"{size} requests: {len(different)} of {num_tokens} tokens differ", *different)
    assert len(calls) == num_tokens // size
    assert len(different) <= num_tokens // 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_the_talkers_steps_give_vllms_tokens(size: int, dtype: torch.dtype) -> None:
    """Of the shipped settings: 200 steps, each with other logits and positions."""
    params = [SamplingParams(**TALKER, max_tokens=2000, stop_token_ids=[8292, 8294]) for _ in range(size)]
    batch = Batch(VOCABULARY, params, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    ours, vllms = [], []
    for _ in range(200):
        logits = (4 * torch.randn(size, VOCABULARY, device="cuda", generator=generator)).to(dtype)
        step = batch.step(logits)
        ours += batch.ours(step)
        vllms += batch.vllms(step)
    num_different = sum(mine != its for mine, its in zip(ours, vllms, strict=True))
    tell(f"{size} requests, {dtype}: {num_different} of {len(ours)} tokens differ")
    assert num_different <= len(ours) // 1000


def tell(*lines: str) -> None:
    sys.stdout.write("\n".join(["", *lines]))
