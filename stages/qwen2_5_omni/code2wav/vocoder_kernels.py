"""BigVGAN's two operations as Triton kernels on channels-last tensors [batch, time, channels].

A convolution is a matrix product that reads its input at shifted rows and applies what follows (bias,
residual, mean over the residual blocks) before it writes the result. An activation (upsampling, snake,
downsampling: 12 taps each) is one pass instead of five.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

NUM_TAPS = 12
"""Taps of the low-pass filters that the kernel supports (`Qwen2_5OmniAntiAliasedActivation1d`)."""

ACTIVATION_RUN = 8
"""Consecutive outputs per thread; at least 5, so that only the first run sees the signal's start."""
ACTIVATION_TILE = 128
"""Threads' runs per program."""
ACTIVATION_WARPS = 4


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    left_padding: int,
    dilation: int = 1,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Computes `scale * (conv(x) + bias + residual)`, added to `out` if given; [batch, time, out channels].

    x: [batch, time, in channels]; weight: [taps, in channels, out channels], same dtype; bias: float32
    [out channels]; residual: in `dtype`. The input is zero-padded so that the output has the same length.
    """
    batch, length, channels = x.shape
    taps, _, out_channels = weight.shape
    is_adding = out is not None
    if out is None:
        out = torch.empty(batch, length, out_channels, dtype=dtype, device=x.device)
    tiles = conv_tiles(batch * length, channels, out_channels, x.element_size())
    unit, out_unit = _largest_unit(channels), _largest_unit(out_channels)
    _conv[(triton.cdiv(batch * length, tiles.rows), triton.cdiv(out_channels, tiles.outs))](
        x,
        weight,
        bias,
        out if residual is None else residual,
        out,
        batch * length,
        length,
        channels // unit,
        out_channels // out_unit,
        taps,
        left_padding,
        dilation,
        scale,
        int(residual is not None),
        int(is_adding),
        UNIT=unit,
        OUT_UNIT=out_unit,
        TILE_M=tiles.rows,
        TILE_N=tiles.outs,
        TILE_K=tiles.ins,
        ONE_TAP=channels % tiles.ins == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@dataclass(frozen=True)
class ConvTiles:
    """Tile sizes of a convolution, powers of two from 16 up, and launch options."""

    rows: int
    outs: int
    ins: int
    """Taps times channels per step."""
    warps: int
    stages: int


_LARGE = {
    768: ConvTiles(128, 256, 64, warps=8, stages=3),
    384: ConvTiles(128, 128, 64, warps=4, stages=3),
    192: ConvTiles(128, 256, 64, warps=8, stages=3),
    96: ConvTiles(128, 128, 32, warps=4, stages=4),
    24: ConvTiles(256, 32, 64, warps=8, stages=3),
}
_SMALL = {
    768: ConvTiles(64, 32, 128, warps=4, stages=4),
    384: ConvTiles(64, 64, 128, warps=4, stages=4),
    192: ConvTiles(64, 64, 64, warps=4, stages=5),
}
"""By channels, for two-byte values: the fastest of those tried on an H200, with 16 crops of 240 mel frames
and with one of 64. The widths are those of the 7B's residual layers, which take most of the time."""


def conv_tiles(num_rows: int, channels: int, out_channels: int, itemsize: int) -> ConvTiles:
    """num_rows: batch times length; itemsize: bytes per input value."""
    outs = max(16, min(128, triton.next_power_of_2(out_channels)))
    ins = max(16, min(64, triton.next_power_of_2(channels)))
    is_large = num_rows * triton.cdiv(out_channels, outs) >= 128 * 256
    if itemsize == 2 and channels == out_channels:
        measured = (_LARGE if is_large else _SMALL).get(channels)
        if measured is not None:
            return measured
    rows = 128 if is_large else 64
    return ConvTiles(rows, outs, ins, warps=8 if rows * outs >= 128 * 128 else 4, stages=3)


