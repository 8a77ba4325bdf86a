"""Which graphs of the vocoder take a number of crops of one length."""

from itertools import combinations_with_replacement

import pytest

from stages.qwen2_5_omni.code2wav.vocoder_batches import LAUNCH_FRAMES, batch_plan, batch_sizes, needed_sizes


def frames(plan: tuple[int, ...], length: int) -> int:
    """The plan's time, in frames."""
    return sum(max(LAUNCH_FRAMES, size * length) for size in plan)


@pytest.mark.parametrize(
    ("num_crops", "length", "plan"),
    [
        (1, 288, (1,)),
        (9, 288, (8, 1)),
        (3, 288, (2, 1)),
        (7, 288, (4, 2, 1)),
        (16, 288, (16,)),
        (35, 288, (16, 16, 2, 1)),
        (2, 48, (2,)),
        (3, 48, (3,)),
        (5, 48, (6,)),
        (9, 48, (6, 3)),
    ],
)
def test_long_crops_split_where_short_ones_stay_together(
    num_crops: int, length: int, plan: tuple[int, ...]
) -> None:
    assert batch_plan(num_crops, length) == plan


@pytest.mark.parametrize("length", [48, 64, 96, 144, 192, 288])
def test_no_other_choice_of_up_to_four_graphs_takes_less_time(length: int) -> None:
    for num_crops in range(1, 21):
        choices = [
            choice
            for count in range(1, 5)
            for choice in combinations_with_replacement(batch_sizes(length), count)
            if sum(choice) >= num_crops
        ]
        plan = batch_plan(num_crops, length)
        assert frames(plan, length) <= min(frames(choice, length) for choice in choices)


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
