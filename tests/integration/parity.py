"""Compares an answer with the reference's, number by number."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_server.offline import OmniOutput
from omni_server.types import OmniRequest, SamplingConfig
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from tests.integration.live import spoken
from tests.reference.cases import SPEECH_SYSTEM_PROMPT, Case, say, stop_ids
from tests.reference.reference import Reference, ReferenceResult

NOISE_SEED = 7


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
    extra_stop = stop_ids(reference, case)
    result = reference.run(
        messages,
        case.voice,
        case.thinker_max_tokens,
        case.talker_max_tokens,
        extra_stop,
        case.ignore_eos,
        _noise,
    )
    return Expected(case, request_for(case, extra_stop), result)


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


def _noise(num_frames: int) -> torch.Tensor:
    return torch.from_numpy(noise_frames(NOISE_SEED, 0, num_frames, 80))


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
