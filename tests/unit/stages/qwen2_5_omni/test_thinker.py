"""Sound for the thinker: prepared in its own length, with the result that vLLM's processor has."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PretrainedConfig, WhisperFeatureExtractor
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor

from stages.qwen2_5_omni import FAMILY
from stages.qwen2_5_omni.demo_checkpoint import make_demo_checkpoint
from stages.qwen2_5_omni.thinker_config import thinker_config

RATE_HZ = 16_000
Processor = BaseMultiModalProcessor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    FAMILY.register()
    return make_demo_checkpoint(tmp_path_factory.mktemp("thinker") / "checkpoint")


def config_of(checkpoint: Path, overrides: Callable[[PretrainedConfig], PretrainedConfig]) -> ModelConfig:
    arguments = EngineArgs(str(checkpoint), hf_overrides=overrides, limit_mm_per_prompt={"audio": 4})
    return arguments.create_model_config()


@pytest.fixture(scope="module")
def ours(checkpoint: Path) -> Processor:
    return MULTIMODAL_REGISTRY.create_processor(config_of(checkpoint, thinker_config))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Processor:
    return MULTIMODAL_REGISTRY.create_processor(config_of(checkpoint, lambda config: config))


def sound(num_samples: int, seed: int = 0, *, loud_from: int = 0) -> npt.NDArray[np.float32]:
    samples = np.random.default_rng(seed).standard_normal(num_samples).astype(np.float32) * 1e-3
    samples[loud_from:] *= 300
    return samples


def features(processor: Processor, *sounds: npt.NDArray[np.float32]) -> tuple[list[int], list[torch.Tensor]]:
    """Token ids, and mel frames of each sound [128, num_frames]."""
    prompt = "<|audio_bos|><|AUDIO|><|audio_eos|>" * len(sounds)
    items = processor.info.parse_mm_data({"audio": [(samples, RATE_HZ) for samples in sounds]})
    result = processor(prompt, items)
    return result["prompt_token_ids"], [item["input_audio_features"].data for item in result["mm_kwargs"]["audio"]]


@pytest.mark.parametrize(
    "sounds",
    [
        pytest.param([sound(5 * RATE_HZ)], id="five seconds"),
        pytest.param([sound(641), sound(799), sound(800), sound(801)], id="hardly any"),
        pytest.param([sound(401), sound(7 * RATE_HZ + 33, seed=1)], id="two of different lengths"),
        pytest.param([sound(RATE_HZ, loud_from=RATE_HZ - 1)], id="loudest at its end"),
        pytest.param([sound(RATE_HZ + 80, loud_from=RATE_HZ + 20)], id="loudest between two frames at its end"),
        pytest.param([np.zeros(RATE_HZ, np.float32)], id="silence"),
        pytest.param([sound(30 * RATE_HZ)], id="as long as the processor pads to"),
        pytest.param([sound(31 * RATE_HZ)], id="longer than the processor pads to"),
    ],
)
def test_features_are_those_of_the_padded_sound(
    ours: Processor, plain: Processor, sounds: list[npt.NDArray[np.float32]]
) -> None:
    expected_ids, expected = features(plain, *sounds)
    ids, found = features(ours, *sounds)
    assert ids == expected_ids
    assert [tuple(mel.shape) for mel in found] == [tuple(mel.shape) for mel in expected]
    for mel, expected_mel in zip(found, expected, strict=True):
        torch.testing.assert_close(mel, expected_mel, rtol=0, atol=1e-6)


def test_a_sound_longer_than_the_processor_pads_to_may_come_with_others(ours: Processor, plain: Processor) -> None:
    """vLLM's processor refuses that: it pads the other one to less than the long one has."""
    long, short = sound(31 * RATE_HZ), sound(5 * RATE_HZ, seed=1)
    _, (mel_of_long, mel_of_short) = features(ours, long, short)
    _, (expected_long,) = features(plain, long)
    _, (expected_short,) = features(plain, short)
    torch.testing.assert_close(mel_of_short, expected_short, rtol=0, atol=1e-6)
    assert mel_of_long.shape == expected_long.shape
    # By itself, its end is mirrored where there is nothing; here silence follows. A frame reaches over 400 samples.
    torch.testing.assert_close(mel_of_long[:, :-2], expected_long[:, :-2], rtol=0, atol=1e-6)


def test_spectrogram_is_computed_of_the_sound_alone(ours: Processor) -> None:
    lengths = []
    compute = WhisperFeatureExtractor._torch_extract_fbank_features

    def watched(self: WhisperFeatureExtractor, waveform: npt.NDArray[np.float32], device: str) -> object:
        lengths.append(waveform.shape)
        return compute(self, waveform, device)

    with patch.object(WhisperFeatureExtractor, "_torch_extract_fbank_features", watched):
        features(ours, sound(2 * RATE_HZ), sound(RATE_HZ))
    assert lengths == [(2, 2 * RATE_HZ + 800)]


def test_config_of_another_model_stays_as_it_is() -> None:
    stand_in = PretrainedConfig(architectures=["Other"])
    assert thinker_config(stand_in).architectures == ["Other"]
