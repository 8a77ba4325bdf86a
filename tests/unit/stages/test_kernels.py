"""Each Triton kernel computes what its reference does, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_the_kernels_pass_their_checks_in_the_interpreter() -> None:
    """In one process of their own: Triton decides when a kernel is defined whether it will be interpreted."""
    files = sorted(FOLDER.rglob("*_checks.py"))
    assert len(files) == 5
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