def _largest_unit(number: int) -> int:
    """The largest power of two up to 16 that divides `number`."""
    return min(16, number & -number)


def activation(
    x: torch.Tensor,
    turns: torch.Tensor,
    inverse_beta: torch.Tensor,
    taps: tuple[float, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Anti-aliased snake: x + sin(alpha x)^2 / beta at twice the rate. [batch, time, channels] as `dtype`.

    turns (alpha / pi), inverse_beta: float32 [channels]; taps: low-pass filter for both upsampling and
    downsampling.
    """
    batch, length, channels = x.shape
    out = torch.empty(batch, length, channels, dtype=dtype, device=x.device)
    num_threads = triton.cdiv(length, ACTIVATION_RUN) * channels
    _activation[(triton.cdiv(num_threads, ACTIVATION_TILE), batch)](
        x,
        turns,
        inverse_beta,
        out,
        length,
        channels,
        TAPS=taps,
        RUN=ACTIVATION_RUN,
        TILE=ACTIVATION_TILE,
        num_warps=ACTIVATION_WARPS,
    )
    return out


# No specialisation on arguments that vary by layer: each variant would be compiled.
@triton.jit(
    do_not_specialize=[
        "num_rows", "length", "channel_units", "out_units", "taps", "left_padding", "dilation", "scale",
        "has_residual", "is_adding",
    ]
)  # fmt: skip
def _conv(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    num_rows, length, channel_units, out_units, taps, left_padding, dilation, scale, has_residual, is_adding,
    UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    ONE_TAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes TILE_M rows (time steps of any items) by TILE_N output channels.

    The sum runs over taps and channels as one axis. With ONE_TAP, each step lies within one tap.
    """
    # Products let the compiler derive how wide row loads can be.
    channels, out_channels = channel_units * UNIT, out_units * OUT_UNIT
    depth = taps * channels
    first_row = tl.program_id(0) * TILE_M
    rows = tl.arange(0, TILE_M)
    outs = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    times = (first_row + rows) % length
    is_row = (first_row + rows < num_rows)[:, None]
    is_out = (outs < out_channels)[None, :]
    x_ptr += first_row.to(tl.int64) * channels
    accumulated = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, depth, TILE_K):
        place = first + tl.arange(0, TILE_K)
        if ONE_TAP:
            steps = channels // TILE_K
            shift = first // TILE_K // steps * dilation - left_padding
            channel = first // TILE_K % steps * TILE_K + tl.arange(0, TILE_K)
            offsets = (rows + shift)[:, None] * channels + channel[None, :]
            is_input = is_row & ((times + shift >= 0) & (times + shift < length))[:, None]
            weight_mask = is_out
        else:
            shift = (place // channels * dilation - left_padding)[None, :]
            offsets = (rows[:, None] + shift) * channels + (place % channels)[None, :]
            time = times[:, None] + shift
            is_input = is_row & (time >= 0) & (time < length) & (place < depth)[None, :]
            weight_mask = is_out & (place < depth)[:, None]
        x = tl.load(x_ptr + offsets, mask=is_input, other=0.0)
        weight_offsets = place[:, None] * out_channels + outs[None, :]
        weight = tl.load(weight_ptr + weight_offsets, mask=weight_mask, other=0.0)
        accumulated = tl.dot(x, weight, accumulated, input_precision=PRECISION)
    inside = is_row & is_out
    first_output = first_row.to(tl.int64) * out_channels
    offsets = rows[:, None] * out_channels + outs[None, :]
    accumulated += tl.load(bias_ptr + outs, mask=outs < out_channels, other=0.0)[None, :]
    if has_residual:
        accumulated += tl.load(residual_ptr + first_output + offsets, mask=inside, other=0.0).to(tl.float32)
    accumulated *= scale
    out_ptr += first_output
    if is_adding:
        accumulated += tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, accumulated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _snake(x, turns, inverse_beta):
    """x + sin(alpha x)^2 / beta with turns = alpha / pi. The square has period pi: reduce the angle to one
    period, where the fast sine is accurate to 1e-6; the exact sine takes most of the kernel's time."""
    # Near 1.5 * 2^23 float32 has no fractions, so the sum is rounded; floor would be as slow as the sine.
    whole = (x * turns + 12582912.0) - 12582912.0
    sine = libdevice.fast_sinf((x * turns - whole) * 3.141592653589793)
    return x + inverse_beta * sine * sine


@triton.jit
def _run_of_outputs(
    x_ptr, out_ptr, turns, inverse_beta, start, length, channels, inside,
    TAPS: tl.constexpr, RUN: tl.constexpr, AT_END: tl.constexpr,
):  # fmt: skip
    """Each thread computes outputs `start` to `start + RUN - 1` of one channel; the pointers are to that
    channel's first value.

    Output t uses upsampled samples 2t - 5 .. 2t + 6; sample 2p uses x[p - 3 .. p + 2], sample 2p + 1 uses
    x[p - 2 .. p + 3]. Both signals repeat their edge values beyond their ends, which AT_END handles.
    """
    inputs = ()  # x[start - 5 ..]
    for i in tl.static_range(RUN + 10):
        t = start + (i - 5)
        if AT_END:
            t = tl.minimum(tl.maximum(t, 0), length - 1)
        inputs += (tl.load(x_ptr + t * channels).to(tl.float32),)
    samples = ()  # from sample 2 * start - 5 on
    for j in tl.static_range(2 * RUN + 10):
        raised = (2.0 * TAPS[10 + j % 2]) * inputs[j // 2]
        for k in tl.static_range(1, 6):
            raised += (2.0 * TAPS[10 + j % 2 - 2 * k]) * inputs[j // 2 + k]
        sample = _snake(raised, turns, inverse_beta)
        if AT_END and j > 5:  # sample 2 * start and earlier ones precede the end
            sample = tl.where(2 * start + (j - 5) < 2 * length, sample, samples[j - 1])
        samples += (sample,)
    for r in tl.static_range(RUN):
        output = tl.zeros_like(turns)
        for m in tl.static_range(12):
            sample = samples[2 * r + m]
            if AT_END and 2 * r + m < 5:
                sample = tl.where(start == 0, samples[5], sample)
            output += TAPS[m] * sample
        output = output.to(out_ptr.dtype.element_ty)
        if AT_END:
            tl.store(out_ptr + (start + r) * channels, output, mask=inside & (start + r < length))
        else:
            tl.store(out_ptr + (start + r) * channels, output)


# One variant for all layers: knowing that sizes are multiples of 16 gains nothing here.
@triton.jit(do_not_specialize=["length", "channels"])
def _activation(
    x_ptr, turns_ptr, inverse_beta_ptr, out_ptr, length, channels,
    TAPS: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Neighbouring threads handle neighbouring channels, which are adjacent in memory, then the next run of
    outputs. A run needs 2 * RUN + 10 upsampled samples; a single output would need 12."""
    first = tl.program_id(0) * TILE
    index = first + tl.arange(0, TILE)
    channel = index % channels
    start = index // channels * RUN
    inside = index < tl.cdiv(length, RUN) * channels
    turns, inverse_beta = tl.load(turns_ptr + channel), tl.load(inverse_beta_ptr + channel)
    item = tl.program_id(1).to(tl.int64) * length * channels
    x, out = x_ptr + item + channel, out_ptr + item + channel
    lowest, highest = first // channels * RUN - 5, (first + TILE - 1) // channels * RUN + RUN + 4
    if (lowest >= 0) & (highest < length):  # inputs that this program reads
        _run_of_outputs(x, out, turns, inverse_beta, start, length, channels, inside, TAPS, RUN, AT_END=False)
    else:
        _run_of_outputs(x, out, turns, inverse_beta, start, length, channels, inside, TAPS, RUN, AT_END=True)
