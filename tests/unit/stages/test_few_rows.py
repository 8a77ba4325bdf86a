"""Products of few rows are what PyTorch's are."""

from pathlib import Path

from tests.unit.stages.interpreter import run_checks


def test_products_pass_their_checks_in_the_interpreter() -> None:
    run_checks(Path(__file__).with_name("few_rows_checks.py"))
