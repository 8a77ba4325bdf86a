"""Random numbers of a demo checkpoint's weights: each tensor has a generator of its own."""

import zlib
from collections.abc import Iterable

import torch


def normal(name: str, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Standard normal, float32 of `shape`, a function of `seed` and the tensor's name."""
    # a hash, because torch's generator takes no more than 32 bits of a seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(tuple(shape), generator=generator)
