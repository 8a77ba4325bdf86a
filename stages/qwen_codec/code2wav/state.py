"""What a speech stream leaves for its next window: keys and values of the transformer, and the ends of the
convolutions' inputs. It is everything that later audio depends on, so streamed audio equals a single pass.

The memory is allocated once, for a fixed number of streams. Each has a slot, the same in all tensors. A slot
is never cleared: the first step of a stream ignores what it finds there.

A step has the same length for all streams; padding fills up those with fewer new frames. It changes nothing:
the network is causal, and the state ends with the new frames. What a step needs to know of the streams is on
the device, so the network can be recorded as a CUDA graph per shape.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from omni_server.errors import ConfigError


class Streamed(nn.Module):
    """A layer that needs the end of its previous input, of `state_shape` per stream."""

    state_shape: tuple[int, ...]


def streamed_layers(network: nn.Module) -> Iterator[Streamed]:
    return (layer for layer in network.modules() if isinstance(layer, Streamed))


def values_per_stream(network: nn.Module) -> int:
    """Number of values that the state of one stream has. The network may be on the meta device."""
    return sum(torch.Size(layer.state_shape).numel() for layer in streamed_layers(network))


class StreamState:
    """The memory of all slots: for each layer [num_slots, *`state_shape`], in the type and on the device of
    the network's weights."""

    def __init__(self, network: nn.Module, num_slots: int) -> None:
        """Raises `ConfigError` if memory runs out."""
        weight = next(network.parameters())
        try:
            self.of_layer: Mapping[Streamed, torch.Tensor] = {
                layer: torch.zeros(num_slots, *layer.state_shape, dtype=weight.dtype, device=weight.device)
                for layer in streamed_layers(network)
            }
        except torch.OutOfMemoryError:
            size_gb = num_slots * values_per_stream(network) * weight.dtype.itemsize / 1e9
            raise ConfigError(
                f"code2wav has no room for the state of {num_slots} streams, {size_gb:.1f} GB: raise its "
                "gpu_memory_utilization, or lower its max_streams"
            ) from None

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies each source slot to the target slot at the same index; all targets differ."""
        device = next(iter(self.of_layer.values())).device
        source, target = torch.tensor((sources, targets), device=device)
        for memory in self.of_layer.values():
            memory[target] = memory[source]


@dataclass(frozen=True)
class Step:
    """The streams of one step, in the order of the batch."""

    state: StreamState
    length: int
    """Frames of each stream, including padding."""
    slots: torch.Tensor
    """int64 [num_streams], all different except in rows of padding, whose slot no stream has."""
    positions: torch.Tensor
    """Absolute index of each stream's first new frame, int64 [num_streams]."""
    num_known: torch.Tensor
    """Frames whose effect is in each stream's state, int64 [num_streams]; 0: the state is not read."""
    num_new: torch.Tensor
    """New frames of each stream, int64 [num_streams]; padding follows up to `length`."""

    def extended(self, layer: Streamed, inputs: torch.Tensor, *, num_undefined: int = 0) -> torch.Tensor:
        """Returns `inputs` [num_streams, channels, positions] with the end of the layer's previous input
        before them, and keeps the end of the new frames for the next step.

        In a stream's first step, zeros replace the previous input and the first `num_undefined` positions of
        the new one, which lie before the stream's beginning. They pad a single pass, too."""
        memory = self.state.of_layer[layer]
        width = memory.shape[-1]
        extended = torch.cat((memory[self.slots], inputs), dim=-1)
        is_new = (self.num_known == 0)[:, None, None]
        extended[..., : width + num_undefined].masked_fill_(is_new, 0)
        memory[self.slots] = self._end(extended, width, dim=-1)
        return extended

    def extended_kv(self, layer: Streamed, kv: torch.Tensor) -> torch.Tensor:
        """Returns keys and values [num_streams, 2, heads, length, head_dim] after those of the previous
        frames. The number of previous frames is fixed; those before the stream's beginning are zero and must
        be masked (`num_known`)."""
        memory = self.state.of_layer[layer]
        width = memory.shape[-2]
        extended = torch.cat((memory[self.slots], kv), dim=-2)
        # Not left to the mask: the slot's previous stream may have left infinity, and 0 * infinity is NaN.
        places = torch.arange(width, device=kv.device)
        is_unknown = places < width - self.num_known[:, None]
        extended[..., :width, :].masked_fill_(is_unknown[:, None, None, :, None], 0)
        memory[self.slots] = self._end(extended, width, dim=-2)
        return extended

    def _end(self, extended: torch.Tensor, width: int, *, dim: int) -> torch.Tensor:
        """The `width` positions along `dim` up to the end of each stream's new frames."""
        per_frame = (extended.shape[dim] - width) // self.length
        places = self.num_new[:, None] * per_frame + torch.arange(width, device=extended.device)
        shape = [1] * extended.ndim
        shape[0], shape[dim] = places.shape
        return extended.take_along_dim(places.view(shape), dim)
