"""What the windows of a stage config have to fit."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel
from omni_server.family.codec import CodecLayout
from omni_server.orchestrator.codec_edge import check_longest_window
from tests.unit.config.deployment import deployment

MODEL = cast(FamilyModel, SimpleNamespace(codec=CodecLayout(frames_per_block=12, samples_per_frame=480)))


def config_with(max_model_len: int, **chunks: object) -> StageConfig:
    document: dict[str, Any] = deployment()
    document["stages"]["code2wav"]["max_model_len"] = max_model_len
    document["edges"][1]["chunks"] = chunks
    return StageConfig.model_validate(document)


def test_a_plan_whose_longest_window_fits_is_accepted() -> None:
    check_longest_window(config_with(132), MODEL)
    check_longest_window(config_with(1, mode="whole"), MODEL)


def test_a_plan_whose_longest_window_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_longest_window(config_with(131), MODEL)
    assert str(caught.value) == (
        "the longest window of 'chunks' has 11 blocks, 132 codec tokens; max_model_len of code2wav is 131: raise it, "
        "or lower the largest of new_blocks (busy.new_blocks included)"
    )
