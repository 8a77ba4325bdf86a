"""The talker's repetition penalty is ours, on the device; it says what vLLM's own would have said."""

from typing import Any

import msgspec
import pytest
from vllm import SamplingParams

from omni_server.engine.sampling import sampling_params
from omni_server.orchestrator import orchestrator
from omni_server.protocol.rows import REQUEST_KEY, RowsInput, encode
from omni_server.types import OmniRequest, SamplingConfig
from tests.integration.live import LiveOmni, spoken
from tests.reference.cases import CASES

NAMES = ("hello", "count", "two_turns_ethan", "tell")


def vllms_own(*args: Any, rows: Any, **kwargs: Any) -> SamplingParams:
    """`sampling_params`, but the penalty is asked of vLLM and none of our runner."""
    params = sampling_params(*args, rows=rows, **kwargs)
    if isinstance(rows, RowsInput):
        with_penalty = sampling_params(*args, rows=None, **kwargs)
        params.repetition_penalty = with_penalty.repetition_penalty
        params.extra_args = {REQUEST_KEY: encode(msgspec.structs.replace(rows, repetition_penalty=1.0))}
    return params


def requests(temperature: float, penalty: float) -> list[OmniRequest]:
    return [
        spoken(
            CASES[name].messages,
            thinker=SamplingConfig(temperature=0.0, max_tokens=24),
            talker=SamplingConfig(
                temperature=temperature,
                top_k=40,
                top_p=0.8,
                repetition_penalty=penalty,
                min_tokens=40,
                max_tokens=60,
                seed=number,
            ),
        )
        for number, name in enumerate(NAMES)
    ]


def codes(live: LiveOmni, asked: list[OmniRequest]) -> list[tuple[int, ...]]:
    return [live.answer(request).codes for request in asked]


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_codes_are_those_of_vllms_own_penalty(
    whole: LiveOmni, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    penalty = 1.3
    ours = codes(whole, requests(temperature, penalty))
    without = codes(whole, requests(temperature, 1.0))
    monkeypatch.setattr(orchestrator, "sampling_params", vllms_own)
    assert ours == codes(whole, requests(temperature, penalty))
    assert ours != without


def test_requests_together_are_penalised_for_their_own_codes_only(
    whole: LiveOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: seeds draw alike alone and together, but the last bits of a batch's logits need not."""
    together = [answer.codes for answer in whole.answers(requests(0.0, 1.3))]
    monkeypatch.setattr(orchestrator, "sampling_params", vllms_own)
    assert together == codes(whole, requests(0.0, 1.3))
