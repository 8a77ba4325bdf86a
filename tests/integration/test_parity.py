"""Answers equal the reference's: greedy, float32, on the same weights (model_facts: sections 2.1, 3.1,
6.2)."""

import numpy as np
import pytest

from omni_server.types import AudioPart
from omni_server.verify.cases import rising_tone
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni
from tests.integration.parity import Expected, expected, same_tokens
from tests.reference.cases import CASES, Case, ask, recording
from tests.reference.reference import Reference

WAVEFORM_SNR_DB = 60.0
"""36 evaluations of the DiT amplify float32 rounding; what is above this is rounding."""

NAMES = list(CASES)


@pytest.fixture(scope="session")
def answers(reference: Reference) -> dict[str, Expected]:
    """What the reference answers to every case."""
    return {name: expected(reference, case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_codes_and_waveform_equal_the_reference(
    name: str, answers: dict[str, Expected], whole: LiveOmni
) -> None:
    want = answers[name]
    answer = whole.answer(want.request)
    same_tokens(answer, want)
    assert signal_to_noise_db(want.result.waveform, answer.audio) > WAVEFORM_SNR_DB


def test_audio_is_cut_where_the_reference_cuts_it(reference: Reference, whole: LiveOmni) -> None:
    speech = recording("speech_hello.wav")
    rate = speech.sample_rate_hz
    audio = AudioPart(np.resize(speech.samples, 301 * rate), rate)
    audio.samples[300 * rate :] = rising_tone(1.0, 700).samples
    want = expected(reference, Case("long_audio", ask(audio)))
    answer = whole.answer(want.request)
    same_tokens(answer, want)
    assert answer.usage.prompt.total == len(want.result.prompt_ids)
    assert answer.usage.prompt.audio == 7500


def test_requests_together_give_the_same_tokens_as_alone(
    answers: dict[str, Expected], whole: LiveOmni
) -> None:
    wanted = [answers[name] for name in NAMES[:8]]
    together = whole.answers([want.request for want in wanted])
    for answer, want in zip(together, wanted, strict=True):
        same_tokens(answer, want)
        assert np.all(np.isfinite(answer.audio))


def test_nothing_is_held_when_all_requests_have_ended(answers: dict[str, Expected], whole: LiveOmni) -> None:
    whole.answers([answers[name].request for name in ("hello", "image")])
    assert whole.omni.num_running == 0
    assert whole.held_rows() == 0
