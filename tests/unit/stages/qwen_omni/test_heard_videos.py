"""Audio, and videos with and without audio tracks: prepared, encoded and positioned for vLLM as by the
checkpoints' own code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoProcessor,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeForConditionalGeneration,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems
from vllm.multimodal.processing import BaseMultiModalProcessor

from omni_server.family import AUDIO_TRACK, SAMPLED_FPS
from omni_server.types import AudioPart, ChatMessage, ContentPart, TextPart, VideoPart
from omni_server.verify.cases import rising_tone
from stages import qwen2_5_omni, qwen3_omni
from stages.chat_prompts import PromptRenderer
from stages.qwen2_5_omni.hf_overrides import thinker_config as qwen2_5_thinker_config
from stages.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from stages.qwen3_omni.hf_overrides import thinker_config as qwen3_thinker_config
from stages.qwen3_omni.thinker import Qwen3OmniThinker
from stages.qwen_omni.audio_in_video import FEATURES
from stages.qwen_omni.forced_reference import hears_videos, processed
from stages.runtime.fractional_positions import unpacked
from tests.checkpoints.write import make_demo_checkpoint
from tests.reference.synthetic_media import heard, sliding_tiles, tiles

WIDTH = 8
"""Of the embeddings that stand in for the encoders'."""


