"""A seed does not move on with a token that is thrown away."""

import pytest
import torch

from stages.runtime.ar_runner_v1 import generators_set_aside


def seeded(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_only_the_discarded_rows_are_without_a_generator_and_only_for_the_block() -> None:
    generators = seeded(1, 2, 3)
    before = dict(generators)
    with generators_set_aside(generators, [1, 7]):
        assert set(generators) == {0, 2}
        torch.rand(3, generator=generators[0])
    assert generators == before
    assert torch.equal(generators[1].get_state(), seeded(1, 2, 3)[1].get_state())


def test_they_are_back_after_a_step_that_failed() -> None:
    generators = seeded(1)
    with pytest.raises(RuntimeError, match="step"), generators_set_aside(generators, [0]):
        raise RuntimeError("step")
    assert set(generators) == {0}
