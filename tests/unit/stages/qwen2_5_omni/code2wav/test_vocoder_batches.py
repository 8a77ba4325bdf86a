"""Which graphs of the vocoder take a number of crops of one length."""

import pytest

from stages.qwen2_5_omni.code2wav.vocoder_batches import batch_plan, needed_sizes


@pytest.mark.parametrize("length", [48, 144, 288])
def test_all_crops_have_a_place_and_only_the_last_graph_has_room_left(length: int) -> None:
    for num_crops in range(1, 70):
        plan = batch_plan(num_crops, length)
        assert list(plan) == sorted(plan, reverse=True)
        assert sum(plan[:-1]) < num_crops <= sum(plan)


@pytest.mark.parametrize("length", [48, 64, 96, 288])
@pytest.mark.parametrize("max_num_crops", [1, 3, 4, 7, 16, 64])
def test_no_plan_needs_a_graph_that_is_not_recorded(length: int, max_num_crops: int) -> None:
    sizes = needed_sizes(length, max_num_crops)
    for num_crops in range(1, max_num_crops + 1):
        assert set(batch_plan(num_crops, length)) <= set(sizes)
    assert sizes[-1] < 2 * max(2, max_num_crops)
