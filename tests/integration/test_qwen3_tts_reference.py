"""Qwen3-TTS's reference behaves as the comparisons with it take for granted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from omni_server.verify.compare import signal_to_noise_db
from tests.checkpoints.qwen3_tts.tokens import CAMEL_CASE
from tests.integration.parity import QWEN3_WAVEFORM_SNR_DB
from tests.reference.qwen3_tts import Qwen3TTSReference, Spoken
from tests.reference.qwen3_tts_cases import CASES
from tests.reference.qwen3_tts_wrong import CODE_PATCHES, QUESTIONS, WAVE_PATCHES

SAMPLES_PER_FRAME = 1920
ALONE = ("short", "design_streamed", "x_vector", "continued_codes_longer_streamed")
"""Cases of each kind of prompt."""
TELLING = {
    "no_language": ("short", 4),
    "other_voice": ("short", 4),
    "no_dialect": ("dialect", 4),
    "shifted_codes": ("continued_text_longer", 4),
    "no_reference_text": ("continued_text_longer", 4),
    "codec_pad_with_instructions": ("instructed", 4),
    "speaker_first": ("no_language_streamed", 4),
    "first_text_behind_prompt": ("short_streamed", 4),
    "late_text": ("short_streamed", 4),
    "no_text_end": ("word_streamed", 4),
    "stop_feed": ("word_streamed", 4),
    "early_end": ("long", 2),
    "no_penalty": ("short", 6),
    "predictor_without_bias": ("short", 4),
    "unnormed_hidden": ("short", 4),
    "no_residuals": ("short", 4),
    "shifted_tables": ("short", 4),
    "short_context": ("long_streamed", 16),
    "primed_by_nothing": ("continued_text_longer", 4),
    "primed_by_another": ("continued_text_longer", 4),
}
"""For each mistake, a case that shows it and the number of frames to compare."""

Answers = dict[str, Spoken]


@pytest.fixture(scope="module")
def answers(qwen3_tts_reference: Qwen3TTSReference) -> Answers:
    """To all cases, by name."""
    return qwen3_tts_reference.answers_of(CASES.values())


def test_every_case_ends_or_reaches_its_limit(answers: Answers) -> None:
    for name, case in CASES.items():
        answer = answers[name]
        assert answer.has_ended or len(answer.codes) == case.max_frames
        assert answer.codes.shape == (len(answer.codes), 16)
        assert answer.frame_rows.shape == (len(answer.codes), answer.prompt_rows.shape[1])
        assert answer.waveform.shape == (SAMPLES_PER_FRAME * len(answer.codes),)


def test_speech_may_end_behind_the_two_frames_that_it_must_have(answers: Answers) -> None:
    assert (len(answers["ends_at_once"].codes), answers["ends_at_once"].has_ended) == (2, True)


def test_speech_has_many_lengths_whether_text_is_streamed_or_not(answers: Answers) -> None:
    for is_streamed in (False, True):
        ended = [
            len(answer.codes)
            for name, answer in answers.items()
            if CASES[name].streams_text == is_streamed and answer.has_ended
        ]
        assert len(set(ended)) >= 7
    assert sum(not answer.has_ended for answer in answers.values()) >= 8


def test_first_and_second_choice_are_apart(answers: Answers) -> None:
    assert {name: a.min_top2_gap for name, a in answers.items() if a.min_top2_gap < 1e-5} == {}


def test_speech_is_not_degenerate(answers: Answers) -> None:
    for answer in (answer for answer in answers.values() if len(answer.codes) >= 30):
        for book in answer.codes.T:
            assert len(set(book.tolist())) > len(book) / 3
    # texts, languages, voices and instructions are told apart
    long = {name: answer.codes for name, answer in answers.items() if CASES[name].max_frames >= 40}
    assert len({codes.tobytes() for codes in long.values()}) == len(long)


def test_the_waveform_is_audible_and_not_clipped(answers: Answers) -> None:
    for answer in (answer for answer in answers.values() if len(answer.codes) >= 10):
        assert 0.05 < float(np.sqrt(np.mean(answer.waveform**2))) < 0.2
        assert np.abs(answer.waveform).max() < 0.95


def test_text_is_tokenized_as_the_tokenizer_s_file_says(
    qwen3_tts_checkpoints: Path, answers: Answers
) -> None:
    tokenizer = Tokenizer.from_file(str(qwen3_tts_checkpoints / "tiny.custom_voice" / "tokenizer.json"))
    assert tokenizer.token_to_id(f"Ġ{CAMEL_CASE}") in answers["camel_case"].text_ids


def test_a_batch_gives_each_case_what_it_gets_alone(
    qwen3_tts_reference: Qwen3TTSReference, answers: Answers
) -> None:
    cases = [replace(CASES[name], max_frames=10) for name in ALONE]
    for name, alone in qwen3_tts_reference.answers_alone(cases).items():
        together = answers[name]
        np.testing.assert_array_equal(alone.codes, together.codes[:10])
        np.testing.assert_allclose(alone.prompt_rows, together.prompt_rows, atol=1e-6)
        right = together.waveform[: len(alone.waveform)]
        np.testing.assert_allclose(alone.waveform, right, rtol=0, atol=1e-9)


def test_every_mistake_changes_codes_or_waveform(
    qwen3_tts_reference: Qwen3TTSReference, answers: Answers
) -> None:
    assert set(TELLING) == {*QUESTIONS, *CODE_PATCHES, *WAVE_PATCHES}
    cases = {mistake: replace(CASES[name], max_frames=count) for mistake, (name, count) in TELLING.items()}
    for mistake, wrong in qwen3_tts_reference.mistaken(cases).items():
        name, count = TELLING[mistake]
        has_same_codes = np.array_equal(wrong.codes, answers[name].codes[:count])
        assert has_same_codes == (mistake in WAVE_PATCHES), mistake
        if has_same_codes:
            right = answers[name].waveform[: len(wrong.waveform)]
            assert signal_to_noise_db(right, wrong.waveform) < QWEN3_WAVEFORM_SNR_DB, mistake


def test_the_decoder_is_causal_and_decodes_more_than_300_frames_in_one_pass(
    qwen3_tts_reference: Qwen3TTSReference, answers: Answers
) -> None:
    """By itself, the reference decodes 300 frames at a time."""
    whole = answers["half_a_minute"]
    assert len(whole.codes) > 300
    first = qwen3_tts_reference.waveform_of("tiny.custom_voice", whole.codes[:30])
    np.testing.assert_allclose(whole.waveform[: len(first)], first, rtol=0, atol=1e-9)


def test_voices_in_recordings_are_told_apart(qwen3_tts_reference: Qwen3TTSReference) -> None:
    time = np.arange(36_000) / 24_000
    tones = [0.2 * np.sin(2 * np.pi * hertz * time).astype(np.float32) for hertz in (200, 1500)]
    heard = qwen3_tts_reference.voices_in("tiny.base", tones)
    assert [voice.codes.shape for voice in heard] == [(19, 16), (19, 16)]
    assert (heard[0].codes != heard[1].codes).mean() > 0.5
    assert np.corrcoef(heard[0].vector, heard[1].vector)[0, 1] < 0.9
    assert all(0.3 < float(voice.vector.std()) < 3.0 for voice in heard)
