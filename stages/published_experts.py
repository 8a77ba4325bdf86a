"""Names and shapes of the weights of mixtures of experts, as in the published checkpoints.

transformers 5 stacks the experts of a layer into two tensors when it loads a checkpoint; published files have
three matrices per expert.
"""

from collections.abc import Iterator, Mapping

import torch

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


def published_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model's `state_dict`, by their names in a published checkpoint."""
    return {name: tensor for stacked in state.items() for name, tensor in _unstacked(*stacked)}


def _unstacked(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(_GATE_UP):  # [experts, 2 x intermediate, hidden]
        for expert, matrices in enumerate(tensor):
            gate, up = matrices.chunk(2)
            yield f"{name.removesuffix('gate_up_proj')}{expert}.gate_proj.weight", gate
            yield f"{name.removesuffix('gate_up_proj')}{expert}.up_proj.weight", up
    elif name.endswith(_DOWN):  # [experts, hidden, intermediate]
        for expert, matrix in enumerate(tensor):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", matrix
    else:
        yield name, tensor
