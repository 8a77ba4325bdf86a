"""What a diffusion stage's model is told."""

import itertools

import pytest

from omni_server.protocol.diffusion_config import ComputeDtype, DiffusionRuntimeConfig, FlowSolver

BLOCK = 4


def config(
    max_num_windows: int, max_num_codes: int, longest: int, dtype: ComputeDtype = "float32"
) -> DiffusionRuntimeConfig:
    return DiffusionRuntimeConfig(
        solver=FlowSolver(num_steps=10, guidance_scale=0.5, sway_coefficient=-1.0),
        compute_dtype=dtype,
        is_fast=True,
        max_num_windows=max_num_windows,
        max_num_codes=max_num_codes,
        longest_window=longest,
    )


@pytest.mark.parametrize(
    ("max_num_windows", "max_num_codes", "longest"), [(1, 12, 9), (2, 10, 8), (3, 9, 9), (3, 40, 6)]
)
def test_no_step_holds_more_blocks(max_num_windows: int, max_num_codes: int, longest: int) -> None:
    """Against every step that the limits allow."""
    limit = config(max_num_windows, max_num_codes, longest).max_num_blocks(BLOCK)
    most = max(
        sum(-(-length // BLOCK) for length in lengths)
        for number in range(1, max_num_windows + 1)
        for lengths in itertools.combinations_with_replacement(range(1, longest + 1), number)
        if sum(lengths) <= max_num_codes
    )
    assert most == limit


def test_the_hash_tells_what_the_model_is_built_from() -> None:
    assert config(1, 2, 2).compute_hash() == config(1, 2, 2).compute_hash()
    assert config(1, 2, 2).compute_hash() != config(1, 2, 2, "float16").compute_hash()
