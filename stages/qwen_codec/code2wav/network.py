"""The decoder network (`Qwen3OmniMoeCode2Wav`), computed step by step. Parameters have the checkpoint's
names.

Every layer is causal, so a step needs only the end of each layer's previous input. A transposed convolution
of a decoder block adds up pairs of positions. In a network without a lead, a zero precedes the first one. In
one with a lead, it drops the first one, which has no predecessor: its output begins with the second position.
Here it begins with the first, so that every step returns the same number of samples per frame. In the first
step of a stream, that output is undefined. The number of undefined values (`num_undefined`) grows from block
to block up to `CodecLayout.lead_samples`. Each convolution takes them for zeros, the padding of a single
pass.
"""

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from stages.qwen_codec.code2wav.state import Step, Streamed
from stages.qwen_codec.code2wav.transformer import Transformer
from stages.qwen_codec.codec_layout import CONV_KERNEL, UNIT_DILATIONS, lead_after


class Snake(nn.Module):
    """x + sin(a x)^2 / b; a and b per channel, as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 / (self.beta.exp() + 1e-9)
        return x + scale[:, None] * (x * self.alpha.exp()[:, None]).sin().square()


class CausalConv(Streamed):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int = CONV_KERNEL,
        dilation: int = 1,
        groups: int = 1,
        num_undefined: int = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, groups=groups)
        self._num_undefined = num_undefined
        self.state_shape = (in_channels, (kernel - 1) * dilation)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.conv(step.extended(self, x, num_undefined=self._num_undefined))


def _wrapped(conv: nn.Module) -> nn.Sequential:
    """Gives the weights the checkpoint's names."""
    return nn.Sequential(OrderedDict(conv=conv))


class OverlappingUpsample(Streamed):
    """Positions become `rate` positions each, which also depend on the position before."""

    def __init__(self, in_channels: int, out_channels: int, rate: int, *, num_undefined: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, 2 * rate, stride=rate)
        self._rate = rate
        self._num_undefined = num_undefined
        self.state_shape = (in_channels, 1)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        extended = step.extended(self, x, num_undefined=self._num_undefined)
        # The padding cuts off both ends, which lack one of their two positions.
        return F.conv_transpose1d(
            extended, self.conv.weight, self.conv.bias, stride=self._rate, padding=self._rate
        )


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        y = self.norm(self.dwconv(x, step).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int, *, num_undefined: int) -> None:
        super().__init__()
        self.act1 = Snake(channels)
        self.conv1 = CausalConv(channels, channels, dilation=dilation, num_undefined=num_undefined)
        self.act2 = Snake(channels)
        self.conv2 = _wrapped(nn.Conv1d(channels, channels, 1))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), step)))


class DecoderBlock(nn.Module):
    def __init__(self, in_channels: int, rate: int, *, undefined_in: int, undefined_out: int) -> None:
        super().__init__()
        channels = in_channels // 2
        upsample = OverlappingUpsample(in_channels, channels, rate, num_undefined=undefined_in)
        units = (ResidualUnit(channels, d, num_undefined=undefined_out) for d in UNIT_DILATIONS)
        self.block = nn.ModuleList((Snake(in_channels), upsample, *units))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        snake, *layers = self.block
        x = snake(x)
        for layer in layers:
            x = layer(x, step)
        return x


class Code2WavNetwork(nn.Module):
    """Qwen3-Omni's network. Those of other families sum up the embeddings of a frame's codes differently."""

    has_lead: ClassVar[bool] = True

    def __init__(self, config: Qwen3OmniMoeCode2WavConfig) -> None:
        super().__init__()
        code_width, width, transformer = self.parts(config)
        self.codebook_size: int = config.codebook_size
        self.num_codebooks: int = config.num_quantizers
        self.code_embedding = nn.Embedding(config.codebook_size * config.num_quantizers, code_width)
        self.pre_transformer = transformer
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                (_wrapped(nn.ConvTranspose1d(width, width, ratio, stride=ratio)), ConvNeXtBlock(width))
            )
            for ratio in config.upsampling_ratios
        )
        rates = tuple(config.upsample_rates)
        undefined = [lead_after(rates[:number]) if self.has_lead else 0 for number in range(len(rates) + 1)]
        channels = config.decoder_dim
        decoder: list[nn.Module] = [CausalConv(width, channels)]
        for rate, before, after in zip(rates, undefined, undefined[1:], strict=False):
            decoder.append(DecoderBlock(channels, rate, undefined_in=before, undefined_out=after))
            channels //= 2
        decoder += [Snake(channels), CausalConv(channels, 1, num_undefined=undefined[-1])]
        self.decoder = nn.ModuleList(decoder)

    def parts(self, config: Qwen3OmniMoeCode2WavConfig) -> tuple[int, int, Transformer]:
        """The widths of the codes' embeddings and of the transformer's output, and the transformer."""
        width = config.hidden_size
        return width, width, Transformer(config, head_dim=width // config.num_attention_heads)

    def frames(self, embedded: torch.Tensor, step: Step) -> torch.Tensor:
        """The transformer's input [num_streams, new frames, channels], of the embeddings of all codes
        [num_streams, new frames, codebooks, channels]."""
        return embedded.mean(2)

    def forward(self, codes: torch.Tensor, step: Step) -> torch.Tensor:
        """codes: int64 [num_streams, new frames, codebooks]. Returns samples in [-1, 1], [num_streams, new
        frames * samples per frame]. In a stream's first step, the first `CodecLayout.lead_samples` are
        undefined. Changes the state of the streams."""
        tables = torch.arange(self.num_codebooks, device=codes.device) * self.codebook_size
        x = self.frames(self.code_embedding(codes + tables), step)
        x = self.pre_transformer(x, step).transpose(1, 2)
        for pair in self.upsample:
            assert isinstance(pair, nn.ModuleList)
            upsample, block = pair
            x = block(upsample(x), step)
        first, *blocks, snake, last = self.decoder
        x = first(x, step)
        for block in blocks:
            x = block(x, step)
        return last(snake(x), step)[:, 0].clamp(-1, 1)
