"""BigVGAN's two operations as Triton kernels, on channels-last tensors [batch, time, channels].

A convolution is a matrix product that reads its input at shifted rows, with what follows it (bias, residual, mean over
the residual blocks) done before the result is written. An activation (upsampling, snake, downsampling: 12 taps each)
is one pass instead of five.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

NUM_TAPS = 12
"""Of the activation's low-pass filters (`Qwen2_5OmniAntiAliasedActivation1d`); the kernel is written for it."""


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
    """`scale * (conv(x) + bias + residual)`, added to `out` if that is given; [batch, time, out channels].

    x: [batch, time, in channels]; weight: [taps, in channels, out channels] of the same type; bias: float32 [out
    channels]; residual: of type `dtype`. The input counts as 0
    beyond its ends; the output is as long as the input.
    """
    batch, length, channels = x.shape
    taps, _, out_channels = weight.shape
    is_adding = out is not None
    if out is None:
        out = torch.empty(batch, length, out_channels, dtype=dtype, device=x.device)
    tile_n = max(16, min(128, triton.next_power_of_2(out_channels)))
    tile_k = max(16, min(64, triton.next_power_of_2(channels)))
    tile_m = 128 if batch * length * triton.cdiv(out_channels, tile_n) >= 128 * 256 else 64
    _conv[(batch * triton.cdiv(length, tile_m), triton.cdiv(out_channels, tile_n))](
        x,
        weight,
        bias,
        out if residual is None else residual,
        out,
        length,
        channels,
        out_channels,
        taps,
        left_padding,
        dilation,
        scale,
        int(residual is not None),
        int(is_adding),
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=8 if tile_m * tile_n >= 128 * 128 else 4,
        num_stages=3,
    )
    return out


