"""Random numbers of a demo checkpoint's weights: each tensor has a generator of its own."""

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

Distribution = Callable[[nn.Module, str, str, nn.Parameter], tuple[float, float]]
"""Takes a module, its name, the name of a parameter in it and the parameter. Returns the mean and the
standard deviation of the parameter's values."""


def normal(name: str, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Standard normal, float32 of `shape`, a function of `seed` and the tensor's name."""
    # a hash, because torch's generator takes no more than 32 bits of a seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(tuple(shape), generator=generator)


@torch.no_grad()
def fill_parameters(model: nn.Module, distribution: Distribution, seed: int) -> None:
    """Overwrite all parameters, each from its own generator, seeded with the seed and its name."""
    filled: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}"
            mean, std = distribution(module, module_name, name, parameter)
            parameter.copy_(mean + std * normal(full_name, parameter.shape, seed))
            filled.add(id(parameter))
    if len(filled) != len(list(model.parameters())):
        raise AssertionError("a parameter of the model was not filled")
