"""Videos whose audio track is heard: its tokens and those of the frames are interleaved in time.

For vLLM, such a video is one item: it has one range of the prompt, and one output of the encoders, which is
already in the prompt's order. vLLM's own `use_audio_in_video` makes two items of it that share a range. In
vLLM 0.32, a request can then have no other audio, and the engine may go wrong: the prefix cache tells most
blocks of such a range apart by one of the two items only; in a piece of a prompt whose audio tokens all
precede its video tokens, the embeddings are in the wrong order; and two requests wait for each other forever
if the encoder cache holds the frames of both but the audio of neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerDummyInputsBuilder
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing.processor import HFMultiModalInputs, PromptUpdate, PromptUpdateDetails

from omni_server.family import AUDIO_TRACK, SAMPLED_FPS

Mask = npt.NDArray[np.bool_]

SECONDS_PER_GRID = "exact_seconds_per_grid"
"""What each video has in addition to vLLM's fields: the duration of two frames, float64. vLLM rounds
`second_per_grid_ts`, computed from one rate for all videos, to the model's dtype."""

FEATURES, NUM_FRAMES, IS_AUDIO = "track_features", "track_num_frames", "track_is_audio"
"""What each video of a request with tracks has, too: the track's mel frames `[num_mel_bins, n]`, n,
which is 0 without a track, and which of the item's tokens are audio `[num_tokens]` (bool)."""

VllmClass: Any = object
"""For mypy. At run time, each of the following classes precedes one of vLLM's among the bases of a class."""


