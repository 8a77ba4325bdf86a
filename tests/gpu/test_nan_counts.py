"""NaN counts beside rows on a GPU, where vLLM's V2 model runner counts with a kernel that Triton cannot interpret.

Run by hand: `pytest -m gpu tests/gpu/test_nan_counts.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import demo_config
from tests.integration.test_nan_counts import NUM_BROKEN_ROWS, broken_head, nan_counts

__all__ = ["broken_head"]
pytestmark = pytest.mark.gpu


def test_nan_counts_arrive_beside_rows(broken_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: dict[str, Any] = {"code2wav": {"gpu_memory_utilization": 0.2}}
    for name in ("thinker", "talker"):
        engine_args = {"attention_backend": "TRITON_ATTN"}  # it takes float32
        stages[name] = {"gpu_memory_utilization": 0.2, "engine_args": engine_args}
    config = demo_config(platform="cuda", stages=stages)
    assert nan_counts(broken_head, config, monkeypatch) == {NUM_BROKEN_ROWS}
