"""The thinker as a vLLM model: vLLM's own, but audio is prepared as in the checkpoint's processor, without
minutes of trailing silence, and attention and rotary embedding are one operator."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.model_executor.models.qwen2_audio import _get_feat_extract_output_lengths
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import HFMultiModalInputs

from stages.qwen2_5_omni.rope_attention import use_rope_attention
from stages.qwen_omni.audio_in_video import (
    Mask,
    VideoWithTrackDummyInputs,
    VideoWithTrackInfo,
    VideoWithTrackModel,
    VideoWithTrackProcessor,
    has_track,
)
from stages.qwen_omni.media_positions import MediaPositions, check_talker_positions


class ThinkerProcessingInfo(VideoWithTrackInfo, Qwen2_5OmniThinkerProcessingInfo):
    """Makes room for the longest audio that the checkpoint's feature extractor accepts.

    vLLM plans for 30 s. Its encoder cache then holds a longer recording only if `max_num_batched_tokens` or
    the largest image happens to need as many tokens.
    """

    def max_audio_samples(self) -> int:
        return int(self.get_feature_extractor().n_samples)

    def num_audio_tokens(self, num_frames: int) -> int:
        _, num_tokens = _get_feat_extract_output_lengths(torch.tensor(num_frames))
        return int(num_tokens)


class AudioProcessor(Qwen2_5OmniThinkerMultiModalProcessor[ThinkerProcessingInfo]):
    """Returns the same features as `Qwen2_5OmniProcessor`.

    Audio longer than the feature extractor's `n_samples` (300 s in the published checkpoints) is cut to that
    length. vLLM's processor leaves it whole.

    Shorter audio is not padded to `n_samples` with silence, whose spectrogram takes a quarter of a second of
    a CPU core. The features are the same; where measured, to the last bit. Their mask excludes every frame
    whose centre lies after the audio. A frame is `n_fft` samples wide, so with twice as many trailing zeros
    every frame that contains audio is present, including the loudest, which sets the clipping of the
    logarithm, and no audio is mirrored at the end
    (`WhisperFeatureExtractor._torch_extract_fbank_features`).
    """

    def _get_hf_mm_inputs(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> HFMultiModalInputs:
        inputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)
        audios = inputs.hf_data.get("audio")
        if not isinstance(audios, list) or not audios:
            return inputs
        extractor = self.info.get_feature_extractor()
        audios = [audio[: extractor.n_samples] for audio in audios]
        inputs = inputs._replace(hf_data={**inputs.hf_data, "audio": audios})
        num_samples = max(map(len, audios)) + 2 * extractor.n_fft
        if num_samples >= extractor.n_samples:  # with less silence, audio would be mirrored
            return inputs
        return inputs._replace(hf_kwargs={**inputs.hf_kwargs, "audio_kwargs": {"max_length": num_samples}})


class ThinkerProcessor(VideoWithTrackProcessor, AudioProcessor):
    def interleave(self, times: npt.NDArray[np.float64], num_audio_tokens: int) -> Mask:
        """In pieces of `seconds_per_chunk`: first the video of a piece, then its audio.

        Source: `Qwen2_5OmniProcessor.replace_multimodal_special_tokens` in transformers 5.19.
        """
        config = self.info.get_hf_config()
        length = int(config.position_id_per_seconds * config.seconds_per_chunk)
        pieces = np.concatenate([_pieces(times, length), _pieces(np.arange(num_audio_tokens), length)])
        return np.argsort(pieces, kind="stable") >= len(times)


def _pieces(times: npt.NDArray[Any], length: int) -> npt.NDArray[np.int64]:
    """The number of each time's piece. A token further away than a piece from the one before is in the next
    piece all the same, as in `get_chunked_index`."""
    numbers = np.zeros(len(times), np.int64)
    for index, time in enumerate(times):
        before = int(numbers[index - 1]) if index else 0
        numbers[index] = before + (time >= (before + 1) * length)
    return numbers


@MULTIMODAL_REGISTRY.register_processor(
    ThinkerProcessor, info=ThinkerProcessingInfo, dummy_inputs=VideoWithTrackDummyInputs
)
class Qwen2_5OmniThinker(MediaPositions, VideoWithTrackModel, Qwen2_5OmniThinkerForConditionalGeneration):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        if config.enable_audio_output:
            check_talker_positions(config, "position_id_per_seconds", "seconds_per_chunk")
        if isinstance(self.language_model, Qwen2ForCausalLM):  # otherwise an encoder-only engine
            use_rope_attention(self.language_model.model.layers, vllm_config)

    def frame_times(self, num_grids: int, seconds_per_grid: torch.Tensor) -> torch.Tensor:
        """Whole numbers."""
        return super().frame_times(num_grids, seconds_per_grid).trunc()

    def place(self, feature: MultiModalFeatureSpec, positions: torch.Tensor) -> None:
        """The token which begins a heard video and the one which begins its audio have one position, and so
        have those that end them."""
        is_heard = feature.data is not None and has_track(feature.data)
        first = feature.mm_position.offset
        if is_heard:
            positions[:, first:] -= 1
        super().place(feature, positions)
        if is_heard:
            positions[:, first + feature.mm_position.length :] -= 1
