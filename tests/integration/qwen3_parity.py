"""Compares an answer of Qwen3-Omni with the reference's, number by number."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_server.config.load import load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.offline import OmniOutput
from omni_server.types import OmniRequest, SamplingConfig
from tests.integration.live import changed_config, spoken
from tests.integration.parity import signal_to_noise_db
from tests.reference.cases import Case
from tests.reference.qwen3_cases import answer, stop_ids
from tests.reference.qwen3_reference import Qwen3Reference, Qwen3Result

QWEN3_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_omni.demo-cpu.yaml"

VIDEOS = {"engine_args": {"limit_mm_per_prompt": {"audio": 4, "image": 4, "video": 2}}}
"""What the cases need of the thinker beyond the demo config."""

WAVEFORM_SNR_DB = 90.0
"""The decoder has no solver that would amplify float32 rounding."""


@dataclass(frozen=True)
class Qwen3Expected:
    """A case on one checkpoint: the request that we send and what the reference answers."""

    case: Case
    request: OmniRequest
    result: Qwen3Result


def qwen3_config(**changes: Any) -> StageConfig:
    """The shipped demo config with changes, as `tests.integration.live.demo_config` takes them."""
    return changed_config(load_stage_config(QWEN3_CONFIG), **changes)


def qwen3_expected(reference: Qwen3Reference, case: Case) -> Qwen3Expected:
    return Qwen3Expected(case, request_for(case, stop_ids(reference, case)), answer(reference, case))


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
    )


def same_answer(answer: OmniOutput, expected: Qwen3Expected) -> None:
    """Text, all 16 codes of every frame, and the number of samples."""
    assert answer.token_ids == expected.result.text_ids
    assert answer.codes == expected.result.codes
    assert answer.audio.shape == expected.result.waveform.shape


def same_speech(answer: OmniOutput, expected: Qwen3Expected) -> None:
    """As `same_answer`, and the waveform."""
    same_answer(answer, expected)
    assert signal_to_noise_db(expected.result.waveform, answer.audio) > WAVEFORM_SNR_DB
