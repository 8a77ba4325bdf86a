"""The repetition penalty of the talker counts a request's own codec tokens."""

import pytest

from omni_server.types import OmniRequest, SamplingConfig
from tests.integration.live import LiveOmni, spoken
from tests.reference.cases import CASES

NAMES = ("hello", "count", "two_turns_ethan", "tell")


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
def test_a_penalty_changes_the_codes_of_every_request(whole: LiveOmni, temperature: float) -> None:
    penalised, without = (codes(whole, requests(temperature, penalty)) for penalty in (1.3, 1.0))
    assert all(a != b for a, b in zip(penalised, without, strict=True))


def test_requests_together_are_penalised_for_their_own_codes_only(whole: LiveOmni) -> None:
    """Greedy: seeds draw alike alone and together, but the last bits of a batch's logits need not."""
    together = [answer.codes for answer in whole.answers(requests(0.0, 1.3))]
    assert together == codes(whole, requests(0.0, 1.3))
