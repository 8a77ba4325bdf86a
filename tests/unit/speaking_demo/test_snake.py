"""The activation that is written in C."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    SnakeBeta,
)

from scripts.speaking_demo.snake import use_fast_activations


@pytest.mark.parametrize("length", [24, 301])
def test_value_and_gradients_are_those_of_transformers(length: int) -> None:
    torch.manual_seed(0)
    plain = Qwen2_5OmniAntiAliasedActivation1d(SnakeBeta(6))
    nn.init.normal_(plain.act.alpha, std=0.5)
    nn.init.normal_(plain.act.beta, std=0.5)
    fast = copy.deepcopy(plain)
    use_fast_activations(fast)
    x, weight = torch.randn(3, 6, length), torch.randn(3, 6, length)

    def outcome(module: nn.Module) -> tuple[torch.Tensor, ...]:
        given = x.clone().requires_grad_()
        y = module(given)
        (y * weight).sum().backward()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
        return y.detach(), given.grad, *gradients

    for name, expected, found in zip(("y", "x", "alpha", "beta"), outcome(plain), outcome(fast), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
