"""Checks of Triton kernels, run in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def run_checks(file: Path) -> None:
    """The tests of `file`, in a process of their own: Triton decides when a kernel is defined whether it will be
    interpreted. Fails with what they print."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
