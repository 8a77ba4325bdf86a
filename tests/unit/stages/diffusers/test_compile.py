"""`compile: true`: all that is compiled is compiled before the server is ready."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from omni_server.errors import ConfigError
from stages.diffusers.loading import load_pipeline
from stages.diffusers.warm_up import warm_up
from tests.unit.stages.diffusers.tiny import CPU, Tiny, difference, stage_options

OPTIONS = {"compile": True, "max_model_len": 64}


def test_after_the_warm_up_nothing_is_compiled(
    tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # as the server sets it on CPUs
    # Traced and specialized as always, without minutes of code generation.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    plain, stage = tiny("qwen-image"), stage_options(**OPTIONS)
    pipe = load_pipeline(tiny_folder("qwen-image"), stage, "float32", CPU)
    model = Tiny("qwen-image", pipe, plain.num_steps, plain.guidance)
    warm_up(model.stepped, stage, device=CPU, share=None, input_tokens=0)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    (run,) = model.run([(0, model.job(0, height=96))])
    assert difference(run, plain.own_image(plain.job(0, height=96))) < 1e-5
    for index, run in enumerate(model.run([(0, model.job(0)), (0, model.job(1)), (1, model.job(2))])):
        assert difference(run, plain.own_image(plain.job(index))) < 1e-5
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_a_denoiser_without_repeated_blocks_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="compile: SD3Transformer2DModel does not say"):
        load_pipeline(tiny_folder("sd3"), stage_options(compile=True), "float32", CPU)
