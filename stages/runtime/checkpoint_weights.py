"""Loading of weights for models whose parameters have the checkpoint's names."""

from collections.abc import Iterable

import torch

from omni_server.errors import ConfigError


def load_weights_exactly(
    module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], prefix: str
) -> set[str]:
    """Copies the weights whose names begin with `prefix` to the parameters and buffers of `module`, which
    have the same names without it. Returns the names in `module`.

    Raises `ConfigError` if one is missing, unknown or misshapen."""
    own = module.state_dict()  # shares memory with the parameters and buffers
    missing = set(own)
    for name, weight in weights:
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix)
        if key not in missing:
            raise ConfigError(f"the checkpoint's weight {name} has no place in the model")
        if own[key].shape != weight.shape:
            raise ConfigError(
                f"the checkpoint's weight {name} is {list(weight.shape)}, the config says "
                f"{list(own[key].shape)}"
            )
        own[key].copy_(weight)
        missing.discard(key)
    if missing:
        names = ", ".join(prefix + key for key in sorted(missing)[:5])
        raise ConfigError(f"the checkpoint lacks {len(missing)} weights of the model, among them {names}")
    return set(own)
