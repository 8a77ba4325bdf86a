"""M-RoPE positions of prompts with media.

Source: `get_rope_index` in transformers 5.19. vLLM's own positions of videos differ: times of frames are
whole numbers also where the model's are not, they are computed from a rate that is rounded to the model's
dtype, and what follows a heard video is placed behind all of it.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omni_server.errors import ConfigError
from stages.qwen_omni.audio_in_video import IS_AUDIO, SECONDS_PER_GRID, has_track
from stages.runtime.fractional_positions import with_delta


class MediaPositions:
    """Precedes one of vLLM's models among the bases of a class."""

    config: Any

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Packed positions, int64 `[3, len(input_tokens)]`, and delta."""
        length = len(input_tokens)
        positions = torch.arange(length, dtype=torch.float32).repeat(3, 1)
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            self.place(feature, positions)
        return with_delta(positions)

    def place(self, feature: MultiModalFeatureSpec, positions: torch.Tensor) -> None:
        """Writes the positions of an item, and those of text for all that follows it."""
        first = feature.mm_position.offset
        behind = first + feature.mm_position.length
        item, start = feature.data, positions[0, first].clone()
        assert item is not None
        last = first  # where the item's last piece begins
        if feature.modality == "audio":
            positions[:, first:behind] = torch.arange(behind - first) + start
        elif not has_track(item):
            positions[:, first:behind] = self._of_frames(feature) + start
        else:
            # A token begins the track, and one ends it.
            first, behind, start = first + 1, behind - 1, start + 1
            is_audio = item[IS_AUDIO].data
            of_item = positions[:, first:behind]
            of_item[:, is_audio] = torch.arange(int(is_audio.sum())) + start
            of_item[:, ~is_audio] = self._of_frames(feature) + start
            last = first + int((is_audio != is_audio[-1]).nonzero()[-1]) + 1
        # What follows continues from the last piece of a heard video, though another may reach further.
        following = positions[:, last:behind].max() + 1
        positions[:, behind:] = torch.arange(positions.shape[1] - behind) + following

    def _of_frames(self, feature: MultiModalFeatureSpec) -> torch.Tensor:
        """Float32 `[3, n]`, from 0 on."""
        item, modality = feature.data, feature.modality
        assert item is not None
        num_grids, height, width = item[f"{modality}_grid_thw"].data.tolist()
        merged = self.config.vision_config.spatial_merge_size
        times = torch.zeros(num_grids)
        if modality == "video":
            times = self.frame_times(num_grids, item[SECONDS_PER_GRID].data)
        rows, columns = torch.arange(height // merged), torch.arange(width // merged)
        return torch.cartesian_prod(times, rows.float(), columns.float()).T

    def frame_times(self, num_grids: int, seconds_per_grid: torch.Tensor) -> torch.Tensor:
        """In positions, float32 `[num_grids]`, computed in that type."""
        return torch.arange(num_grids) * seconds_per_grid.float() * self.config.position_id_per_seconds


def check_talker_positions(config: PreTrainedConfig, *names: str) -> None:
    """The talker's positions are computed here, with the thinker's config; in the reference, with the
    talker's.

    Raises `ConfigError` if they differ in one of `names`, or in the size of patches.
    """
    thinker, talker = config.thinker_config, config.talker_config
    expected = {name: getattr(thinker, name) for name in names}
    expected["spatial_merge_size"] = thinker.vision_config.spatial_merge_size
    for name, value in expected.items():
        if (given := getattr(talker, name)) != value:
            raise ConfigError(f"{name} is {given} in talker_config, but {value} in thinker_config")