class _WithoutWeights:
    """A thinker whose encoders return 1 for each token of a video and -1 for each token of audio."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config

    def _process_video_input(self, video_input: Any) -> list[torch.Tensor]:
        merged = self.config.vision_config.spatial_merge_size**2
        return [torch.ones(int(grid.prod()) // merged, WIDTH) for grid in video_input["video_grid_thw"]]

    def _process_audio_input(self, audio_input: Any) -> list[torch.Tensor]:
        lengths = audio_input["audio_feature_lengths"].tolist()
        return [-torch.ones(self._compute_audio_token_count(length), WIDTH) for length in lengths]


class _Qwen2_5(_WithoutWeights, Qwen2_5OmniThinker):
    pass


class _Qwen3(_WithoutWeights, Qwen3OmniThinker):
    pass


@dataclass(frozen=True)
class Thinker:
    """A checkpoint, its own processor, and our processor and model."""

    folder: Path
    processor: Any
    ours: BaseMultiModalProcessor[Any]
    model: Any
    reference: Any
    """The model in transformers, without weights."""

    def processed(self, parts: Sequence[ContentPart]) -> Any:
        """What our processor makes of a message of `parts`."""
        prompt = PromptRenderer(self.folder, tools_system_prompt=None).render(
            [ChatMessage("user", tuple(parts))]
        )
        videos = [(video.frames, _metadata(video)) for video in prompt.videos]
        images = [Image.fromarray(pixels) for pixels in prompt.images]
        items = self.ours.info.parse_mm_data({"audio": list(prompt.audios), "image": images, "video": videos})
        return self.ours(prompt.text, items, hf_processor_mm_kwargs=dict(prompt.processor_kwargs))

    def encoded(self, item: Any) -> torch.Tensor:
        """Encodes a video in a step of its own."""
        (embedding,) = self.model.embed_multimodal(**MultiModalKwargsItems({"video": [item]}).get_data())
        return embedding


def _metadata(video: VideoPart) -> dict[str, object]:
    track = {} if video.audio is None else {AUDIO_TRACK: (video.audio.samples, video.audio.sample_rate_hz)}
    return {SAMPLED_FPS: video.fps} | track


@pytest.fixture(scope="module", params=["qwen2_5_omni", "qwen3_omni"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Thinker:
    """In bfloat16, as on a GPU."""
    family, overrides, model_class, reference_class = {
        "qwen2_5_omni": (
            qwen2_5_omni.FAMILY,
            qwen2_5_thinker_config,
            _Qwen2_5,
            Qwen2_5OmniForConditionalGeneration,
        ),
        "qwen3_omni": (qwen3_omni.FAMILY, qwen3_thinker_config, _Qwen3, Qwen3OmniMoeForConditionalGeneration),
    }[request.param]
    family.register()
    folder = make_demo_checkpoint(tmp_path_factory.mktemp(request.param) / "checkpoint", family=request.param)
    arguments = EngineArgs(
        str(folder),
        hf_overrides=overrides,
        limit_mm_per_prompt={"audio": 4, "image": 2, "video": 2},
        dtype="bfloat16",
    )
    ours = MULTIMODAL_REGISTRY.create_processor(arguments.create_model_config())
    config = ours.info.get_hf_config()
    with torch.device("meta"):
        reference = reference_class._from_config(reference_class.config_class.from_pretrained(folder))
    return Thinker(
        folder, AutoProcessor.from_pretrained(folder), ours, model_class(config), reference.thinker
    )


@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100])
def test_audio_of_other_rates_is_resampled_as_qwens_utilities_do(thinker: Thinker, rate: int) -> None:
    """They load it with librosa, whose default is soxr's HQ filter."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 2 * rate).astype(np.float32)
    frames = sliding_tiles(4, 56, 84)
    given, resampled = (
        thinker.processed((audio, heard(frames, audio)))["mm_kwargs"]
        for audio in (AudioPart(noise, rate), AudioPart(soxr.resample(noise, rate, 16_000), 16_000))
    )
    for modality, features in (("audio", "input_audio_features"), ("video", FEATURES)):
        expected = resampled[modality][0][features].data
        torch.testing.assert_close(given[modality][0][features].data, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("fps", [2.0, 1.9, 1.998, 0.4, 3.7])
def test_the_tokens_of_a_heard_video_are_in_the_order_of_the_checkpoints_processor(
    thinker: Thinker, fps: float
) -> None:
    """With other audio before and behind two videos, and a track of 5 s that ends before, with and after the
    frames."""
    first, second = sliding_tiles(10, 56, 84, fps), sliding_tiles(6, 56, 84, fps)
    parts = (
        rising_tone(0.4, 300),
        heard(first, rising_tone(5.03, 600)),
        rising_tone(1.2, 500),
        heard(second, rising_tone(2.2, 400)),
        TextPart("Which is louder?"),
    )
    expected = processed(thinker.processor, [ChatMessage("user", parts)])["input_ids"][0].tolist()
    assert thinker.processed(parts)["prompt_token_ids"] == expected


def test_videos_with_and_without_a_track_may_be_encoded_in_steps_of_their_own(thinker: Thinker) -> None:
    frames = sliding_tiles(4, 56, 84)
    result = thinker.processed((heard(frames, rising_tone(2.0, 300)), frames))
    with_track, without = result["mm_kwargs"]["video"]
    first, second = result["mm_placeholders"]["video"]
    ones = {thinker.model.config.video_token_id: 1, thinker.model.config.audio_token_id: -1}
    for item, place in ((with_track, first), (without, second)):
        ids = result["prompt_token_ids"][place.offset : place.offset + place.length]
        assert thinker.encoded(item)[:, 0].tolist() == [ones[id] for id in ids if id in ones]


@pytest.mark.parametrize("num_samples", [100, 200])
def test_a_track_too_short_for_a_token_is_told(thinker: Thinker, num_samples: int) -> None:
    track = AudioPart(rising_tone(1.0, 300).samples[:num_samples], 16_000)
    frames = sliding_tiles(4, 56, 84)
    with pytest.raises(ValueError, match="too short to be represented"):
        thinker.processed((heard(frames, track), heard(frames, rising_tone(2.0, 300))))


def reference_positions(thinker: Thinker, messages: Sequence[ChatMessage]) -> tuple[list[int], torch.Tensor]:
    """The prompt of the reference, and its positions `[3, n]`."""
    inputs = processed(thinker.processor, messages)
    lengths = inputs["feature_attention_mask"].sum(-1) if "feature_attention_mask" in inputs else None
    positions, _ = thinker.reference.get_rope_index(
        inputs["input_ids"],
        image_grid_thw=inputs.get("image_grid_thw"),
        video_grid_thw=inputs["video_grid_thw"],
        attention_mask=inputs["attention_mask"],
        use_audio_in_video=hears_videos(messages),
        audio_seqlens=lengths,
        second_per_grids=inputs["video_second_per_grid"],
    )
    return inputs["input_ids"][0].tolist(), positions[:, 0]


def our_positions(thinker: Thinker, parts: Sequence[ContentPart]) -> tuple[list[int], torch.Tensor]:
    """And that of the first generated token."""
    result = thinker.processed(parts)
    features = [
        MultiModalFeatureSpec(item, modality, f"{modality} {place.offset}", place)
        for modality, places in result["mm_placeholders"].items()
        for item, place in zip(result["mm_kwargs"][modality], places, strict=True)
    ]
    positions, delta = thinker.model.get_mrope_input_positions(result["prompt_token_ids"], features)
    generated = torch.tensor(len(result["prompt_token_ids"]) + delta).expand(3, 1)
    return result["prompt_token_ids"], unpacked(torch.cat((positions, generated), 1))


def check_positions(thinker: Thinker, parts: Sequence[ContentPart]) -> None:
    ids, positions = our_positions(thinker, parts)
    expected_ids, expected = reference_positions(thinker, [ChatMessage("user", tuple(parts))])
    assert ids == expected_ids
    # `_update_model_kwargs_for_generation` continues from the last position.
    assert positions.tolist() == torch.cat((expected, expected[:, -1:] + 1), 1).tolist()


@pytest.mark.parametrize(
    ("num_frames", "width", "seconds"),
    [(10, 84, 2.0), (4, 84, 3.0), (4, 84, 0.5), (2, 2240, 1.0)],
    ids=["frames last", "audio last", "frames end in the last second", "more columns than audio"],
)
def test_positions_are_those_of_the_reference(
    thinker: Thinker, num_frames: int, width: int, seconds: float
) -> None:
    """Also if a video's largest position is not in its last piece, from which the reference continues."""
    video = heard(sliding_tiles(num_frames, 56, width), rising_tone(seconds, 300))
    check_positions(
        thinker, (TextPart("Look: "), video, TextPart("and "), video, TextPart("Which is louder?"))
    )


FPS = [0.7, 1.2, 1.5, 1.8, 76 / 77 * 2, 2.0, 3.0, 5.0]
"""Rates at which videos are sampled; 1.97 is that of 76 frames at 25 per second."""


@pytest.mark.parametrize("fps", FPS)
def test_positions_of_a_video_are_those_of_the_reference_at_every_rate(thinker: Thinker, fps: float) -> None:
    """So are those of what follows it, which Qwen3-Omni leaves between whole numbers."""
    frames = sliding_tiles(14, 56, 84, fps)
    check_positions(
        thinker,
        (
            rising_tone(0.4, 300),
            TextPart("Look: "),
            frames,
            TextPart("and "),
            tiles(56, 84),
            frames,
            rising_tone(1.2, 500),
            TextPart("?"),
        ),
    )


@pytest.mark.parametrize("fps", FPS)
def test_positions_of_a_heard_video_are_those_of_the_reference_at_every_rate(
    thinker: Thinker, fps: float
) -> None:
    video = heard(sliding_tiles(14, 56, 84, fps), rising_tone(4.0, 300))
    check_positions(thinker, (tiles(84, 56), video, rising_tone(0.4, 300), TextPart("and "), video))


def test_each_video_of_a_chat_has_its_own_rate(thinker: Thinker) -> None:
    parts = (sliding_tiles(6, 56, 84, 1.8), TextPart("and "), sliding_tiles(8, 56, 84, 2.5), TextPart("?"))
    check_positions(thinker, parts)


def test_equal_frames_at_another_rate_are_another_video(thinker: Thinker) -> None:
    """The prefix cache compares these hashes."""
    frames = sliding_tiles(4, 56, 84).frames
    hashes = {
        thinker.processed((VideoPart(frames, fps), TextPart("?")))["mm_hashes"]["video"][0]
        for fps in (1.8, 2.0)
    }
    assert len(hashes) == 2
