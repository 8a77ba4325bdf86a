"""BigVGAN on the fused kernels of `vocoder_kernels`: the CUDA counterpart of transformers' module."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAMPBlock,
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from omni_server.errors import ConfigError
from stages.qwen2_5_omni.code2wav.vocoder_kernels import NUM_TAPS, activation, conv

MIN_DECIBELS = -115.0

Layer = Callable[..., torch.Tensor]
"""`conv` or `activation` of `vocoder_kernels`, bound to one layer's weights."""


class FusedBigVGAN:
    """The prepared vocoder. Products are in `dtype` with float32 sums; everything else is float32.

    Keeps no reference to its source module.
    """

    def __init__(self, bigvgan: Qwen2_5OmniToken2WavBigVGANModel, dtype: torch.dtype) -> None:
        self._dtype = dtype
        taps = _filter_taps(bigvgan)
        self._pre = _conv(bigvgan.conv_pre, dtype)
        self._ups = [_transposed(up[0], dtype) for up in bigvgan.ups]
        self._rates: list[int] = list(bigvgan.config.upsample_rates)
        blocks = [_block(block, taps, dtype) for block in bigvgan.resblocks]
        count = bigvgan.num_residual_blocks
        self._levels = [blocks[i : i + count] for i in range(0, len(blocks), count)]
        self._snake_post = _snake(bigvgan.activation_post, taps)
        self._post = _conv(bigvgan.conv_post, dtype)

    def synthesize(self, mel: torch.Tensor) -> torch.Tensor:
        """Returns float32 [batch, num_frames * samples per frame] in [-1, 1].

        mel: float32 [batch, num_frames, mel_dim], natural logarithm of amplitude.
        """
        dtype = self._dtype
        x = self._pre(_normalised(mel).to(dtype).contiguous(), dtype=dtype)
        for up, rate, blocks in zip(self._ups, self._rates, self._levels, strict=True):
            # A transposed convolution computes `rate` outputs per input as adjacent channels.
            raised = up(x.to(dtype), dtype=torch.float32)
            x = self._mean_of(blocks, raised.view(len(raised), -1, raised.shape[-1] // rate))
        return self._post(self._snake_post(x, dtype=dtype), dtype=torch.float32).squeeze(-1).clamp(-1.0, 1.0)

    def _mean_of(self, blocks: list[list[Sequence[Layer]]], level: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor | None = None
        for block in blocks:
            x = level
            for number, (snake_1, conv_1, snake_2, conv_2) in enumerate(block):
                inner = conv_1(snake_1(x, dtype=self._dtype), dtype=self._dtype)
                inner = snake_2(inner, dtype=self._dtype)
                if number + 1 < len(block):
                    x = conv_2(inner, dtype=torch.float32, residual=x)
                else:
                    mean = conv_2(inner, dtype=torch.float32, residual=x, out=mean, scale=1.0 / len(blocks))
        assert mean is not None
        return mean


def _normalised(mel: torch.Tensor) -> torch.Tensor:
    """`process_mel_spectrogram` of transformers' module, which CUDA graphs cannot record: it makes a tensor
    on the host. Maps decibels in [-115, 0] to [-1, 1]."""
    decibels = 20 * torch.log10(mel.exp().clamp(min=10 ** (MIN_DECIBELS / 20))) - 20
    return (2 * (decibels - MIN_DECIBELS) / -MIN_DECIBELS - 1).clamp(-1.0, 1.0)


def _conv(module: torch.nn.Conv1d, dtype: torch.dtype) -> Layer:
    weight = module.weight.detach().permute(2, 1, 0).to(dtype).contiguous()
    bias = weight.new_zeros(weight.shape[-1]) if module.bias is None else module.bias.detach()
    left_padding, dilation = int(module.padding[0]), int(module.dilation[0])
    return partial(
        conv, weight=weight, bias=bias.float().clone(), left_padding=left_padding, dilation=dilation
    )


def _transposed(module: torch.nn.ConvTranspose1d, dtype: torch.dtype) -> Layer:
    """Output `rate * n + r` sums input `n + q` times tap `r + padding - rate * q`: a convolution over q whose
    output channels are the concatenated `rate` phases r."""
    source = module.weight.detach()  # [in channels, out channels, taps]
    rate, padding, num_taps = int(module.stride[0]), int(module.padding[0]), source.shape[2]
    if num_taps - 2 * padding != rate:
        raise ConfigError(
            f"the vocoder's upsampling of {rate} by {num_taps} taps does not keep its input's grid"
        )
    before = (num_taps - 1 - padding) // rate
    behind = (rate - 1 + padding) // rate
    weight = source.new_zeros(before + behind + 1, source.shape[0], rate, source.shape[1])
    for shift in range(-before, behind + 1):
        for phase in range(rate):
            tap = phase + padding - rate * shift
            if 0 <= tap < num_taps:
                weight[shift + before, :, phase] = source[:, :, tap]
    assert module.bias is not None
    bias = module.bias.detach().float().repeat(rate)
    return partial(conv, weight=weight.flatten(2).to(dtype).contiguous(), bias=bias, left_padding=before)


def _snake(module: Qwen2_5OmniAntiAliasedActivation1d, taps: tuple[float, ...]) -> Layer:
    alpha, beta = module.act.alpha.detach().float().exp(), module.act.beta.detach().float().exp()
    inverse_beta = 1.0 / (beta + module.act.no_div_by_zero)
    return partial(activation, turns=alpha / math.pi, inverse_beta=inverse_beta, taps=taps)


def _block(module: Qwen2_5OmniAMPBlock, taps: tuple[float, ...], dtype: torch.dtype) -> list[Sequence[Layer]]:
    """A block's layers as (activation, conv, activation, conv) tuples."""
    snakes = [_snake(part, taps) for part in module.activations]
    convs_1 = [_conv(part, dtype) for part in module.convs1]
    convs_2 = [_conv(part, dtype) for part in module.convs2]
    return list(zip(snakes[::2], convs_1, snakes[1::2], convs_2, strict=True))


def _filter_taps(bigvgan: Qwen2_5OmniToken2WavBigVGANModel) -> tuple[float, ...]:
    """Raises `ConfigError` unless all low-pass filters are equal, as the fused kernel assumes."""
    filters = [
        part.filter.flatten()
        for module in bigvgan.modules()
        if isinstance(module, Qwen2_5OmniAntiAliasedActivation1d)
        for part in (module.upsample, module.downsample)
    ]
    taps = filters[0].cpu()
    if len(taps) != NUM_TAPS or not all(torch.equal(taps, other.cpu()) for other in filters):
        raise ConfigError(
            "the vocoder's low-pass filters differ from each other: the fused kernels do not fit it"
        )
    return tuple(taps.tolist())
