"""Rows of media: the talker's projection of a hidden state in the middle of the thinker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP

from omni_server.errors import ConfigError
from stages.qwen3_omni.hf_overrides import thinker_config
from stages.qwen3_omni.thinker import Qwen3OmniThinker
from stages.qwen3_omni.thinker_to_talker import ThinkerToTalker

NUM_LAYERS, NUM_VISUAL = 6, 2
TALKER = Qwen3OmniMoeTalkerConfig(
    thinker_hidden_size=12, text_config={"hidden_size": 8, "intermediate_size": 20}, spatial_merge_size=2
)


def model(accept_hidden_layer: int = 4, *, has_talker: bool = True) -> Any:
    """A thinker without its language model."""
    made = Qwen3OmniThinker.__new__(Qwen3OmniThinker)
    torch.nn.Module.__init__(made)
    made.config = SimpleNamespace(
        vision_config=SimpleNamespace(deepstack_visual_indexes=list(range(NUM_VISUAL))),
        text_config=SimpleNamespace(num_hidden_layers=NUM_LAYERS),
    )
    made.accept_hidden_layer = accept_hidden_layer
    torch.manual_seed(0)
    made.talker_hidden_projection = Qwen3OmniMoeTalkerResizeMLP(TALKER) if has_talker else None
    return made


@pytest.mark.parametrize("layer", [NUM_VISUAL + 1, NUM_LAYERS - 1])
def test_layers_between_the_images_and_the_last_one_can_be_sent(layer: int) -> None:
    assert ThinkerToTalker(model(layer), Path()).hidden_layer == layer


@pytest.mark.parametrize("layer", [0, NUM_VISUAL, NUM_LAYERS])
def test_a_layer_that_vllm_counts_otherwise_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match=f"accept_hidden_layer must be from 3 to 5, not {layer}"):
        ThinkerToTalker(model(layer), Path("folder"))


def test_a_checkpoint_without_a_talker_makes_no_rows() -> None:
    with pytest.raises(ConfigError, match="no talker"):
        ThinkerToTalker(model(has_talker=False), Path("folder"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("talker.hidden_projection.linear_fc1.weight", "talker_hidden_projection.linear_fc1.weight"),
        ("talker.text_projection.linear_fc1.weight", None),
        ("talker.model.norm.weight", None),
        ("code2wav.decoder.0.conv.weight", None),
        ("thinker.model.norm.weight", "language_model.model.norm.weight"),
        ("thinker.visual.merger.mlp.0.weight", "visual.merger.mlp.0.weight"),
        ("thinker.lm_head.weight", "language_model.lm_head.weight"),
    ],
)
def test_of_the_talkers_weights_only_the_projection_is_loaded(name: str, wanted: str | None) -> None:
    assert Qwen3OmniThinker.hf_to_vllm_mapper.map_name(name) == wanted


def test_config_of_another_model_stays_as_it_is() -> None:
    stand_in = PretrainedConfig(architectures=["Other"])
    assert thinker_config(stand_in).architectures == ["Other"]
