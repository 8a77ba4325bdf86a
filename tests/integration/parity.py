"""Compares an answer with the reference's, number by number."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from omni_server.config.load import load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.offline import OmniOutput
from omni_server.types import OmniRequest, SamplingConfig
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import changed_config, spoken
from tests.reference.case_reference import CaseReference, ResultT
from tests.reference.cases import NOISE_SEED, Case

QWEN3_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_omni.demo-cpu.yaml"

VIDEOS = {"engine_args": {"limit_mm_per_prompt": {"audio": 4, "image": 4, "video": 2}}}
"""What the cases need of Qwen3-Omni's thinker beyond the demo config."""

QWEN3_WAVEFORM_SNR_DB = 90.0
"""The decoder has no solver that would amplify float32 rounding."""
STEP_OF_16_BITS = 1 / 32768
"""Sound of the same codes differs by no more, however it is cut into windows and batched."""


@dataclass(frozen=True)
class Expected(Generic[ResultT]):
    """A case on one checkpoint: the request that we send and what the reference answers."""

    case: Case
    request: OmniRequest
    result: ResultT


def qwen3_config(**changes: Any) -> StageConfig:
    """The shipped demo config with changes, as `tests.integration.live.demo_config` takes them."""
    return changed_config(load_stage_config(QWEN3_CONFIG), **changes)


def expected(reference: CaseReference[ResultT], case: Case) -> Expected[ResultT]:
    asked = replace(case, messages=reference.spoken_messages(case.messages))
    return Expected(case, request_for(case, reference.stop_ids(asked)), reference.answer_of(asked))


def request_for(case: Case, extra_stop: tuple[int, ...] = ()) -> OmniRequest:
    return spoken(
        case.messages,
        case.voice,
        thinker=SamplingConfig(
            temperature=0.0,
            max_tokens=case.thinker_max_tokens,
            stop_token_ids=extra_stop or None,
            ignore_eos=case.ignore_eos or None,
        ),
        talker=SamplingConfig(temperature=0.0, repetition_penalty=1.05, max_tokens=case.talker_max_tokens),
        noise_seed=NOISE_SEED,
    )


def same_tokens(answer: OmniOutput, expected: Expected) -> None:
    """The text and all codes of every frame."""
    assert answer.token_ids == expected.result.text_ids
    assert answer.codes == expected.result.codes


def same_speech(answer: OmniOutput, expected: Expected) -> None:
    """As `same_tokens`, and Qwen3-Omni's waveform."""
    same_tokens(answer, expected)
    assert signal_to_noise_db(expected.result.waveform, answer.audio) > QWEN3_WAVEFORM_SNR_DB
