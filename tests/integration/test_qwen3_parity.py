"""Answers of Qwen3-Omni equal the reference's: greedy, float32, on the same weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omni_server.types import AudioDelta, SamplingConfig
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni, spoken
from tests.integration.parity import (
    QWEN3_WAVEFORM_SNR_DB,
    VIDEOS,
    Expected,
    expected,
    qwen3_config,
    same_speech,
)
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference, Qwen3Result

NAMES = list(QWEN3_CASES)
SPOKEN = ("hello", "mixed", "media_in_turns", "one_frame", "two_tokens")
"""Speech of different lengths."""
TOGETHER = (
    "hello",
    "three_turns_chelsie",
    "speech_and_text",
    "images",
    "video",
    "media_in_turns",
    "heard_mixed",
    "rates_in_turns",
    "wide_heard",
    "one_token",
    "stop_early_image",
    "one_frame",
)
"""One of each kind: more than the engines run at a time."""

Answers = dict[str, Expected[Qwen3Result]]


@pytest.fixture(scope="module")
def answers(qwen3_reference: Qwen3Reference) -> Answers:
    """What the reference answers to every case."""
    qwen3_reference.answers_of(QWEN3_CASES)
    return {name: expected(qwen3_reference, case) for name, case in QWEN3_CASES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_text_frames_and_waveform_equal_the_reference(
    name: str, answers: Answers, qwen3_live: LiveOmni
) -> None:
    want = answers[name]
    answer = qwen3_live.answer(want.request)
    same_speech(answer, want)


def test_all_requests_together_give_the_same_answers_as_alone(answers: Answers, qwen3_live: LiveOmni) -> None:
    together = qwen3_live.answers([answers[name].request for name in TOGETHER])
    for answer, name in zip(together, TOGETHER, strict=True):
        same_speech(answer, answers[name])
    assert qwen3_live.omni.num_running == 0
    assert qwen3_live.held_rows() == 0


def test_other_sizes_and_prompts_in_pieces_give_the_references_answers(
    qwen3_wide_checkpoint: Path, answer_folder: Path
) -> None:
    """Thinker and talker compute a prompt in pieces; the queue has one slot for the rows of a piece."""
    reference = Qwen3Reference(qwen3_wide_checkpoint, answer_folder)
    cases = [QWEN3_CASES[name] for name in TOGETHER]
    shorter = [replace(case, talker_max_tokens=min(case.talker_max_tokens, 16)) for case in cases]
    wanted = [expected(reference, case) for case in shorter]
    pieces = {"thinker": {"max_num_batched_tokens": 128, **VIDEOS}, "talker": {"max_num_batched_tokens": 64}}
    wide = LiveOmni(qwen3_wide_checkpoint, qwen3_config(stages=pieces, queue={"capacity": 1}))
    try:
        for answer, want in zip(wide.answers([want.request for want in wanted]), wanted, strict=True):
            same_speech(answer, want)
    finally:
        wide.close()


@pytest.mark.parametrize("name", SPOKEN)
def test_audio_is_streamed_in_pieces_that_join(name: str, answers: Answers, qwen3_live: LiveOmni) -> None:
    want = answers[name]
    sound = [event for event in qwen3_live.events(want.request) if isinstance(event, AudioDelta)]
    ends = np.cumsum([len(delta.samples) for delta in sound])
    assert [delta.first_sample for delta in sound] == [0, *ends[:-1]]
    # The first window is one frame, less the samples by which the decoder is ahead.
    assert sound[0].first_sample == 0
    if len(want.result.frames) > 1:
        assert len(sound) > 1
    assert len(want.result.waveform) == 1920 * len(want.result.frames) - 555


def test_text_before_a_stop_string_is_spoken_as_the_reference_speaks_it(
    answers: Answers, qwen3_live: LiveOmni
) -> None:
    """The reference ends its text with a token, and does not speak that; the stop string here has two."""
    want = answers["stop_early"]
    *kept_ids, first_id = want.result.text_ids
    kept, stop = map(
        qwen3_live.omni.detokenize,
        (kept_ids, (first_id, answers["count"].result.text_ids[len(kept_ids) + 1])),
    )
    assert stop not in kept
    answer = qwen3_live.answer(
        spoken(
            want.case.messages,
            want.case.voice,
            thinker=SamplingConfig(temperature=0.0, max_tokens=want.case.thinker_max_tokens, stop=(stop,)),
            talker=want.request.sampling["talker"],
        )
    )
    assert answer.text == kept
    assert answer.codes == want.result.codes
    assert signal_to_noise_db(want.result.waveform, answer.audio) > QWEN3_WAVEFORM_SNR_DB


def test_one_pass_over_an_utterance_and_rows_in_messages_give_the_same_waveform(
    qwen3_checkpoint: Path, answers: Answers
) -> None:
    live = LiveOmni(qwen3_checkpoint, qwen3_config(chunks={"mode": "whole"}, queue={"transport": "inline"}))
    try:
        for name in SPOKEN:
            want = answers[name]
            answer = live.answer(want.request)
            same_speech(answer, want)
        assert live.held_rows() == 0
    finally:
        live.close()
