"""The thinker as a vLLM model: vLLM's own, but audio is prepared as in the checkpoint's processor, and the
talker's projection of hidden states is loaded with it."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from transformers import BatchFeature, Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniAudioFeatureInputs,
)
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
    _get_feat_extract_output_lengths,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import HFMultiModalInputs
from vllm.sequence import IntermediateTensors

from stages.qwen3_omni.step_rotary import use_step_rotary
from stages.qwen_omni.audio_in_video import (
    Mask,
    VideoWithTrackDummyInputs,
    VideoWithTrackInfo,
    VideoWithTrackModel,
    VideoWithTrackProcessor,
)
from stages.qwen_omni.media_positions import MediaPositions, check_talker_positions

MAX_AUDIO_S = 300
"""Longest audio for which the encoder cache has room: `n_samples` in the published preprocessor_config.json.
transformers replaces that value by 30 s, but the processor cuts no audio (`truncation`)."""


class ThinkerProcessingInfo(VideoWithTrackInfo, Qwen3OmniMoeThinkerProcessingInfo):
    """Makes room for `MAX_AUDIO_S`. vLLM plans for 30 s."""

    def max_audio_samples(self) -> int:
        return MAX_AUDIO_S * int(self.get_feature_extractor().sampling_rate)

    def num_audio_tokens(self, num_frames: int) -> int:
        return int(_get_feat_extract_output_lengths(torch.tensor(num_frames)))


class AudioProcessor(Qwen3OmniMoeThinkerMultiModalProcessor[ThinkerProcessingInfo]):
    """Returns the features that `Qwen3OmniMoeProcessor` computes of each audio alone.

    vLLM's processor pads audio to whole frames, so that its features do not depend on other audio that it is
    batched with. That adds a frame, and may add a token. So we skip that class's own steps and treat each
    audio by itself instead.
    """

    def _get_hf_mm_inputs(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> HFMultiModalInputs:
        inputs: HFMultiModalInputs = super(Qwen3OmniMoeThinkerMultiModalProcessor, self)._get_hf_mm_inputs(
            mm_items, hf_kwargs
        )
        audios = inputs.hf_data.get("audio")
        half_window = self.info.get_feature_extractor().n_fft // 2
        if isinstance(audios, list) and any(len(audio) <= half_window for audio in audios):
            # The extractor mirrors half a window at either end.
            raise ValueError("the audio is too short to be represented inside the model")
        return inputs

    def _call_hf_processor(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        processed = super()._call_hf_processor(hf_data, hf_kwargs)
        audios = hf_data.get("audio")
        if not isinstance(audios, list) or len(audios) < 2:
            return processed
        extractor = self.info.get_feature_extractor()
        alone = [
            extractor(
                audio,
                sampling_rate=extractor.sampling_rate,
                padding=True,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            for audio in audios
        ]
        num_frames = torch.tensor([int(one["attention_mask"].sum()) for one in alone])
        mels = [one["input_features"][0, :, :count] for one, count in zip(alone, num_frames, strict=True)]
        del processed["input_features"], processed["feature_attention_mask"]
        processed["input_audio_features"] = torch.cat(mels, 1)  # [num_mel_bins, frames of all audios]
        processed["audio_feature_lengths"] = num_frames
        return processed

    def _postprocess_hf_mm_data(
        self,
        mm_data: Mapping[str, object],
        hf_processor_mm_kwargs: Mapping[str, object],
        processed_data: BatchFeature,
    ) -> BatchFeature:
        processed: BatchFeature = super(Qwen3OmniMoeThinkerMultiModalProcessor, self)._postprocess_hf_mm_data(
            mm_data, hf_processor_mm_kwargs, processed_data
        )
        if "audio_feature_lengths" in processed:
            lengths = processed["audio_feature_lengths"].tolist()
            processed["feature_attention_mask"] = [torch.ones(length) for length in lengths]
        return processed


class ThinkerProcessor(VideoWithTrackProcessor, AudioProcessor):
    def interleave(self, times: npt.NDArray[np.float64], num_audio_tokens: int) -> Mask:
        """In the order of their times, video first.

        Source: `Qwen3OmniMoeProcessor.replace_multimodal_special_tokens` in transformers 5.19.
        """
        is_audio = np.ones(len(times) + num_audio_tokens, np.bool_)
        is_audio[np.arange(len(times)) + np.searchsorted(np.arange(num_audio_tokens), times)] = False
        return is_audio


@MULTIMODAL_REGISTRY.register_processor(
    ThinkerProcessor, info=ThinkerProcessingInfo, dummy_inputs=VideoWithTrackDummyInputs
)
class Qwen3OmniThinker(MediaPositions, VideoWithTrackModel, Qwen3OmniMoeThinkerForConditionalGeneration):
    # The more special prefix comes first.
    hf_to_vllm_mapper = (
        WeightsMapper(orig_to_new_prefix={"talker.hidden_projection.": "talker_hidden_projection."})
        | Qwen3OmniMoeThinkerForConditionalGeneration.hf_to_vllm_mapper
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Qwen3OmniMoeConfig = vllm_config.model_config.hf_config
        self.accept_hidden_layer: int = config.talker_config.accept_hidden_layer
        """Index in `hidden_states` of the layer that the talker sees; 0 is the input."""
        self.talker_hidden_projection: Qwen3OmniMoeTalkerResizeMLP | None = None
        """None if the checkpoint has no talker."""
        if config.enable_audio_output:
            check_talker_positions(config, "position_id_per_seconds")
            projection = Qwen3OmniMoeTalkerResizeMLP(config.talker_config)
            self.talker_hidden_projection = projection.requires_grad_(requires_grad=False)
        self._rotary = use_step_rotary(
            self.language_model, vllm_config.scheduler_config.max_num_batched_tokens
        )

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Clears the visual features of the previous step first. vLLM clears them in `forward`, which does
        not run when the step is replayed as a CUDA graph; the next step would then add them to its own
        tokens."""
        self._clear_deepstack_input_embeds(self.deepstack_input_embeds_num_tokens)
        embeds: torch.Tensor = super().embed_input_ids(
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states `[num_tokens, hidden_size]`; `positions` is `[3, num_tokens]`, packed."""
        rows = self._rotary.begin_step(positions)
        hidden: torch.Tensor | IntermediateTensors = super().forward(
            input_ids, rows, intermediate_tensors, inputs_embeds, **kwargs
        )
        return hidden

    def _process_audio_input(self, audio_input: Qwen2_5OmniAudioFeatureInputs) -> tuple[torch.Tensor, ...]:
        """Encodes audio shorter than one convolution's input, which is 1 s, by itself.

        In a batch, it would be padded to the longest, and its last token would then contain what the
        convolutions make of padding.
        """
        lengths: list[int] = audio_input["audio_feature_lengths"].tolist()
        if len(lengths) == 1 or min(lengths) >= 2 * self.audio_tower.n_window:
            together: tuple[torch.Tensor, ...] = super()._process_audio_input(audio_input)
            return together
        frames = audio_input["input_features"].split(lengths, dim=1)
        masks = audio_input["feature_attention_mask"]
        alone: list[torch.Tensor] = []
        for index, length in enumerate(lengths):
            alone += super()._process_audio_input(
                Qwen2_5OmniAudioFeatureInputs(
                    type="audio_features",
                    input_features=frames[index],
                    audio_feature_lengths=torch.tensor([length]),
                    feature_attention_mask=masks[index : index + 1],
                )
            )
        return tuple(alone)
