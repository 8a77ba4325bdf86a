"""The schedule of windows against the windows that are cut."""

import pytest

from omni_server.orchestrator.window_schedule import WindowSchedule
from omni_server.types import SAMPLE_RATE_HZ
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import TalkerToCode2Wav
from tests.unit.orchestrator.simulated_speech import LAYOUT


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("ramp", [(1,), (1, 2, 4), (2, 1, 3)])
@pytest.mark.parametrize("other", [None, (3, 2)])
@pytest.mark.parametrize("past_blocks", [1, 3])
def test_it_says_what_the_edge_does(
    carry: bool, ramp: tuple[int, ...], other: tuple[int, ...] | None, past_blocks: int
) -> None:
    plan = Code2WavChunks(carry=carry, new_blocks=ramp, past_blocks=past_blocks, future_blocks=2)
    schedule = WindowSchedule(plan, LAYOUT, used := plan.new_blocks if other is None else other)
    edge = TalkerToCode2Wav(plan, LAYOUT, voice="Ethan", noise_seed=0)
    edge.use_ramp(used)
    number = 0
    for made in range(1, 400):
        for window in edge.push([(0,)]):
            assert made == schedule.needed_codes(number)
            assert window.first_sample == round(schedule.start_s(number) * SAMPLE_RATE_HZ)
            assert window.first_sample == schedule.first_code(number) * LAYOUT.samples_per_frame
            assert window.num_computed == schedule.computed_codes(number)
            assert len(window.token_ids) == schedule.sent_codes(number)
            number += 1
    assert number > 5
    *_, last = edge.finish()
    assert last.num_computed <= schedule.computed_codes(number)