class VideoWithTrackInfo(VllmClass):
    """Makes the parser keep what comes with the frames of a video, and resample all audio as librosa does,
    with which Qwen's utilities load it. Makes room for audio of `max_audio_samples`; vLLM plans for 30 s."""

    def max_audio_samples(self) -> int:
        raise NotImplementedError

    def num_audio_tokens(self, num_frames: int) -> int:
        """Of an audio with so many mel frames."""
        raise NotImplementedError

    def get_data_parser(self) -> MultiModalDataParser:
        parser: MultiModalDataParser = super().get_data_parser()
        parser.video_needs_metadata = True
        parser.audio_resampler.method = "soxr"
        return parser

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        max_tokens = dict(super().get_mm_max_tokens_per_item(seq_len, mm_counts))
        if "audio" in max_tokens:
            hop_length = self.get_feature_extractor().hop_length
            max_tokens["audio"] = self.num_audio_tokens(self.max_audio_samples() // hop_length)
        return max_tokens


class VideoWithTrackDummyInputs(Qwen2_5OmniThinkerDummyInputsBuilder):
    """For vLLM's profiling of the encoders' memory: gives dummy videos the metadata that the parser now
    requires, and makes audio as long as there is room for."""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        data = dict(super().get_dummy_mm_data(seq_len, mm_counts, mm_options))
        audio = self._get_dummy_audios(
            length=self.info.max_audio_samples(),
            num_audios=mm_counts.get("audio", 0),
            overrides=mm_options.get("audio"),
        )
        return data | {"audio": audio, "video": [(frames, {SAMPLED_FPS: 2.0}) for frames in data["video"]]}


class VideoWithTrackProcessor(VllmClass):
    """Prepares an audio track as it prepares an audio, and puts its tokens among those of the frames."""

    def interleave(self, times: npt.NDArray[np.float64], num_audio_tokens: int) -> Mask:
        """Which tokens are audio, in the prompt's order. `times` are those of the video tokens
        `[num_video_tokens]`, ascending, on the time axis of the positions: audio token n is at n."""
        raise NotImplementedError

    def _get_hf_mm_inputs(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> HFMultiModalInputs:
        inputs: HFMultiModalInputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)
        videos = inputs.hf_data.get("videos")
        if not isinstance(videos, list) or not videos:
            return inputs
        rates = torch.tensor([metadata[SAMPLED_FPS] for _, metadata in videos], dtype=torch.float64)
        temporal_patch_size = self.info.get_hf_processor().video_processor.temporal_patch_size
        inputs = inputs._replace(
            hf_data={**inputs.hf_data, "videos": [frames for frames, _ in videos]},
            passthrough_data={**inputs.passthrough_data, SECONDS_PER_GRID: temporal_patch_size / rates},
        )
        tracks = [metadata.get(AUDIO_TRACK) for _, metadata in videos]
        if all(track is None for track in tracks):
            return inputs
        given = [track for track in tracks if track is not None]
        heard = self._apply_hf_processor_main(self.info.parse_mm_data({"audio": given}, validate=False), {})
        lengths = heard["audio_feature_lengths"]
        if not all(map(self.info.num_audio_tokens, lengths.tolist())):
            raise ValueError("the audio is too short to be represented inside the model")  # as vLLM says
        num_frames = torch.zeros(len(videos), dtype=torch.long)
        num_frames[[track is not None for track in tracks]] = lengths
        fields = {FEATURES: heard["input_audio_features"], NUM_FRAMES: num_frames}
        return inputs._replace(passthrough_data={**inputs.passthrough_data, **fields})

    def _postprocess_hf_mm_data(
        self,
        mm_data: Mapping[str, object],
        hf_processor_mm_kwargs: Mapping[str, Any],
        processed_data: BatchFeature,
    ) -> BatchFeature:
        processed: BatchFeature = super()._postprocess_hf_mm_data(
            mm_data, hf_processor_mm_kwargs, processed_data
        )
        if NUM_FRAMES in processed:
            fields = [processed[name].tolist() for name in ("video_grid_thw", SECONDS_PER_GRID, NUM_FRAMES)]
            processed[IS_AUDIO] = [
                torch.from_numpy(self._is_audio(*video)) for video in zip(*fields, strict=True)
            ]
        return processed

    def _is_audio(self, grid: tuple[int, int, int], seconds_per_grid: float, num_frames: int) -> Mask:
        config = self.info.get_hf_config()
        num_grids, height, width = grid
        times = np.arange(num_grids) * seconds_per_grid * config.position_id_per_seconds
        times = times.repeat(height * width // config.vision_config.spatial_merge_size**2)
        return self.interleave(times, self.info.num_audio_tokens(num_frames) if num_frames else 0)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        # Positions are computed with them, on the CPU.
        for name in (SECONDS_PER_GRID, NUM_FRAMES, IS_AUDIO):
            if name in hf_inputs:
                fields[name] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
        if NUM_FRAMES in hf_inputs:
            fields[FEATURES] = MultiModalFieldConfig.flat_from_sizes("video", hf_inputs[NUM_FRAMES], dim=1)
        return fields

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        processor = self.info.get_hf_processor()
        vocabulary = self.info.get_tokenizer().get_vocab()
        audio, video = vocabulary[processor.audio_token], vocabulary[processor.video_token]
        begin, end = vocabulary[processor.audio_bos_token], vocabulary[processor.audio_eos_token]

        def with_track(update: PromptUpdate) -> PromptUpdate:
            def replacement(index: int) -> PromptUpdateDetails | list[int]:
                item = out_mm_kwargs["video"][index]
                if not has_track(item):
                    without_track: list[int] = update.replacement(index)
                    return without_track
                ids = torch.where(item[IS_AUDIO].data, audio, video).tolist()
                return PromptUpdateDetails.select_token_ids([begin, *ids, end], [audio, video])

            return replace(update, replacement=replacement)

        return [with_track(update) if update.modality == "video" else update for update in updates]


class VideoWithTrackModel(VllmClass):
    """Encodes a video and its track to one output."""

    def embed_multimodal(self, **kwargs: Any) -> MultiModalEmbeddings:
        tracks = kwargs.pop(FEATURES, None)
        if tracks is None:
            embeddings: MultiModalEmbeddings = super().embed_multimodal(**kwargs)
            return embeddings
        num_frames, is_audio = kwargs.pop(NUM_FRAMES), kwargs.pop(IS_AUDIO)
        lengths = num_frames[num_frames > 0]
        heard: Iterator[torch.Tensor] = iter(())
        if len(lengths):  # a step may have none of a request's heard videos
            heard = iter(
                super().embed_multimodal(
                    input_audio_features=tracks,
                    audio_feature_lengths=lengths,
                    feature_attention_mask=[torch.ones(length) for length in lengths.tolist()],
                )
            )
        seen = super().embed_multimodal(**kwargs)
        return tuple(
            _interleaved(frames, next(heard), mask) if mask.any() else frames
            for frames, mask in zip(seen, is_audio, strict=True)
        )

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Merges embeddings of media in the prompt's order, as they come.

        vLLM recognises interleaved tokens by their ids and would sort the embeddings by modality. It does not
        with video alone, and at positions of media the ids have no other use.
        """
        if is_multimodal is not None and multimodal_embeddings:
            is_audio = is_multimodal.to(input_ids.device) & (input_ids == self.config.audio_token_id)
            input_ids = input_ids.masked_fill(is_audio, self.config.video_token_id)
        embeds: torch.Tensor = super().embed_input_ids(
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )
        return embeds


def has_track(video: Mapping[str, Any]) -> bool:
    """Whether a video, as prepared for vLLM, has an audio track that is heard."""
    return NUM_FRAMES in video and bool(video[NUM_FRAMES].data)


def _interleaved(frames: torch.Tensor, track: torch.Tensor, is_audio: torch.Tensor) -> torch.Tensor:
    """The embeddings of a video and its track, in the prompt's order. Those of audio are narrower if the
    frames also go to deeper layers, to which audio adds nothing."""
    output = frames.new_zeros(len(is_audio), frames.shape[1])
    for mask, embeddings in ((~is_audio, frames), (is_audio, track)):
        places = mask.nonzero()[:, 0].to(frames.device)
        output[:, : embeddings.shape[1]].index_copy_(0, places, embeddings.to(frames.dtype))
    return output
