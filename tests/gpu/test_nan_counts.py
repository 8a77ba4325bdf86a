"""NaN is found on a GPU, too, where vLLM's V2 model runner counts with a kernel that Triton cannot interpret.

Run by hand: `pytest -m gpu tests/gpu/test_nan_counts.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import demo_config
from tests.integration.test_nan_counts import broken_head, check_that_it_does_not_come_up

__all__ = ["broken_head"]
pytestmark = pytest.mark.gpu


def test_a_server_whose_thinker_has_nan_in_its_weights_does_not_come_up(broken_head: Path) -> None:
    stages: dict[str, Any] = {"code2wav": {"gpu_memory_utilization": 0.2}}
    for name in ("thinker", "talker"):
        engine_args = {"attention_backend": "TRITON_ATTN"}  # it takes float32
        stages[name] = {"gpu_memory_utilization": 0.2, "engine_args": engine_args}
    config = demo_config(platform="cuda", stages=stages)
    check_that_it_does_not_come_up(broken_head, config)
