"""Products of few rows are what PyTorch's are."""

import os
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("few_rows_checks.py")


def test_products_pass_their_checks_in_the_interpreter() -> None:
    """In a process of their own: Triton decides when a kernel is defined whether it will be interpreted."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