def activation(
    x: torch.Tensor, turns: torch.Tensor, inverse_beta: torch.Tensor, taps: tuple[float, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Anti-aliased snake: x + sin(alpha x)^2 / beta at twice the rate. [batch, time, channels] as `dtype`.

    turns (alpha / pi), inverse_beta: float32 [channels]; taps: of the low-pass filter, which is the same for
    upsampling and downsampling.
    """
    batch, length, channels = x.shape
    out = torch.empty(batch, length, channels, dtype=dtype, device=x.device)
    tile_c = min(64, triton.next_power_of_2(channels))
    tile_t = 1024 // tile_c
    _activation[(batch * triton.cdiv(length, tile_t), triton.cdiv(channels, tile_c))](
        x, turns, inverse_beta, out, length, channels, *taps, TILE_T=tile_t, TILE_C=tile_c, num_warps=4
    )
    return out


# What varies from layer to layer is not specialised on: each variant would be compiled.
@triton.jit(do_not_specialize=["length", "taps", "left_padding", "dilation", "scale", "has_residual", "is_adding"])
def _conv(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    length, channels, out_channels, taps, left_padding, dilation, scale, has_residual, is_adding,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_per_item = tl.cdiv(length, TILE_M)
    item = tl.program_id(0) // tiles_per_item
    times = (tl.program_id(0) % tiles_per_item) * TILE_M + tl.arange(0, TILE_M)
    outs = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    ins = tl.arange(0, TILE_K)
    item_rows = item.to(tl.int64) * length
    accumulated = tl.zeros([TILE_M, TILE_N], tl.float32)
    steps = tl.cdiv(channels, TILE_K)
    for i in range(taps * steps):
        tap = i // steps
        channel = (i % steps) * TILE_K + ins
        rows = times + tap * dilation - left_padding
        x = tl.load(
            x_ptr + (item_rows + rows)[:, None] * channels + channel[None, :],
            mask=((rows >= 0) & (rows < length))[:, None] & (channel < channels)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + (tap * channels + channel)[:, None] * out_channels + outs[None, :],
            mask=(channel < channels)[:, None] & (outs < out_channels)[None, :],
            other=0.0,
        )
        accumulated = tl.dot(x, weight, accumulated, input_precision=PRECISION)
    inside = (times < length)[:, None] & (outs < out_channels)[None, :]
    offsets = (item_rows + times)[:, None] * out_channels + outs[None, :]
    accumulated += tl.load(bias_ptr + outs, mask=outs < out_channels, other=0.0)[None, :]
    accumulated += tl.load(residual_ptr + offsets, mask=inside & (has_residual != 0), other=0.0).to(tl.float32)
    accumulated *= scale
    accumulated += tl.load(out_ptr + offsets, mask=inside & (is_adding != 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, accumulated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _snake(x, turns, inverse_beta):
    """x + sin(alpha x)^2 / beta with turns = alpha / pi. The square has period pi: the angle is brought into one
    period, where the fast sine is right to 1e-6; the exact one takes most of the kernel's time."""
    angle = x * turns
    angle -= tl.floor(angle + 0.5)
    sine = libdevice.fast_sinf(angle * 3.141592653589793)
    return x + inverse_beta * sine * sine


@triton.jit(do_not_specialize=["length"])
def _activation(
    x_ptr, turns_ptr, inverse_beta_ptr, out_ptr, length, channels,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11,
    TILE_T: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Sample 2p of the upsampled signal is made of x[p - 3 .. p + 2], sample 2p + 1 of x[p - 2 .. p + 3]; output t of
    upsampled samples 2t - 5 .. 2t + 6. Beyond their ends both signals repeat their last value."""
    tiles_per_item = tl.cdiv(length, TILE_T)
    item = tl.program_id(0) // tiles_per_item
    t = ((tl.program_id(0) % tiles_per_item) * TILE_T + tl.arange(0, TILE_T))[:, None]
    c = (tl.program_id(1) * TILE_C + tl.arange(0, TILE_C))[None, :]
    inside = (t < length) & (c < channels)
    here = c < channels
    x = x_ptr + item.to(tl.int64) * length * channels + c
    a = tl.load(turns_ptr + c, mask=here, other=0.0)
    b = tl.load(inverse_beta_ptr + c, mask=here, other=0.0)
    last = length - 1

    m5 = tl.load(x + tl.minimum(tl.maximum(t - 5, 0), last) * channels, mask=here, other=0.0).to(tl.float32)
    m4 = tl.load(x + tl.minimum(tl.maximum(t - 4, 0), last) * channels, mask=here, other=0.0).to(tl.float32)
    m3 = tl.load(x + tl.minimum(tl.maximum(t - 3, 0), last) * channels, mask=here, other=0.0).to(tl.float32)
    m2 = tl.load(x + tl.minimum(tl.maximum(t - 2, 0), last) * channels, mask=here, other=0.0).to(tl.float32)
    m1 = tl.load(x + tl.minimum(tl.maximum(t - 1, 0), last) * channels, mask=here, other=0.0).to(tl.float32)
    z0 = tl.load(x + tl.minimum(t, last) * channels, mask=here, other=0.0).to(tl.float32)
    p1 = tl.load(x + tl.minimum(t + 1, last) * channels, mask=here, other=0.0).to(tl.float32)
    p2 = tl.load(x + tl.minimum(t + 2, last) * channels, mask=here, other=0.0).to(tl.float32)
    p3 = tl.load(x + tl.minimum(t + 3, last) * channels, mask=here, other=0.0).to(tl.float32)
    p4 = tl.load(x + tl.minimum(t + 4, last) * channels, mask=here, other=0.0).to(tl.float32)
    p5 = tl.load(x + tl.minimum(t + 5, last) * channels, mask=here, other=0.0).to(tl.float32)

    # The first and the last upsampled sample, which stand for what lies beyond them.
    x0 = tl.load(x, mask=here, other=0.0).to(tl.float32)
    x1 = tl.load(x + tl.minimum(1, last) * channels, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(x + tl.minimum(2, last) * channels, mask=here, other=0.0).to(tl.float32)
    y0 = tl.load(x + last * channels, mask=here, other=0.0).to(tl.float32)
    y1 = tl.load(x + tl.maximum(last - 1, 0) * channels, mask=here, other=0.0).to(tl.float32)
    y2 = tl.load(x + tl.maximum(last - 2, 0) * channels, mask=here, other=0.0).to(tl.float32)
    s_first = _snake(2.0 * ((f11 + f9 + f7 + f5) * x0 + f3 * x1 + f1 * x2), a, b)
    s_last = _snake(2.0 * (f10 * y2 + f8 * y1 + (f6 + f4 + f2 + f0) * y0), a, b)

    s = _snake(2.0 * (f10 * m5 + f8 * m4 + f6 * m3 + f4 * m2 + f2 * m1 + f0 * z0), a, b)  # 2t - 5
    y = f0 * tl.where(t < 3, s_first, s)
    s = _snake(2.0 * (f11 * m5 + f9 * m4 + f7 * m3 + f5 * m2 + f3 * m1 + f1 * z0), a, b)  # 2t - 4
    y += f1 * tl.where(t < 2, s_first, s)
    s = _snake(2.0 * (f10 * m4 + f8 * m3 + f6 * m2 + f4 * m1 + f2 * z0 + f0 * p1), a, b)  # 2t - 3
    y += f2 * tl.where(t < 2, s_first, s)
    s = _snake(2.0 * (f11 * m4 + f9 * m3 + f7 * m2 + f5 * m1 + f3 * z0 + f1 * p1), a, b)  # 2t - 2
    y += f3 * tl.where(t < 1, s_first, s)
    s = _snake(2.0 * (f10 * m3 + f8 * m2 + f6 * m1 + f4 * z0 + f2 * p1 + f0 * p2), a, b)  # 2t - 1
    y += f4 * tl.where(t < 1, s_first, s)
    s = _snake(2.0 * (f11 * m3 + f9 * m2 + f7 * m1 + f5 * z0 + f3 * p1 + f1 * p2), a, b)  # 2t
    y += f5 * s
    s = _snake(2.0 * (f10 * m2 + f8 * m1 + f6 * z0 + f4 * p1 + f2 * p2 + f0 * p3), a, b)  # 2t + 1
    y += f6 * s
    s = _snake(2.0 * (f11 * m2 + f9 * m1 + f7 * z0 + f5 * p1 + f3 * p2 + f1 * p3), a, b)  # 2t + 2
    y += f7 * tl.where(t + 1 > last, s_last, s)
    s = _snake(2.0 * (f10 * m1 + f8 * z0 + f6 * p1 + f4 * p2 + f2 * p3 + f0 * p4), a, b)  # 2t + 3
    y += f8 * tl.where(t + 1 > last, s_last, s)
    s = _snake(2.0 * (f11 * m1 + f9 * z0 + f7 * p1 + f5 * p2 + f3 * p3 + f1 * p4), a, b)  # 2t + 4
    y += f9 * tl.where(t + 2 > last, s_last, s)
    s = _snake(2.0 * (f10 * z0 + f8 * p1 + f6 * p2 + f4 * p3 + f2 * p4 + f0 * p5), a, b)  # 2t + 5
    y += f10 * tl.where(t + 2 > last, s_last, s)
    s = _snake(2.0 * (f11 * z0 + f9 * p1 + f7 * p2 + f5 * p3 + f3 * p4 + f1 * p5), a, b)  # 2t + 6
    y += f11 * tl.where(t + 3 > last, s_last, s)
    out = out_ptr + item.to(tl.int64) * length * channels + t * channels + c
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)
