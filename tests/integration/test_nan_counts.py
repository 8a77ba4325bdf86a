"""vLLM's count of NaN logits (VLLM_COMPUTE_NANS_IN_LOGITS) reaches the server from a stage that also sends rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_server.config.stage_config import StageConfig
from omni_server.engine.async_engine import RowOutputProcessor
from omni_server.types import SamplingConfig
from stages.qwen2_5_omni.demo_checkpoint import make_demo_checkpoint
from tests.integration.live import LiveOmni, demo_config, spoken
from tests.reference.cases import CASES

NUM_BROKEN_ROWS = 3


@pytest.fixture
def broken_head(tmp_path: Path) -> Path:
    """A checkpoint whose thinker has NaN in a few rows of its output layer."""
    model_dir = make_demo_checkpoint(tmp_path / "checkpoint")
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    tensors["thinker.lm_head.weight"][:NUM_BROKEN_ROWS] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return model_dir


def nan_counts(model_dir: Path, config: StageConfig, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The counts that come with rows while a spoken answer is made."""
    counts: list[int] = []
    process_outputs = RowOutputProcessor.process_outputs

    def recorded(self: RowOutputProcessor, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        counts.extend(output.num_nans_in_logits for output in outputs if output.pooling_output is not None)
        return process_outputs(self, outputs, *args, **kwargs)

    monkeypatch.setattr(RowOutputProcessor, "process_outputs", recorded)
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    live = LiveOmni(model_dir, config)
    try:
        counts.clear()  # of the warm-up
        answer = live.answer(spoken(CASES["hello"].messages, thinker=SamplingConfig(temperature=0.0, max_tokens=8)))
    finally:
        live.close()
    assert len(answer.token_ids) == 8
    assert answer.codes
    return set(counts)


def test_nan_counts_arrive_beside_rows(broken_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nan_counts(broken_head, demo_config(), monkeypatch) == {NUM_BROKEN_ROWS}
