"""The rotary embedding where queries and keys lie computes what the reference does."""

from pathlib import Path

from tests.unit.stages.interpreter import run_checks


def test_it_passes_its_checks_in_the_interpreter() -> None:
    run_checks(Path(__file__).with_name("rope_checks.py"))
