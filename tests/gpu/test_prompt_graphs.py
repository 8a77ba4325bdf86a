"""Prompts through graphs of whole steps, with FlashAttention in bfloat16 as the server has it:
log-probabilities are those without any graph, one by one and together, where prompts and decoding share
steps.

Run by hand: `pytest -m gpu tests/gpu/test_prompt_graphs.py -s`. In float32 and against the reference's
tokens, `test_demo_parity.py` goes through the same graphs.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from omni_server.types import OmniEvent, OmniRequest, SamplingConfig, TextDelta
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import LiveOmni, demo_config, written
from tests.reference.cases import ask

pytestmark = pytest.mark.gpu

NUM_WORDS = (1, 5, 20, 40, 60, 90, 120, 200, 300, 20, 20, 5)
NUM_TOKENS = 6
MAX_DIFFERENCE = 0.1
"""Of a log-probability; bfloat16 has 8 bits."""

Likely = dict[bytes, float]
"""Log-probabilities by token."""


def questions() -> list[str]:
    words = np.random.default_rng(7)
    return [" ".join(f"word{number}" for number in words.integers(0, 1000, size)) for size in NUM_WORDS]


def first_tokens(checkpoint: Path, *, graphs: bool) -> tuple[list[Likely], list[Likely]]:
    """What may be the first token of each answer: asked one by one, and all together."""
    thinker = {
        "enforce_eager": not graphs,
        "attention_backend": "FLASH_ATTN",
        "max_cudagraph_capture_size": 512,
    }
    config = demo_config(
        platform="cuda",
        stages={
            "thinker": {"gpu_memory_utilization": 0.2, "dtype": "bfloat16", "engine_args": thinker},
            "talker": {"gpu_memory_utilization": 0.2, "dtype": "bfloat16"},
            "code2wav": {"gpu_memory_utilization": 0.2},
        },
    )
    live = LiveOmni(checkpoint, config)
    try:
        sampling = SamplingConfig(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
        requests = [[written(ask(text), thinker=sampling) for text in questions()] for _ in range(2)]
        alone = [_first(live.events(request)) for request in requests[0]]

        async def first(request: OmniRequest) -> Likely:
            return _first([event async for event in live.omni.events(request)])

        async def together() -> list[Likely]:
            return await asyncio.gather(*(first(request) for request in requests[1]))

        return alone, live.run(together())
    finally:
        live.close()


def _first(events: list[OmniEvent]) -> Likely:
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]
    return {likely.utf8: likely.logprob for likely in tokens[0].top}


def difference(some: Likely, others: Likely) -> float:
    """The largest of a log-probability that both have; infinite where they have too few in common."""
    common = some.keys() & others.keys()
    return max(abs(some[t] - others[t]) for t in common) if len(common) > len(some) // 2 else float("inf")


def test_prompts_have_the_log_probabilities_that_they_have_without_graphs(tmp_path: Path) -> None:
    checkpoint = make_demo_checkpoint(tmp_path / "checkpoint")
    wanted, wanted_together = first_tokens(checkpoint, graphs=False)
    alone, together = first_tokens(checkpoint, graphs=True)
    runs = {
        "without graphs, together": wanted_together,
        "alone": alone,
        "together": together,
        "those of other prompts": [*wanted[1:], wanted[0]],
    }
    largest = {
        name: [round(difference(*pair), 4) for pair in zip(wanted, found, strict=True)]
        for name, found in runs.items()
    }
    print("\n" + json.dumps(largest, indent=1))  # noqa: T201
    assert min(largest.pop("those of other prompts")) > MAX_DIFFERENCE  # so this would be noticed
    assert max(max(found) for found in largest.values()) < MAX_DIFFERENCE
