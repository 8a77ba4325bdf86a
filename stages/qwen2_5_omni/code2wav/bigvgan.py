"""BigVGAN over the fused kernels of `vocoder_kernels`: the CUDA counterpart of transformers' module."""

import math
from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAMPBlock,
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from omni_server.errors import ConfigError
from stages.qwen2_5_omni.code2wav.vocoder_kernels import NUM_TAPS, activation, conv

MIN_DECIBELS = -115.0


@dataclass(frozen=True)
class _Conv:
    """weight: [taps, in channels, out channels]."""

    weight: torch.Tensor
    bias: torch.Tensor
    left_padding: int
    dilation: int = 1


@dataclass(frozen=True)
class _Snake:
    """float32 [channels] each."""

    turns: torch.Tensor
    """alpha / pi"""
    inverse_beta: torch.Tensor


@dataclass(frozen=True)
class _Block:
    """A residual block: pairs of (activation, convolution, activation, convolution)."""

    layers: tuple[tuple[_Snake, _Conv, _Snake, _Conv], ...]


class FusedBigVGAN:
    """The prepared vocoder. Products in `dtype` with float32 sums, everything between them float32.

    Keeps no reference to the module it was made from.
    """

    def __init__(self, bigvgan: Qwen2_5OmniToken2WavBigVGANModel, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._taps = _filter_taps(bigvgan)
        self._pre = _conv(bigvgan.conv_pre, dtype)
        self._ups = [_transposed(up[0], dtype) for up in bigvgan.ups]
        self._rates: list[int] = list(bigvgan.config.upsample_rates)
        blocks = [_block(block, dtype) for block in bigvgan.resblocks]
        count = bigvgan.num_residual_blocks
        self._levels = [blocks[i : i + count] for i in range(0, len(blocks), count)]
        self._snake_post = _snake(bigvgan.activation_post)
        self._post = _conv(bigvgan.conv_post, dtype)

    def synthesize(self, mel: torch.Tensor) -> torch.Tensor:
        """Waveforms, float32 [batch, num_frames * samples per frame] in [-1, 1].

        mel: float32 [batch, num_frames, mel_dim], natural logarithm of amplitude.
        """
        dtype = self._dtype
        x = self._apply(self._pre, _normalised(mel).to(dtype).contiguous(), dtype=dtype)
        for up, rate, blocks in zip(self._ups, self._rates, self._levels, strict=True):
            # A transposed convolution computes `rate` outputs per input: as many channels, side by side in
            # time.
            raised = self._apply(up, x.to(dtype), dtype=torch.float32)
            raised = raised.view(len(raised), -1, raised.shape[-1] // rate)
            x = self._mean_of(blocks, raised)
        x = activation(x, self._snake_post.turns, self._snake_post.inverse_beta, self._taps, dtype)
        return self._apply(self._post, x, dtype=torch.float32).squeeze(-1).clamp(-1.0, 1.0)

    def _mean_of(self, blocks: list[_Block], level: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor | None = None
        for block in blocks:
            x = level
            for number, (snake_1, conv_1, snake_2, conv_2) in enumerate(block.layers):
                inner = activation(x, snake_1.turns, snake_1.inverse_beta, self._taps, self._dtype)
                inner = self._apply(conv_1, inner, dtype=self._dtype)
                inner = activation(inner, snake_2.turns, snake_2.inverse_beta, self._taps, self._dtype)
                if number + 1 < len(block.layers):
                    x = self._apply(conv_2, inner, dtype=torch.float32, residual=x)
                else:
                    scale = 1.0 / len(blocks)
                    mean = self._apply(conv_2, inner, dtype=torch.float32, residual=x, out=mean, scale=scale)
        assert mean is not None
        return mean

    @staticmethod
    def _apply(
        layer: _Conv,
        x: torch.Tensor,
        *,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return conv(
            x,
            layer.weight,
            layer.bias,
            left_padding=layer.left_padding,
            dilation=layer.dilation,
            dtype=dtype,
            residual=residual,
            out=out,
            scale=scale,
        )


def _normalised(mel: torch.Tensor) -> torch.Tensor:
    """`process_mel_spectrogram` of transformers' module, which makes a tensor on the host and so cannot be
    recorded: decibels, of which -115 to 0 become -1 to 1."""
    decibels = 20 * torch.log10(mel.exp().clamp(min=10 ** (MIN_DECIBELS / 20))) - 20
    return (2 * (decibels - MIN_DECIBELS) / -MIN_DECIBELS - 1).clamp(-1.0, 1.0)


def _conv(module: torch.nn.Conv1d, dtype: torch.dtype) -> _Conv:
    weight = module.weight.detach().permute(2, 1, 0).to(dtype).contiguous()
    bias = weight.new_zeros(weight.shape[-1]) if module.bias is None else module.bias.detach()
    return _Conv(weight, bias.float().clone(), int(module.padding[0]), int(module.dilation[0]))


def _transposed(module: torch.nn.ConvTranspose1d, dtype: torch.dtype) -> _Conv:
    """Output `rate * n + r` sums input `n + q` times tap `r + padding - rate * q`: a convolution over q whose
    output channels are the `rate` phases r, one behind the other."""
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
    return _Conv(weight.flatten(2).to(dtype).contiguous(), bias, before)


def _snake(module: Qwen2_5OmniAntiAliasedActivation1d) -> _Snake:
    alpha, beta = module.act.alpha.detach().float().exp(), module.act.beta.detach().float().exp()
    return _Snake(alpha / math.pi, 1.0 / (beta + module.act.no_div_by_zero))


def _block(module: Qwen2_5OmniAMPBlock, dtype: torch.dtype) -> _Block:
    snakes = [_snake(part) for part in module.activations]
    convs_1 = [_conv(part, dtype) for part in module.convs1]
    convs_2 = [_conv(part, dtype) for part in module.convs2]
    return _Block(tuple(zip(snakes[::2], convs_1, snakes[1::2], convs_2, strict=True)))


def _filter_taps(bigvgan: Qwen2_5OmniToken2WavBigVGANModel) -> tuple[float, ...]:
    """All low-pass filters of the vocoder are the same one; otherwise the fused kernel would be wrong."""
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
