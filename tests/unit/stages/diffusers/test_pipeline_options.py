"""Diffusers' own means of speed and memory, as options of the stage."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from omni_server.errors import ConfigError
from stages.diffusers import FAMILY
from stages.diffusers.loading import load_pipeline
from tests.unit.stages.diffusers.tiny import CPU, Tiny, config_with, difference, stage_options

FLOAT8 = {"layerwise_casting": True}


@pytest.fixture
def torchs_own_attention() -> Iterator[None]:
    """Afterwards; Diffusers keeps the choice for the whole process."""
    yield
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def loaded(tiny: Callable[[str], Tiny], folder: Path, name: str, **options: Any) -> Tiny:
    plain = tiny(name)
    pipe = load_pipeline(folder, stage_options(**options), "float32", CPU)
    return Tiny(name, pipe, plain.num_steps, plain.guidance)


@pytest.mark.usefixtures("torchs_own_attention")
def test_another_implementation_of_attention_gives_the_same_image(
    tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path]
) -> None:
    expected = tiny("qwen-image").own_image(tiny("qwen-image").job(0))
    model = loaded(tiny, tiny_folder("qwen-image"), "qwen-image", attention_backend="_native_math")
    for processor in model.pipe.transformer.attn_processors.values():
        assert processor._attention_backend == AttentionBackendName._NATIVE_MATH
    (run,) = model.run([(0, model.job(0))])
    assert 0 < difference(run, expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "backend", "problem"),
    [
        ("qwen-image", "sage", "attention_backend: sage cannot be used here"),
        ("sd15", "_native_math", "attention_backend: UNet2DConditionModel has the one of torch only"),
    ],
)
def test_an_implementation_that_cannot_be_chosen_is_refused(
    tiny_folder: Callable[[str], Path], name: str, backend: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_pipeline(tiny_folder(name), stage_options(attention_backend=backend), "float32", CPU)


@pytest.mark.parametrize("name", ["qwen-image", "sd15", "sd3"])
def test_float8_weights_change_images_slightly_and_the_memory_as_computed(
    tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path], name: str
) -> None:
    model = loaded(tiny, tiny_folder(name), name, **FLOAT8)
    own = [model.own_image(model.job(index)) for index in range(2)]
    (alone,) = model.run([(0, model.job(0))])
    assert torch.equal(alone.result.images, own[0])
    for run, expected in zip(model.run([(0, model.job(0)), (1, model.job(1))]), own, strict=True):
        assert difference(run, expected) < 1e-5
    exact = tiny(name).own_image(tiny(name).job(0))
    assert 0 < float((own[0] - exact).abs().mean()) < 0.01
    networks = [part for part in model.pipe.components.values() if isinstance(part, torch.nn.Module)]
    parameters = [parameter for network in networks for parameter in network.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.float32, torch.float8_e4m3fn}
    footprint = FAMILY.footprints(tiny_folder(name), config_with(**FLOAT8))["image"]
    assert footprint.weight_bytes == sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize(
    "option", [{"step_cache": "first_block"}, FLOAT8, {"loras": {"ink": "ink.safetensors"}}]
)
def test_what_changes_blocks_while_serving_is_not_compiled(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"compile and {next(iter(option))} exclude each other"):
        stage_options(compile=True, **option)
