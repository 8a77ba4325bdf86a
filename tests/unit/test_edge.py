"""What an edge into code2wav has to fit."""

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.edge import check_longest_window
from omni_server.errors import ConfigError
from omni_server.family import CodecLayout

LAYOUT = CodecLayout(codes_per_block=12, frames_per_code=2, samples_per_code=480)


def test_a_plan_whose_longest_window_fits_is_accepted() -> None:
    check_longest_window(ChunkPlan(), LAYOUT, 132)
    check_longest_window(ChunkPlan(mode="whole"), LAYOUT, 1)


def test_a_plan_whose_longest_window_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_longest_window(ChunkPlan(), LAYOUT, 131)
    assert str(caught.value) == (
        "the longest window of 'chunks' has 11 blocks, 132 codec tokens; code2wav's max_model_len is 131: "
        "raise it, or lower the largest of new_blocks (busy.new_blocks included)"
    )
