"""Positions of media, beyond those that test_heard_videos compares with the reference's."""

from typing import Any

import pytest
from transformers import Qwen2_5OmniConfig, Qwen3OmniMoeConfig

from omni_server.errors import ConfigError
from stages.qwen_omni.media_positions import check_talker_positions


def config(family: type, **of_talker: int) -> Any:
    made = family()
    made.thinker_config.position_id_per_seconds = made.talker_config.position_id_per_seconds = 13
    made.talker_config.spatial_merge_size = made.thinker_config.vision_config.spatial_merge_size
    for name, value in of_talker.items():
        setattr(made.talker_config, name, value)
    return made


@pytest.mark.parametrize("family", [Qwen2_5OmniConfig, Qwen3OmniMoeConfig])
@pytest.mark.parametrize("name", ["position_id_per_seconds", "spatial_merge_size"])
def test_a_talker_that_would_count_otherwise_is_refused(family: type, name: str) -> None:
    check_talker_positions(config(family), "position_id_per_seconds")
    with pytest.raises(ConfigError, match=f"{name} is 40 in talker_config"):
        check_talker_positions(config(family, **{name: 40}), "position_id_per_seconds")
