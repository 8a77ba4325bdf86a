"""Windows in blocks."""

import itertools

import pytest

from stages.qwen2_5_omni.code2wav.packing import max_num_blocks
from tests.reference.token2wav import code2wav_stage

BLOCK = 4


@pytest.mark.parametrize(
    ("max_num_windows", "max_num_codes", "longest"), [(1, 12, 9), (2, 10, 8), (3, 9, 9), (3, 40, 6)]
)
def test_no_step_holds_more_blocks(max_num_windows: int, max_num_codes: int, longest: int) -> None:
    """Against every step that the limits allow."""
    stage = code2wav_stage(
        max_num_seqs=max_num_windows, max_num_batched_tokens=max_num_codes, max_model_len=longest
    )
    most = max(
        sum(-(-length // BLOCK) for length in lengths)
        for number in range(1, max_num_windows + 1)
        for lengths in itertools.combinations_with_replacement(range(1, longest + 1), number)
        if sum(lengths) <= max_num_codes
    )
    assert most == max_num_blocks(stage, BLOCK)
