"""Qwen3-Omni's reference behaves as the comparisons with it take for granted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from tests.checkpoints.write import make_demo_checkpoint
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference, Qwen3Result

Results = dict[str, Qwen3Result]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3") / "checkpoint"
    return make_demo_checkpoint(folder, family="qwen3_omni")


@pytest.fixture(scope="module")
def reference(checkpoint: Path, answer_folder: Path) -> Qwen3Reference:
    return Qwen3Reference(checkpoint, answer_folder)


@pytest.fixture(scope="module")
def results(reference: Qwen3Reference) -> Results:
    """Answers to all cases, by name."""
    return reference.answers_of(QWEN3_CASES)


def test_first_and_second_choice_are_apart(results: Results) -> None:
    assert {name: r.min_top2_gap for name, r in results.items() if r.min_top2_gap < 1e-5} == {}


def test_replies_are_not_degenerate(results: Results) -> None:
    long = [result for result in results.values() if len(result.frames) >= 30]
    assert len(long) >= 10
    for result in long:
        assert len(set(result.frames)) > 0.9 * len(result.frames)
        for book in range(16):
            assert len({frame[book] for frame in result.frames}) > len(result.frames) / 3
    texts = [result.text_ids for result in results.values() if len(result.text_ids) >= 20]
    assert np.mean([len(set(text)) / len(text) for text in texts]) > 0.5
    # prompts and voices are told apart
    assert len({result.text_ids for result in results.values()}) >= 12
    assert len({result.codes for result in results.values()}) >= 18


def test_the_waveform_is_audible_and_not_clipped(results: Results) -> None:
    for result in results.values():
        if len(result.frames) >= 10:
            assert 0.05 < float(np.sqrt(np.mean(result.waveform**2))) < 0.2
            assert np.abs(result.waveform).max() < 0.95


def test_the_decoder_runs_in_one_pass(reference: Qwen3Reference, results: Results) -> None:
    """By itself, transformers decodes 300 frames at a time and loses samples in between."""
    codes = torch.tensor(results["long_reply"].frames).T[None]
    code2wav = reference.model.code2wav
    with torch.inference_mode():
        pieces = type(code2wav).chunked_decode(code2wav, codes)
    assert pieces.shape[-1] == len(results["long_reply"].waveform) - 555


def test_transformers_itself_fails_where_it_is_repaired(checkpoint: Path, reference: Qwen3Reference) -> None:
    """If one of these passes, a newer transformers may not need the repair any more."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def answer(name: str, **changes: object) -> None:
        case = QWEN3_CASES[name]
        arguments: dict[str, object] = {
            "thinker_max_new_tokens": case.thinker_max_tokens,
            "thinker_eos_token_id": model.config.im_end_token_id,
            "thinker_do_sample": False,
            "talker_max_new_tokens": 4,
            "talker_do_sample": False,
        }
        model.generate(**reference.prompt(case.messages), **(arguments | changes))

    answer("hello", thinker_max_new_tokens=4)
    with pytest.raises(AttributeError, match="audio_config"):
        answer("mixed")
    with pytest.raises(RuntimeError):
        answer("one_token")
