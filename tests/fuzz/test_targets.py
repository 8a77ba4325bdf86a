"""Each fuzzer for a little while, from fixed seeds; `scripts/fuzz` runs them for as long as it is told."""

import pytest

from tests.fuzz.all_targets import TARGETS
from tests.fuzz.target import fuzz

SEED = 1


@pytest.mark.parametrize("name", TARGETS)
async def test_changed_inputs_do_no_harm(name: str) -> None:
    target = TARGETS[name]
    report = await fuzz(target, SEED, rounds=target.rounds)
    for number, error in report.findings:
        raise AssertionError(f"input {number} of scripts/fuzz --target '{name}' --seed {SEED}") from error
    assert target.outcomes <= report.outcomes.keys()
