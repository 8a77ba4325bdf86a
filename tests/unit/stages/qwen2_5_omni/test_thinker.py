"""Audio for the thinker: prepared in its own length, with the result that the checkpoint's processor has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoProcessor, PretrainedConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.processing import BaseMultiModalProcessor

from stages.qwen2_5_omni import FAMILY
from stages.qwen2_5_omni.hf_overrides import thinker_config
from tests.checkpoints.write import make_demo_checkpoint

RATE_HZ = 16_000
MAX_AUDIO_S = 40
"""Of the feature extractor here: longer than the 30 s that vLLM plans for, shorter than the 300 s of the
published checkpoints, whose spectrograms take longer."""
MAX_SAMPLES = MAX_AUDIO_S * RATE_HZ


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    FAMILY.register()
    folder = make_demo_checkpoint(tmp_path_factory.mktemp("thinker") / "checkpoint")
    preprocessor = folder / "preprocessor_config.json"
    preprocessor.write_text(json.dumps(json.loads(preprocessor.read_text()) | {"chunk_length": MAX_AUDIO_S}))
    return folder


def arguments_for(checkpoint: Path, **engine_args: Any) -> EngineArgs:
    given = {"limit_mm_per_prompt": {"audio": 4, "video": 2}, "dtype": "float32"} | engine_args
    return EngineArgs(str(checkpoint), hf_overrides=thinker_config, **given)


@pytest.fixture(scope="module")
def ours(checkpoint: Path) -> BaseMultiModalProcessor[Any]:
    return MULTIMODAL_REGISTRY.create_processor(arguments_for(checkpoint).create_model_config())


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """The checkpoint's `Qwen2_5OmniProcessor`."""
    return AutoProcessor.from_pretrained(checkpoint)


def sound(num_samples: int, seed: int = 0, *, loud_from: int = 0) -> npt.NDArray[np.float32]:
    samples = np.random.default_rng(seed).standard_normal(num_samples).astype(np.float32) * 1e-3
    samples[loud_from:] *= 300
    return samples


def prompt_for(sounds: Sequence[npt.NDArray[np.float32]]) -> str:
    return "<|audio_bos|><|AUDIO|><|audio_eos|>" * len(sounds)


def features(
    processor: BaseMultiModalProcessor[Any], *sounds: npt.NDArray[np.float32]
) -> tuple[list[int], list[torch.Tensor]]:
    """Token ids, and mel frames of each sound [128, num_frames]."""
    items = processor.info.parse_mm_data({"audio": [(samples, RATE_HZ) for samples in sounds]})
    result = processor(prompt_for(sounds), items)
    return result["prompt_token_ids"], [
        item["input_audio_features"].data for item in result["mm_kwargs"]["audio"]
    ]


def reference_features(
    processor: Any, *sounds: npt.NDArray[np.float32]
) -> tuple[list[int], list[torch.Tensor]]:
    result = processor(text=prompt_for(sounds), audio=list(sounds), return_tensors="pt")
    masks = result["feature_attention_mask"].bool()
    mels = [mel[:, mask] for mel, mask in zip(result["input_features"], masks, strict=True)]
    return result["input_ids"][0].tolist(), mels


@pytest.mark.parametrize(
    "sounds",
    [
        pytest.param([sound(5 * RATE_HZ)], id="five seconds"),
        pytest.param([sound(641), sound(799), sound(800), sound(801)], id="hardly any"),
        pytest.param([sound(401), sound(7 * RATE_HZ + 33, seed=1)], id="two of different lengths"),
        pytest.param([sound(RATE_HZ, loud_from=RATE_HZ - 1)], id="loudest at its end"),
        pytest.param(
            [sound(RATE_HZ + 80, loud_from=RATE_HZ + 20)], id="loudest between two frames at its end"
        ),
        pytest.param([np.zeros(RATE_HZ, np.float32)], id="silence"),
        pytest.param([sound(MAX_SAMPLES - 799)], id="nearly as long as the extractor takes"),
        pytest.param([sound(MAX_SAMPLES)], id="as long as the extractor takes"),
        pytest.param([sound(MAX_SAMPLES + RATE_HZ)], id="longer than the extractor takes"),
        pytest.param([sound(MAX_SAMPLES + RATE_HZ, loud_from=MAX_SAMPLES)], id="loud where it is cut off"),
        pytest.param([sound(MAX_SAMPLES), sound(5 * RATE_HZ, seed=1)], id="long and short"),
        pytest.param([sound(MAX_SAMPLES + RATE_HZ), sound(5 * RATE_HZ, seed=1)], id="too long and short"),
    ],
)
def test_features_are_those_of_the_checkpoints_processor(
    ours: BaseMultiModalProcessor[Any], reference: Any, sounds: list[npt.NDArray[np.float32]]
) -> None:
    expected_ids, expected = reference_features(reference, *sounds)
    ids, found = features(ours, *sounds)
    assert ids == expected_ids
    assert [tuple(mel.shape) for mel in found] == [tuple(mel.shape) for mel in expected]
    for mel, expected_mel in zip(found, expected, strict=True):
        torch.testing.assert_close(mel, expected_mel, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 4096])
def test_encoder_cache_holds_the_longest_audio(checkpoint: Path, max_num_batched_tokens: int) -> None:
    """Whatever a step holds: a prompt is prefilled in chunks, but a recording is encoded as a whole."""
    arguments = arguments_for(
        checkpoint,
        max_model_len=4096,
        max_num_batched_tokens=max_num_batched_tokens,
        limit_mm_per_prompt={"audio": 1, "image": 0, "video": 0},
    )
    budget = MultiModalBudget(arguments.create_engine_config(), MULTIMODAL_REGISTRY)
    num_tokens = MAX_AUDIO_S * 25
    assert min(budget.encoder_cache_size, budget.encoder_compute_budget) == max(
        num_tokens, max_num_batched_tokens
    )
    ((_, dummy),) = budget.get_dummy_encoder_profile_inputs(max_items_per_batch=1)
    assert dummy["input_audio_features"].data.shape[1] == 4 * num_tokens


def test_config_of_another_model_stays_as_it_is() -> None:
    stand_in = PretrainedConfig(architectures=["Other"])
    assert thinker_config(stand_in).architectures == ["Other"]
