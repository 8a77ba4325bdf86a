"""Loading of weights for models whose parameters have the checkpoint's names."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from omni_server.errors import ConfigError

Weights = Iterable[tuple[str, torch.Tensor]]
"""By their names in a checkpoint."""


def load_weights_exactly(module: torch.nn.Module, weights: Weights, prefix: str) -> set[str]:
    """Copies the weights whose names begin with `prefix` to the parameters and buffers of `module`, which
    have the same names without it. Returns the names in `module`. Raises the errors of `without_parts`."""
    own = module.state_dict()  # shares memory with the parameters and buffers
    for _ in without_parts(own, weights, prefix):
        pass
    return set(own)


def without_parts(
    parts: Mapping[str, torch.Tensor], weights: Weights, prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies the weights whose names begin with `prefix` to `parts`, which have the same names without it,
    and yields the others.

    Raises `ConfigError` if one is missing, unknown or misshapen."""
    missing = dict(parts)
    for name, weight in weights:
        if not name.startswith(prefix):
            yield name, weight
            continue
        part = missing.pop(name.removeprefix(prefix), None)
        if part is None:
            raise ConfigError(f"the checkpoint's weight {name} has no place in the model")
        if part.shape != weight.shape:  # copy_ would broadcast some
            raise ConfigError(
                f"the checkpoint's weight {name} is {list(weight.shape)}, the config says {list(part.shape)}"
            )
        part.copy_(weight)
    if missing:
        names = ", ".join(prefix + key for key in sorted(missing)[:5])
        raise ConfigError(f"the checkpoint lacks {len(missing)} weights of the model, among them {names}")
