"""The reference behaves as the comparisons with it take for granted."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference.cases import CASES, NOISE_SEED
from tests.reference.reference import Reference, ReferenceResult, until_stop

Results = dict[str, ReferenceResult]

TEXT_ONLY = ("hello", "count")


def transformers_itself(
    reference: Reference, checkpoint: Path, inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """The texts [n, P + 24] and codes of prompts without images, by the model without repairs."""
    model: Any = reference.model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generate, codes = model.talker.generate, list[tuple[int, ...]]()

    def traced(**kwargs: Any) -> torch.Tensor:
        sequences: torch.Tensor = generate(**kwargs)
        for row in sequences[:, kwargs["input_ids"].shape[1] :].tolist():
            codes.append(until_stop(row, reference.codec_stop_ids)[0])
        return sequences

    model.talker.generate = traced
    texts, _ = model.generate(
        **inputs,
        thinker_max_new_tokens=24,
        thinker_do_sample=False,
        talker_max_new_tokens=60,
        talker_do_sample=False,
        talker_eos_token_id=list(reference.codec_stop_ids),
    )
    return texts, codes


SHORT = [replace(CASES[name], thinker_max_tokens=24, talker_max_tokens=60) for name in TEXT_ONLY]


def test_the_restored_mask_gives_the_codes_of_a_padded_batch(reference: Reference, checkpoint: Path) -> None:
    prompts = [reference.prompt(case.messages)["input_ids"][0].tolist() for case in SHORT]
    assert len(prompts[0]) != len(prompts[1])
    inputs = reference.processor.tokenizer.pad(
        {"input_ids": prompts}, padding_side="left", return_tensors="pt"
    )
    # Both rows run with the mask of the padded one; in a batch a row goes on until the longest ends.
    together = transformers_itself(reference, checkpoint, inputs)[1]
    assert together == [reference.run(case).codes for case in SHORT]


def test_without_the_repair_the_reference_says_something_else(reference: Reference, checkpoint: Path) -> None:
    repaired, inputs = reference.run(SHORT[1]), reference.prompt(SHORT[1].messages)
    texts, codes = transformers_itself(reference, checkpoint, inputs)
    assert tuple(texts[0, len(repaired.prompt_ids) :].tolist()) == repaired.text_ids
    assert codes != [repaired.codes]


def test_first_and_second_choice_are_apart(results: Results) -> None:
    close = {
        name: (result.min_top2_gap_thinker, result.min_top2_gap_talker)
        for name, result in results.items()
        if min(result.min_top2_gap_thinker, result.min_top2_gap_talker) < 1e-4
    }
    assert close == {}


def test_replies_are_not_degenerate(results: Results) -> None:
    long = [result for result in results.values() if len(result.codes) >= 40]
    assert len(long) >= 10
    for result in long:
        assert len(set(result.codes)) > len(result.codes) / 3
    texts = [result.text_ids for result in results.values() if len(result.text_ids) >= 20]
    assert len(texts) >= 3
    for text in texts:
        assert len(set(text)) > len(text) / 2
    # prompts are told apart
    assert len({result.text_ids for result in results.values()}) >= 12
    assert len({result.codes for result in results.values()}) >= 18


def test_the_waveform_is_audible_and_not_clipped(results: Results) -> None:
    for result in results.values():
        if len(result.codes) >= 10:
            assert 0.05 < float(np.sqrt(np.mean(result.waveform**2))) < 0.2
            assert np.abs(result.waveform).max() < 0.95


def test_the_noise_decides_the_waveform_and_nothing_else(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (reference.run(CASES["three_tokens"]) for _ in range(2))
    monkeypatch.setattr(reference, "noise_seed", NOISE_SEED + 1)
    other = reference.run(CASES["three_tokens"])
    assert np.array_equal(first.waveform, again.waveform)
    assert first.codes == other.codes
    assert not np.allclose(first.mel, other.mel, atol=0.1)
