"""The fused kernels compute what PyTorch's operators do."""

from pathlib import Path

from tests.unit.stages.interpreter import run_checks


def test_the_kernels_pass_their_checks_in_the_interpreter() -> None:
    run_checks(Path(__file__).with_name("kernel_checks.py"))
