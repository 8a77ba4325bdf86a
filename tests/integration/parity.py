"""Compares an answer with the reference's, number by number."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omni_server.offline import OmniOutput
from omni_server.types import OmniRequest, SamplingConfig
from tests.integration.live import spoken
from tests.reference.cases import NOISE_SEED, SPEECH_SYSTEM_PROMPT, Case, answer, say, stop_ids
from tests.reference.reference import Reference, ReferenceResult


@dataclass(frozen=True)
class Expected:
    """A case on one checkpoint: the request that we send and what the reference answers."""

    case: Case
    request: OmniRequest
    result: ReferenceResult


def expected(reference: Reference, case: Case) -> Expected:
    messages = case.messages
    if not any(message.role == "system" for message in messages):
        messages = (say("system", SPEECH_SYSTEM_PROMPT), *messages)  # as the server does
    asked = replace(case, messages=messages)
    return Expected(case, request_for(case, stop_ids(reference, asked)), answer(reference, asked))


def request_for(case: Case, extra_stop: tuple[int, ...] | None) -> OmniRequest:
    return spoken(
        case.messages,
        case.voice,
        thinker=SamplingConfig(
            temperature=0.0,
            max_tokens=case.thinker_max_tokens,
            stop_token_ids=extra_stop,
            ignore_eos=case.ignore_eos or None,
        ),
        talker=SamplingConfig(temperature=0.0, repetition_penalty=1.05, max_tokens=case.talker_max_tokens),
        noise_seed=NOISE_SEED,
    )


def same_tokens(answer: OmniOutput, expected: Expected) -> None:
    assert answer.token_ids == expected.result.text_ids
    assert answer.codes == expected.result.codes


def signal_to_noise_db(signal: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Of `other` against `signal`, both `[num_samples]`."""
    assert signal.shape == other.shape
    if not len(signal):
        return float("inf")
    noise = float(np.mean((signal.astype(np.float64) - other) ** 2))
    return (
        float("inf") if noise == 0 else 10 * float(np.log10(np.mean(signal.astype(np.float64) ** 2) / noise))
    )
