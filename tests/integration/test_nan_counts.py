"""A checkpoint whose logits are not numbers does not come up: the first request through all stages tells."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import LiveOmni, demo_config

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


def check_that_it_does_not_come_up(model_dir: Path, config: StageConfig) -> None:
    message = (
        r"the first request through all stages failed: stage 'thinker': corrupt data \(logits\): "
        f"{NUM_BROKEN_ROWS} of the next token's scores are not finite numbers"
    )
    with pytest.raises(ConfigError, match=message):
        LiveOmni(model_dir, config)


def test_a_server_whose_thinker_has_nan_in_its_weights_does_not_come_up(broken_head: Path) -> None:
    check_that_it_does_not_come_up(broken_head, demo_config())
