"""Qwen3-Omni's thinker hears what transformers' processor gives its own. What its talker is fed shows in the
codes: test_qwen3_parity.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoProcessor
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.processing import BaseMultiModalProcessor

from stages.qwen3_omni.hf_overrides import thinker_config
from stages.qwen3_omni.thinker import MAX_AUDIO_S, Qwen3OmniThinker

RATE_HZ = 16_000
AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"


def sound(num_samples: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return (0.1 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


@pytest.fixture(scope="module")
def ours(qwen3_checkpoint: Path) -> BaseMultiModalProcessor[Any]:
    ModelRegistry.register_model(Qwen3OmniThinker.__name__, Qwen3OmniThinker)
    arguments = EngineArgs(
        str(qwen3_checkpoint),
        hf_overrides=thinker_config,
        limit_mm_per_prompt={"audio": 4, "video": 2},
        dtype="float32",
    )
    return MULTIMODAL_REGISTRY.create_processor(arguments.create_model_config())


def features(
    processor: BaseMultiModalProcessor[Any], *sounds: npt.NDArray[np.float32]
) -> tuple[list[int], list[torch.Tensor]]:
    """Token ids, and mel frames of each sound [128, num_frames]."""
    items = processor.info.parse_mm_data({"audio": [(samples, RATE_HZ) for samples in sounds]})
    result = processor(AUDIO * len(sounds), items)
    return result["prompt_token_ids"], [
        item["input_audio_features"].data for item in result["mm_kwargs"]["audio"]
    ]


@pytest.mark.parametrize(
    "num_samples", [201, 401, 640, 799, 16_000, 16_001, 16_159, 33_333, 31 * RATE_HZ + 7]
)
def test_features_of_a_sound_are_those_of_the_checkpoints_processor(
    ours: BaseMultiModalProcessor[Any], qwen3_checkpoint: Path, num_samples: int
) -> None:
    """Whether or not it has whole frames, and beyond the 30 s of the extractor."""
    samples = sound(num_samples)
    expected = AutoProcessor.from_pretrained(qwen3_checkpoint)(
        text=AUDIO, audio=[samples], return_tensors="pt"
    )
    token_ids, (mel,) = features(ours, samples)
    assert token_ids == expected["input_ids"][0].tolist()
    mask = expected["feature_attention_mask"][0].bool()
    torch.testing.assert_close(mel, expected["input_features"][0][:, mask], rtol=0, atol=1e-6)


def test_features_do_not_depend_on_other_sounds(ours: BaseMultiModalProcessor[Any]) -> None:
    sounds = [sound(16_001), sound(33_333, 1), sound(799, 2)]
    together_ids, together = features(ours, *sounds)
    alone = [features(ours, samples) for samples in sounds]
    assert together_ids == [token for token_ids, _ in alone for token in token_ids]
    for mel, (_, (own,)) in zip(together, alone, strict=True):
        torch.testing.assert_close(mel, own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[100], [200], [16_000, 200]])
def test_a_sound_that_is_too_short_is_told(
    ours: BaseMultiModalProcessor[Any], lengths: Sequence[int]
) -> None:
    with pytest.raises(ValueError, match="too short to be represented"):
        features(ours, *map(sound, lengths))


@pytest.mark.parametrize("max_num_batched_tokens", [64, 8192])
def test_the_encoder_cache_holds_the_longest_audio(
    qwen3_checkpoint: Path, max_num_batched_tokens: int
) -> None:
    ModelRegistry.register_model(Qwen3OmniThinker.__name__, Qwen3OmniThinker)
    arguments = EngineArgs(
        str(qwen3_checkpoint),
        hf_overrides=thinker_config,
        dtype="float32",
        max_model_len=8192,
        max_num_batched_tokens=max_num_batched_tokens,
        limit_mm_per_prompt={"audio": 1, "image": 0, "video": 0},
    )
    budget = MultiModalBudget(arguments.create_engine_config(), MULTIMODAL_REGISTRY)
    num_tokens = MAX_AUDIO_S * 13
    assert budget.encoder_cache_size == max(num_tokens, max_num_batched_tokens)
    ((_, dummy),) = budget.get_dummy_encoder_profile_inputs(max_items_per_batch=1)
    assert dummy["input_audio_features"].data.shape[1] == MAX_AUDIO_S * 100
