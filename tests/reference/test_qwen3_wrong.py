"""Qwen3-Omni's demo checkpoint sees the mistakes that a comparison on it is meant to find."""

from dataclasses import replace
from itertools import zip_longest
from typing import get_args

import pytest
import torch

from omni_server.verify.compare import signal_to_noise_db
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.parity import QWEN3_WAVEFORM_SNR_DB
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference, Qwen3Result
from tests.reference.qwen3_wrong import (
    FEED_MISTAKES,
    FeedMistake,
    StepMistake,
    WaveMistake,
    feed,
    sound,
    speak,
)

NUM_FRAMES = {"hello": 64} | dict.fromkeys(
    (
        "system_prompt",
        "three_turns_chelsie",
        "speech_aiden",
        "image",
        "media_in_turns",
        "heard_video",
        "three_tokens",
    ),
    16,
)
CASES = {name: replace(QWEN3_CASES[name], talker_max_tokens=count) for name, count in NUM_FRAMES.items()}

CODES: dict[FeedMistake | StepMistake, tuple[str, ...]] = {
    "late_text": ("hello", "image", "three_tokens"),
    "no_text_end": ("three_tokens",),
    "linear_positions": ("image", "media_in_turns"),
    "track_behind_video": ("heard_video",),
    "next_hidden_layer": ("speech_aiden", "image", "media_in_turns"),
    "text_projection_of_media": ("speech_aiden", "image", "media_in_turns"),
    "system_turn": ("system_prompt", "three_turns_chelsie"),
    "other_voice": ("hello", "three_turns_chelsie", "speech_aiden"),
    "no_codec_pad_bos": ("hello", "speech_aiden", "image"),
    "no_penalty": ("hello",),
    "stop_feed": ("three_tokens",),
    "no_residuals": ("hello", "image"),
    "lost_history": ("hello", "image"),
    "kept_cache": ("hello", "image"),
    "shifted_tables": ("hello", "image"),
}
"""Cases whose codes each mistake changes; elsewhere some change nothing, as they should."""
WAVEFORM: dict[WaveMistake, tuple[str, ...]] = {"short_context": ("hello",), "no_lead": ("hello", "image")}
"""Cases whose waveform each mistake changes."""

Results = dict[str, Qwen3Result]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Reference:
    folder = tmp_path_factory.mktemp("qwen3") / "checkpoint"
    return Qwen3Reference(make_demo_checkpoint(folder, family="qwen3_omni"))


@pytest.fixture(scope="module")
def results(reference: Qwen3Reference) -> Results:
    return {name: reference.run(case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_says_what_the_reference_says(
    reference: Qwen3Reference, results: Results, name: str
) -> None:
    case, result = CASES[name], results[name]
    right = feed(reference, case, result)
    torch.testing.assert_close(right.prompt, result.talker_prompt, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(right.reply[:-1], result.reply_rows, rtol=1e-4, atol=1e-4)
    frames = tuple(speak(reference, right, min(case.talker_max_tokens, 16)))
    assert frames == result.frames[:16]


@pytest.mark.parametrize(("mistake", "name"), [(m, name) for m, names in CODES.items() for name in names])
def test_the_mistake_changes_the_codes(
    reference: Qwen3Reference, results: Results, mistake: FeedMistake | StepMistake, name: str
) -> None:
    case, result = CASES[name], results[name]
    if mistake in FEED_MISTAKES:
        frames = speak(reference, feed(reference, case, result, mistake), case.talker_max_tokens)
    else:
        frames = speak(reference, feed(reference, case, result), case.talker_max_tokens, mistake)
    assert any(frame != right for frame, right in zip_longest(frames, result.frames))


@pytest.mark.parametrize(("mistake", "name"), [(m, name) for m, names in WAVEFORM.items() for name in names])
def test_the_mistake_changes_the_waveform(
    reference: Qwen3Reference, results: Results, mistake: WaveMistake, name: str
) -> None:
    result = results[name]
    wrong = sound(reference, result.frames, mistake)
    assert wrong.shape == result.waveform.shape
    assert signal_to_noise_db(result.waveform, wrong) < QWEN3_WAVEFORM_SNR_DB


def test_every_mistake_is_tried() -> None:
    assert set(CODES) == {*get_args(FeedMistake), *get_args(StepMistake)}
    assert set(WAVEFORM) == set(get_args(WaveMistake))
