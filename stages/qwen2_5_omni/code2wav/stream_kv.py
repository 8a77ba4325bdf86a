"""Keys and values that the DiT keeps from one window of a stream for the next.

Attention crosses block boundaries in few layers only, some of which also see the previous block. So all that
a window needs of its past are those layers' keys and values for one block, the last one that the previous
window emitted. They are kept per evaluation of the solver, because the states differ, and for both guidance
branches. With them, a window needs no past blocks. It computes less and loses nothing of the past: the kept
block has seen its own past, and so on, whereas recomputed blocks start in the middle.

The kept block saw its next block as the last window knew it, without that block's own future.

The memory is one tensor. Kernels find a stream's part by its slot and the interval, both read on the device,
so a CUDA graph needs no copies before or after it. One copy is enough, because a layer's attention reads a
part before that part is overwritten (`PackedDiT.velocity`).
"""

import math
from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig

from omni_server.errors import ConfigError
from stages.qwen2_5_omni.options import SolverConfig


@dataclass(frozen=True)
class LayerKV:
    """One layer's kept state at one evaluation of any interval."""

    values: torch.Tensor
    """[slots, intervals, branches, block_size, 2 * num_heads * head_dim] in the dtype of the products. Rows
    are contiguous: keys before the rotary embedding, then values."""
    interval: torch.Tensor
    """Number of the interval, int32 []."""


def slot_shape(dit: Qwen2_5OmniDiTConfig, solver: SolverConfig) -> tuple[int, ...]:
    """Shape of one stream's state: [intervals, evaluations in each, layers that look back, branches,
    block_size, 2 * num_heads * head_dim]."""
    num_layers = len(set(dit.look_backward_layers).intersection(range(dit.num_hidden_layers)))
    width = 2 * dit.num_attention_heads * dit.head_dim
    # Fourth-order Runge-Kutta evaluates four times.
    return (solver.num_steps - 1, 4, num_layers, solver.num_branches, dit.block_size, width)


class StreamKV:
    """The memory of all slots."""

    def __init__(
        self, num_slots: int, per_slot: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """per_slot: `slot_shape`. Raises `ConfigError` if memory runs out."""
        try:
            self.values = torch.zeros(num_slots, *per_slot, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            size_gb = num_slots * math.prod(per_slot) * dtype.itemsize / 1e9
            raise ConfigError(
                f"code2wav has no room for the state of {num_slots} streams, {size_gb:.1f} GB: raise its "
                "gpu_memory_utilization, lower its max_streams, or set chunks.carry to false"
            ) from None

    def at(self, evaluation: int, layer: int, interval: torch.Tensor) -> LayerKV:
        """layer: index among layers that look back; interval: int32 []."""
        return LayerKV(self.values[:, :, evaluation, layer], interval)
