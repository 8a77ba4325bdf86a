"""Keys and values that the DiT keeps from one window of a stream for the next.

Attention leaves a block of mel frames in few layers only: some also see the block before. So what a window
has to know of its past are the keys and values of those layers for one block, the last one that its
predecessor emitted; at each evaluation of the solver its own, because the states differ, and for both
branches of the guidance. With them a window needs no past blocks. It computes less, and nothing of the past
is lost: the kept block has seen its own past, and that the past before it, whereas blocks that are computed
again begin in the middle.

The kept block has seen the one behind it as the last window knew it, without the future of that one.

The memory is one tensor, in which kernels find a stream's part by its slot and the interval, both read on the
device, so that a CUDA graph needs no copies before and behind it. A layer's attention reads a part before the
same part is overwritten (`PackedDiT.velocity`), hence one copy is enough.
"""

import math
from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig

from omni_server.errors import ConfigError
from stages.qwen2_5_omni.options import SolverConfig


@dataclass(frozen=True)
class LayerKV:
    """What is kept of one layer at one evaluation of any interval."""

    values: torch.Tensor
    """[slots, intervals, branches, block_size, 2 * num_heads * head_dim] in the type of the products, each
    row without gaps: keys, before the rotary embedding, and values."""
    interval: torch.Tensor
    """Number of the interval, int32 []."""


def slot_shape(dit: Qwen2_5OmniDiTConfig, solver: SolverConfig) -> tuple[int, ...]:
    """What is kept for one stream: [intervals, evaluations in each, layers that look back, branches,
    block_size, 2 * num_heads * head_dim]."""
    num_layers = len(set(dit.look_backward_layers).intersection(range(dit.num_hidden_layers)))
    width = 2 * dit.num_attention_heads * dit.head_dim
    # A Runge-Kutta method of order 4 evaluates four times.
    return (solver.num_steps - 1, 4, num_layers, solver.num_branches, dit.block_size, width)


class StreamKV:
    """The memory of all slots."""

    def __init__(
        self, num_slots: int, per_slot: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """per_slot: `slot_shape`. Raises `ConfigError` if the device has no room."""
        try:
            self.values = torch.zeros(num_slots, *per_slot, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            size_gb = num_slots * math.prod(per_slot) * dtype.itemsize / 1e9
            raise ConfigError(
                f"code2wav has no room for the state of {num_slots} streams, {size_gb:.1f} GB: raise its "
                "gpu_memory_utilization, lower its max_streams, or set chunks.carry to false"
            ) from None

    def at(self, evaluation: int, layer: int, interval: torch.Tensor) -> LayerKV:
        """layer: counted among those that look back; interval: int32 []."""
        return LayerKV(self.values[:, :, evaluation, layer], interval)
