"""M-RoPE positions with fractions, as vLLM's integers.

vLLM keeps positions as int64. It computes those of generated tokens itself: a token's index plus the
request's delta. So the whole part of a position is in the low 32 bits, where adding an index does not reach
the fraction, which is in the high ones, in units of 2^-24, the smallest of float32 above 1/2. A whole
number is its own packed form.
"""

import torch

_FRACTION_BITS = 24
_WHOLE_BITS = 32


def with_delta(positions: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A prompt's positions, float32 `[3, n]`, as vLLM takes them: packed, and with the delta from index to
    position of generated tokens, which continue from the last one."""
    last = positions[:, -1].max().double()
    return packed(positions), int(packed(last + 1 - positions.shape[1]))


def packed(positions: torch.Tensor) -> torch.Tensor:
    """To int64, from -2^31 to 2^31: exactly, if float32."""
    scaled = (positions.double() * (1 << _FRACTION_BITS)).long()
    whole = scaled >> _FRACTION_BITS
    return whole + ((scaled - (whole << _FRACTION_BITS)) << _WHOLE_BITS)


def unpacked(positions: torch.Tensor) -> torch.Tensor:
    """Int64 `[..., n]`, from 0 on, to the nearest float32: what float32 gives as the sum of index and
    delta."""
    halves = positions.view(torch.int32)  # on x86-64, the low ones are first
    return torch.add(halves[..., ::2], halves[..., 1::2].float(), alpha=2.0**-_FRACTION_BITS)
